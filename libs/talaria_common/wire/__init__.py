"""Schemas of everything that crosses the bus, protocol v1.

JSON, so that a tap is readable. Schemas grow only by addition: a new field has a default, unknown fields are ignored,
so a rolling upgrade may mix versions. msgspec structs, because a token frame passes through here on every engine step
(GATEWAY: Pydantic costs several times as much); Pydantic checks what people write: HTTP bodies and settings.
"""

from talaria_common.wire.base import FORWARD_HEADER, TRACE_HEADER, WireError, decode, encode
from talaria_common.wire.call import (
    Cancel,
    Completion,
    ForwardHead,
    ForwardReply,
    Frame,
    TokenBatch,
    TokenLogprob,
    Usage,
)
from talaria_common.wire.control import ControlReply, ControlRequest, Event
from talaria_common.wire.error import ErrorInfo
from talaria_common.wire.route import CandidateCost, Fence, Placement, Queued, RouteReply, RouteRequest, Verdict
from talaria_common.wire.session import SessionRecord, kv_residence
from talaria_common.wire.snapshot import ClusterView, InstanceView, ModelState, Presence, SeenPlacements, Snapshot

__all__ = [
    "FORWARD_HEADER",
    "TRACE_HEADER",
    "Cancel",
    "CandidateCost",
    "ClusterView",
    "Completion",
    "ControlReply",
    "ControlRequest",
    "ErrorInfo",
    "Event",
    "Fence",
    "ForwardHead",
    "ForwardReply",
    "Frame",
    "InstanceView",
    "ModelState",
    "Placement",
    "Presence",
    "Queued",
    "RouteReply",
    "RouteRequest",
    "SeenPlacements",
    "SessionRecord",
    "Snapshot",
    "TokenBatch",
    "TokenLogprob",
    "Usage",
    "Verdict",
    "WireError",
    "decode",
    "encode",
    "kv_residence",
]
