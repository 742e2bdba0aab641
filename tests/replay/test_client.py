"""What one streamed answer means, whoever the server is."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from itertools import count
from typing import Any

import httpx
import pytest

from talaria_replay.live.client import Answer, Client

END = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
WORD = {"choices": [{"index": 0, "delta": {"content": "x"}}]}


def delta(**fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields}]}


async def at_once() -> None:
    pass


async def answer(
    *events: Any, cut: int = 1 << 20, then: Callable[[], Awaitable[object]] = at_once, deadline_s: float = 1e6
) -> Answer:
    """Of a server that sends these events, `cut` bytes at a time, then awaits `then`; its clock ticks once a reading."""
    text = "".join(f"data: {e if isinstance(e, str) else json.dumps(e, ensure_ascii=False)}\r\n\r\n" for e in events)
    data = text.encode()

    async def body() -> Any:
        for at in range(0, len(data), cut):
            yield data[at : at + cut]
        await then()

    transport = httpx.MockTransport(lambda _: httpx.Response(200, content=body()))
    ticks = count(1.0)
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:
        client = Client(http, plain=True, deadline_s=deadline_s, now=lambda: next(ticks))
        return await client.call(client.encode("m", [{"role": "user", "content": "hello"}], 8), "s")


@pytest.mark.parametrize("cut", [1, 7, 1 << 20])
async def test_an_answer_may_hold_every_kind_of_line_end(cut: int) -> None:
    text = "a\u2028b\u2029c\x85d\x0be\x0cf\x1cg\r\nh"
    got = await answer(delta(content=text), END, "[DONE]", cut=cut)
    assert (got.error, got.text) == ("", text)


@pytest.mark.parametrize(
    "first", [{"reasoning_content": "hm"}, {"reasoning": "hm"}, {"tool_calls": [{"index": 0, "id": "a"}]}]
)
async def test_the_first_token_is_the_first_of_any_kind(first: dict[str, Any]) -> None:
    plain = await answer(delta(role="assistant", content=""), WORD, END, "[DONE]")
    other = await answer(delta(role="assistant", content=""), delta(**first), WORD, END, "[DONE]")
    assert other.first == plain.first
    assert (other.text, other.completion_tokens) == ("x", 2)


async def test_a_stream_without_a_token_is_a_failed_call() -> None:
    got = await answer(delta(role="assistant", content=""), "[DONE]")
    assert got.error == "the stream ended without a token"


async def test_an_answer_of_no_tokens_has_its_end_for_its_first() -> None:
    """A model may stop at once: the server said so, and its answer is empty."""
    got = await answer(delta(role="assistant", content=""), END, "[DONE]")
    assert (got.error, got.text, got.completion_tokens) == ("", "", 0)
    assert 0 < got.sent < got.first < got.done


@pytest.mark.parametrize("reason", ["abort", "error"])
async def test_an_answer_that_the_server_gave_up_is_a_failed_call(reason: str) -> None:
    end = {"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]}
    got = await answer(WORD, end, "[DONE]")
    assert got.error == f"the stream ended with finish_reason {reason!r}"


async def cut_off() -> None:
    raise httpx.RemoteProtocolError("peer closed connection without sending complete message body")


@pytest.mark.parametrize("then", [at_once, asyncio.Event().wait, cut_off])
async def test_a_call_is_done_when_the_server_says_so(then: Callable[[], Awaitable[object]]) -> None:
    """The body may stay open behind it, or be cut off."""
    plain = await answer(WORD, END, "[DONE]")
    got = await answer(WORD, END, "[DONE]", then=then)
    assert (got.error, got.text, got.done) == ("", "x", plain.done)


@pytest.mark.parametrize("then", [at_once, cut_off])
async def test_an_answer_without_done_is_done_with_its_finish_reason(then: Callable[[], Awaitable[object]]) -> None:
    got = await answer(WORD, END, then=then)
    assert (got.error, got.text) == ("", "x")


async def test_an_answer_that_is_cut_off_is_a_failed_call() -> None:
    got = await answer(WORD, then=cut_off)
    assert got.error == "peer closed connection without sending complete message body"


async def test_the_wait_behind_an_answer_is_in_no_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("talaria_replay.live.client.DRAIN_S", 60.0)
    got = await answer(WORD, END, "[DONE]", then=asyncio.Event().wait, deadline_s=0.2)
    assert (got.error, got.text) == ("", "x")


async def test_an_event_without_data_says_nothing() -> None:
    got = await answer("", WORD, "", END, "[DONE]")
    assert (got.error, got.text) == ("", "x")


@pytest.mark.parametrize("event", ["5", '["x"]', '{"choices": 5}', '{"choices": [5]}', '{"usage": 5}', "{"])
async def test_what_is_no_chunk_fails_the_call(event: str) -> None:
    got = await answer(event, WORD, END, "[DONE]")
    assert got.error.startswith("the stream holds what is no chunk")


@pytest.mark.parametrize(
    ("details", "cached", "reported"),
    [({}, 0, False), (None, 0, False), ({"cached_tokens": 0}, 0, True), ({"cached_tokens": 7}, 7, True)],
)
async def test_a_server_that_reports_no_cache_is_told_from_one_that_had_nothing(
    details: dict[str, int] | None, cached: int, reported: bool
) -> None:
    usage = {"prompt_tokens": 9, "completion_tokens": 1, "prompt_tokens_details": details}
    got = await answer(WORD, END, {"choices": [], "usage": usage}, "[DONE]")
    assert (got.cached_tokens, got.cache_reported) == (cached, reported)
