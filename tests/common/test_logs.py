from __future__ import annotations

import io
import json
import logging
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import structlog

from talaria_common import logs, tracing
from talaria_common.settings import LogSettings, SettingsError


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    root = logging.getLogger()
    before = root.handlers[:], root.level
    monkeypatch.delenv("TALARIA_LOG", raising=False)
    yield
    logging.captureWarnings(False)
    root.handlers[:], level = before
    root.setLevel(level)
    structlog.reset_defaults()


def lines(stream: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_structlog_and_stdlib_come_out_alike_with_part_epoch_and_trace():
    stream = io.StringIO()
    logs.setup("router-0", LogSettings(), epoch="abc", stream=stream)
    with tracing.under(tracing.new()) as context:
        structlog.get_logger("mine").info("placed", rid="r1")
    logging.getLogger("theirs").warning("slow %s", "thing", extra={"ms": 3})
    mine, theirs = lines(stream)
    assert mine | {"timestamp": ""} == {
        "event": "placed",
        "rid": "r1",
        "level": "info",
        "part": "router-0",
        "epoch": "abc",
        "trace_id": context.trace_id,
        "span_id": context.span_id,
        "timestamp": "",
    }
    assert (theirs["event"], theirs["level"], theirs["part"], theirs["ms"]) == ("slow thing", "warning", "router-0", 3)


def test_the_level_counts_for_both():
    stream = io.StringIO()
    logs.setup("x", LogSettings(level="warning"), stream=stream)
    structlog.get_logger().info("no")
    logging.getLogger("t").info("no")
    structlog.get_logger().warning("yes")
    assert [line["event"] for line in lines(stream)] == ["yes"]


def test_exceptions_and_warnings_are_in_the_line():
    stream = io.StringIO()
    logs.setup("x", LogSettings(), stream=stream)
    try:
        raise RuntimeError("broken")  # noqa: TRY301 - to have one to log
    except RuntimeError:
        structlog.get_logger().exception("failed")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("careful", UserWarning, stacklevel=1)
    failed, warned = lines(stream)
    assert "broken" in json.dumps(failed["exception"])
    assert "careful" in str(warned["event"])


@pytest.mark.parametrize("form", ["json", "console"])
def test_a_traceback_does_not_tell_what_was_in_the_call(form: Any):
    stream = io.StringIO()
    logs.setup("x", LogSettings(format=form), stream=stream)
    prompt = "my secret"
    try:
        raise RuntimeError(f"broken with {len(prompt)} characters")  # noqa: TRY301 - to have one to log
    except RuntimeError:
        structlog.get_logger().exception("failed")
    assert "RuntimeError" in stream.getvalue()
    assert prompt not in stream.getvalue()


def test_a_console_is_for_people():
    stream = io.StringIO()
    logs.setup("x", LogSettings(format="console"), stream=stream)
    structlog.get_logger().info("hello", who="you")
    assert "hello" in stream.getvalue()
    assert not stream.getvalue().startswith("{")


@pytest.mark.parametrize("text", ["debug,json", "json, DEBUG"])
def test_the_variable_overrides(monkeypatch: pytest.MonkeyPatch, text: str):
    monkeypatch.setenv("TALARIA_LOG", text)
    stream = io.StringIO()
    logs.setup("x", LogSettings(level="error", format="console"), stream=stream)
    structlog.get_logger().debug("seen")
    assert [line["event"] for line in lines(stream)] == ["seen"]


def test_a_wrong_variable_says_what_was_expected(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TALARIA_LOG", "loud")
    with pytest.raises(SettingsError, match=r"TALARIA_LOG = 'loud'.*debug, info"):
        logs.setup("x", LogSettings())
