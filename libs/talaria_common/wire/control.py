"""Control of instances, and events."""

from __future__ import annotations

from typing import Any

from talaria_common.wire.base import Int, Wire
from talaria_common.wire.error import ErrorInfo


class ControlRequest(Wire, frozen=True, kw_only=True):
    """To an instance: health, open, close (with `model`), drain or resume."""

    model: str | None = None
    deadline_ms: Int = 0
    """Absolute UTC ms; 0: none. A later command is refused (NATS delivers late after a reconnect)."""


class ControlReply(Wire, frozen=True, kw_only=True):
    """What the instance made of it."""

    ok: bool
    iid: str
    epoch: str
    status: str = ""
    error: ErrorInfo | None = None


class Event(Wire, frozen=True, kw_only=True):
    """Something that happened. `data` is flat, documented per kind in docs/events.md."""

    kind: str
    source: str
    at_ms: Int
    data: dict[str, Any] = {}
