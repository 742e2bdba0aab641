"""A session as the bucket `talaria_sessions` holds it (4.1; DESIGN 3)."""

from __future__ import annotations

from typing import Literal

from talaria_common.wire.base import Int, Wire
from talaria_common.wire.snapshot import ModelState


class SessionRecord(Wire, frozen=True, kw_only=True):
    """A session's entry, under its key (hash of tenant, session, model); written behind by the router that owns it."""

    tenant: str
    session: str
    model: str
    iid: str
    """Instance of the last completed call."""
    iid_epoch: str = ""
    home: str = ""
    kv_tokens: Int = 0
    prefix_handle: str = ""
    kv_epoch: Int = 0
    calls: Int = 0
    last_use_ms: Int
    lease_until_ms: Int = 0
    """Absolute UTC ms; 0: no lease."""


def kv_residence(
    iid_epoch: str, kv_epoch: int, kv_tokens: int, epoch: str, model: ModelState
) -> Literal["device", "host", "missing"]:
    """Where a session's prefix is on its instance, whose life is now `epoch` and whose model stands at `model`.

    A handle means something only in the life and KV epoch in which it was made. It may be newer than the snapshot, so
    a higher epoch is valid. A prefix that survives while its model is not active is restored from host.
    """
    if kv_tokens <= 0 or iid_epoch != epoch or kv_epoch < model.kv_epoch:
        return "missing"
    return "device" if model.state == "active" else "host"
