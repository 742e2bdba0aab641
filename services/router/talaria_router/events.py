"""The router's events (fields: docs/events-router.md): why each call went where it went, and what leases did."""

from __future__ import annotations

from typing import Any

import msgspec

from talaria_common.clock import to_ms
from talaria_common.wire import Event, Placement, RouteRequest, Verdict
from talaria_router.config import EVENT_CANDIDATES
from talaria_router.ranking import Ranking
from talaria_router.sessions import Entry


class Decision(msgspec.Struct, frozen=True, gc=False):
    """How one ask ended."""

    request: RouteRequest
    partition: int
    outcome: Placement | Verdict
    lease: str = "none"
    """The lease's fate: none, honoured, or why it was not."""
    ranking: Ranking | None = None
    """None when a lease decided alone or nothing was ranked."""
    waited_ms: float = 0.0
    avoidable_open: bool = False
    """It must activate the model although another healthy instance has it active (5.3)."""
    spilled: bool = False
    """Nobody had room within the target."""


def route_event(router: str, now: float, view: int, decision: Decision) -> Event:
    """One decision, under the cluster view's version `view`."""
    request, outcome, ranking = decision.request, decision.outcome, decision.ranking
    data: dict[str, Any] = {
        "rid": request.rid,
        "attempt": request.attempt,
        "tenant": request.tenant,
        "session": request.session,
        "model": request.model,
        "partition": decision.partition,
        "view": view,
        "lease": decision.lease,
        "waited_ms": round(decision.waited_ms, 3),
    }
    if isinstance(outcome, Placement):
        data["iid"], data["via"], data["seq"], data["wait_ms"] = outcome.iid, outcome.via, outcome.seq, outcome.wait_ms
        data["owner_rev"] = outcome.fence.owner_rev
    else:
        data.update(verdict=outcome.reason, message=outcome.error.message)
        if outcome.error.retry_after_s is not None:
            data["retry_after_s"] = outcome.error.retry_after_s
    if ranking is not None:
        shown = ranking.order + ranking.refused if ranking.refused else ranking.order
        data["candidates"] = [c.cost for c in shown[:EVENT_CANDIDATES]]
        data["rejected"] = ranking.reasons
    if decision.spilled:
        data["spilled"] = True
    if decision.avoidable_open:
        data["avoidable_open"] = True
    return Event(kind="route", source=router, at_ms=to_ms(now), data=data)


def lease_event(router: str, now: float, what: str, entry: Entry, *, reason: str = "", rid: str = "") -> Event:
    """A lease was installed, or ended without a return; the `route` event of the call that consumes one says that."""
    data: dict[str, Any] = {
        "what": what,
        "session": entry.session,
        "tenant": entry.tenant,
        "model": entry.model,
        "iid": entry.iid,
        "prefix_handle": entry.prefix_handle,
        "kv_tokens": entry.kv_tokens,
        "kv_epoch": entry.kv_epoch,
    }
    if entry.lease_until:
        data["until_ms"] = to_ms(entry.lease_until)
    if reason:
        data["reason"] = reason
    if rid:
        data["rid"] = rid
    return Event(kind="lease", source=router, at_ms=to_ms(now), data=data)
