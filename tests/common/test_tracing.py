from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from talaria_common import tracing
from talaria_common.tracing import TraceContext, parse

HEADER = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
hexes = st.integers(1, 2**64 - 1)


@given(hexes, hexes, st.booleans())
def test_a_header_is_read_as_it_was_written(trace: int, span: int, sampled: bool):
    context = TraceContext(f"{trace:032x}", f"{span:016x}", sampled)
    assert parse(context.header()) == context


def test_the_example_of_the_standard():
    assert parse(HEADER) == TraceContext("4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7", True)
    assert parse(HEADER[:-2] + "00") == TraceContext("4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7", False)


def test_a_later_version_may_say_more():
    assert parse("01" + HEADER[2:] + "-more") == parse(HEADER)


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "x",
        "ff" + HEADER[2:],
        HEADER + "-more",
        HEADER.upper(),
        HEADER[:-3],
        "00-" + "0" * 32 + HEADER[35:],
        HEADER[:36] + "0" * 16 + "-01",
    ],
)
def test_what_is_not_valid_is_none(header: str | None):
    assert parse(header) is None


def test_a_child_stays_in_the_trace():
    root = tracing.new()
    child = root.child()
    assert child.trace_id == root.trace_id
    assert child.span_id != root.span_id
    assert tracing.of_message({"traceparent": root.header()}).trace_id == root.trace_id
    assert tracing.of_message({"traceparent": "broken"}).trace_id != root.trace_id


async def test_the_context_follows_tasks_and_headers_and_logs():
    assert tracing.current() is None
    assert tracing.with_trace({"A": "b"}) == {"A": "b"}
    context = tracing.new()
    with tracing.under(context):
        task = asyncio.create_task(asyncio.sleep(0, tracing.with_trace({"A": "b"})))
        assert tracing.add_to_log(None, "", {"event": "x"})["trace_id"] == context.trace_id
    assert tracing.current() is None
    assert await task == {"A": "b", "traceparent": context.header()}
    assert tracing.add_to_log(None, "", {"event": "x"}) == {"event": "x"}
