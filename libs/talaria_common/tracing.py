"""W3C trace context: from HTTP through the bus into every part's logs. Spans themselves are left to OpenTelemetry.

https://www.w3.org/TR/trace-context/
"""

from __future__ import annotations

import random
import re
import secrets
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

from talaria_common.wire.base import TRACE_HEADER

_ids = random.Random(secrets.randbits(128))  # noqa: S311 - ids need no secrecy
"""The system's own generator would cost a system call per id."""
_HEADER = re.compile(
    r"(?P<version>[0-9a-f]{2})-(?P<trace>[0-9a-f]{32})-(?P<span>[0-9a-f]{16})-(?P<flags>[0-9a-f]{2})(?P<more>-.*)?"
)


class TraceContext(NamedTuple):
    """Where in which trace we are."""

    trace_id: str
    """32 hex digits, not all zero."""
    span_id: str
    """16 hex digits, not all zero."""
    sampled: bool = True

    def child(self) -> TraceContext:
        """A span of this one's."""
        return self._replace(span_id=_random_id(8))

    def header(self) -> str:
        """The value of `traceparent`."""
        return f"00-{self.trace_id}-{self.span_id}-{'01' if self.sampled else '00'}"


def new(*, sampled: bool = True) -> TraceContext:
    """The root of a new trace."""
    return TraceContext(_random_id(16), _random_id(8), sampled)


def parse(header: str | None) -> TraceContext | None:
    """The context in a `traceparent` header; None if there is none or it is not valid (then start a `new` one)."""
    match = _HEADER.fullmatch(header.strip()) if header else None
    if match is None or match["version"] == "ff" or (match["version"] == "00" and match["more"]):
        return None
    if not int(match["trace"], 16) or not int(match["span"], 16):
        return None
    return TraceContext(match["trace"], match["span"], bool(int(match["flags"], 16) & 1))


def of_message(headers: Mapping[str, str]) -> TraceContext:
    """A span under the one that a bus message or HTTP request carries, else the root of a new trace."""
    parent = parse(headers.get(TRACE_HEADER))
    return parent.child() if parent is not None else new()


_current: ContextVar[TraceContext | None] = ContextVar("talaria_trace", default=None)


def current() -> TraceContext | None:
    """The context that this task works under."""
    return _current.get()


@contextmanager
def under(context: TraceContext) -> Iterator[TraceContext]:
    """Work under `context`; tasks started inside inherit it."""
    token = _current.set(context)
    try:
        yield context
    finally:
        _current.reset(token)


def with_trace(headers: Mapping[str, str] | None = None) -> dict[str, str]:
    """`headers` for a bus request with the current context added, if there is one."""
    context = _current.get()
    return {**(headers or {}), **({TRACE_HEADER: context.header()} if context else {})}


def add_to_log(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """A structlog processor: the trace and span ids of the current context."""
    context = _current.get()
    if context is not None:
        event.setdefault("trace_id", context.trace_id)
        event.setdefault("span_id", context.span_id)
    return event


def _random_id(size: int) -> str:
    while not (value := _ids.getrandbits(8 * size)):
        continue
    return f"{value:0{2 * size}x}"
