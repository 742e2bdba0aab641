"""The router's events (fields: docs/events-router.md): why each call went where it went, and what leases did."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from talaria_common.clock import to_ms
from talaria_common.wire import CandidateCost, Event, Placement, RouteRequest, Verdict
from talaria_router.config import EVENT_CANDIDATES
from talaria_router.cost import Candidate
from talaria_router.ranking import Ranking
from talaria_router.sessions import Entry


def terms(c: Candidate) -> CandidateCost:
    """A candidate's Eq. 1 terms."""
    return CandidateCost(
        iid=c.iid,
        req_ms=c.req_ms,
        kv_ms=c.kv_ms,
        act_ms=c.act_ms,
        total_ms=c.total_ms,
        wait_ms=c.wait_ms,
        kv=c.kv,
        reused=c.reused_tokens,
        model=c.state,
        calls=c.calls,
        rejected=c.rejected,
    )


class Decision(NamedTuple):
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
    request, partition, outcome, lease, ranking, waited_ms, avoidable_open, spilled = decision
    data: dict[str, Any] = {
        "rid": request.rid,
        "attempt": request.attempt,
        "tenant": request.tenant,
        "session": request.session,
        "model": request.model,
        "partition": partition,
        "view": view,
        "lease": lease,
        "waited_ms": round(waited_ms, 3),
    }
    if isinstance(outcome, Placement):
        data.update(iid=outcome.iid, via=outcome.via, seq=outcome.seq, wait_ms=outcome.wait_ms)
        data["owner_rev"] = outcome.fence.owner_rev
    else:
        data.update(verdict=outcome.reason, message=outcome.error.message)
        if outcome.error.retry_after_s is not None:
            data["retry_after_s"] = outcome.error.retry_after_s
    if ranking is not None:
        shown: Sequence[Candidate] = (*ranking.order, *ranking.refused)
        data["candidates"] = [terms(c) for c in shown[:EVENT_CANDIDATES]]
        data["rejected"] = ranking.reasons
    if spilled:
        data["spilled"] = True
    if avoidable_open:
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
