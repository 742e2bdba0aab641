"""The events an instance publishes: flat data per kind, documented in docs/events.md."""

from __future__ import annotations

from typing import Any

import msgspec

from talaria_common.clock import to_ms
from talaria_common.subjects import event
from talaria_common.wire import Completion, Event, ForwardHead
from talaria_common.wire.error import ErrorInfo
from talaria_gpu.engine.contract import SwitchTiming
from talaria_gpu.engine.ipc import SlotEnded
from talaria_instance.messages import Publish

SWITCH_PHASES = ("save_ms", "open_ms", "kv_ms", "runtime_ms", "publish_ms")
"""Names of the five phases in order (appendix D)."""


def make(now: float, kind: str, iid: str, data: dict[str, Any]) -> Publish:
    """An event of `kind`."""
    return Publish(event(kind, iid), Event(kind=kind, source=iid, at_ms=to_ms(now), data=data))


def forward(head: ForwardHead, error: ErrorInfo | None, queued: int, trace: str) -> dict[str, Any]:
    """A forward was accepted or rejected."""
    place = head.placement
    data: dict[str, Any] = {
        "rid": place.fence.rid,
        "attempt": place.fence.attempt,
        "accepted": error is None,
        "tenant": head.tenant,
        "session": head.session,
        "model": head.model,
        "endpoint": head.endpoint,
        "api": head.api,
        "router": place.router,
        "seq": place.seq,
        "via": place.via,
        "queued": queued,
    }
    if error is not None:
        data |= {"code": error.code, "message": error.message}
    if trace:
        data["trace"] = trace
    return data


def completion(message: Completion, finish: str, code: str) -> dict[str, Any]:
    """A call ended: the completion's fields, `finish` and, for a failure, `code`."""
    data: dict[str, Any] = msgspec.to_builtins(message) | {"ok": message.ok, "finish": finish}
    del data["at_ms"]  # the event says it
    return data | ({"code": code} if code else {})


def switch(timing: SwitchTiming) -> dict[str, Any]:
    """One SWITCH_TIMING record of one rank; of several, the logical switch with each rank's record in `ranks`."""
    data: dict[str, Any] = {
        name: getattr(timing, name) for name in SwitchTiming.__struct_fields__ if name not in {"phases_ms", "ranks"}
    }
    if timing.ranks:
        data["ranks"] = [switch(rank) for rank in timing.ranks]
    return data | dict(zip(SWITCH_PHASES, timing.phases_ms, strict=True))


def round_(slot: SlotEnded) -> dict[str, Any]:
    """A slot ended."""
    return {name: getattr(slot, name) for name in SlotEnded.__struct_fields__}
