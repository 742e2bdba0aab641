"""A call's place, or why it gets none: ranking, the overlay's entry, the answer and its event (DESIGN 4, 5)."""

from __future__ import annotations

from typing import NamedTuple

from talaria_common.clock import from_ms, to_ms
from talaria_common.wire import Fence, Placement, RouteReply, RouteRequest, Verdict
from talaria_common.wire.route import RouteVia
from talaria_router import verdicts
from talaria_router.calls import Case, Placed, Waiting
from talaria_router.cost import Call, Candidate, kv_of
from talaria_router.events import Decision, route_event
from talaria_router.messages import Emit, Reply
from talaria_router.ranking import Ranking
from talaria_router.sessions import key_of
from talaria_router.state import RouterState, Turn

_NOBODY: frozenset[str] = frozenset()


PASSING = frozenset({"stale", "starting", "failed", "excluded"})
"""What rules an instance out for a while only: it is heard again, gets up, is restarted, is forgiven."""


def excluded(state: RouterState, now: float, case: Case) -> tuple[str, ...]:
    """Instances that the call must not go to now: those that failed it, but for those that may be well again."""
    request = case.ask.request
    if not request.recovering or now - case.since < state.config.forgive_after_s:
        return request.exclude
    return tuple(iid for iid in request.exclude if iid not in request.recovering)


def rank(state: RouterState, now: float, case: Case) -> Ranking:
    """The places for a call, whose session's entry has been looked up, best first, and what was ruled out."""
    request, entry = case.ask.request, case.entry
    arrivals = state.arrivals.get(request.model)
    shared_tokens, sharers = 0, _NOBODY
    if request.prefix_id:
        sharers = state.shared.holders((request.tenant, request.model, request.prefix_id), state.cluster)
        if request.parent_session:
            sharers |= _where_its_parent_is(state, request, request.parent_session)
        shared_tokens = state.profiles.prompt_tokens(request.model, request.prefix_bytes) if sharers else 0
    call = Call(  # by position: for speed
        request.rid,
        request.model,
        state.profiles.prompt_tokens(request.model, request.prompt_bytes),
        request.max_tokens,
        entry,
        excluded(state, now, case) if request.exclude else (),
        arrivals.turn - 1 if arrivals else 0,
        shared_tokens,
        sharers,
    )
    return state.ranker.rank(call, now, state.demand)


def _where_its_parent_is(state: RouterState, request: RouteRequest, parent: str) -> frozenset[str]:
    """The instance of the session whose sub-agent asks, if that began its prompt alike and its KV may be there.

    Only as far as this router owns the parent's partition: it is a hint, as all sharers are.
    """
    entry = state.sessions.get(key_of(request.tenant, parent, request.model)[0])
    instance = state.cluster.get(entry.iid) if entry is not None and entry.prefix_id == request.prefix_id else None
    model = instance.models.get(request.model) if instance is not None else None
    if entry is None or instance is None or model is None or kv_of(entry, instance, model) == "missing":
        return _NOBODY
    return frozenset((entry.iid,))


def settle(turn: Turn, case: Case, ranking: Ranking, lease: str) -> bool:
    """Place the call on the best candidate. False: there is none."""
    best = ranking.order[0] if ranking.order else ranking.to_be_refused_there()
    if best is None:
        return False
    place_on(turn, case, best, ranking, lease)
    return True


def place_on(turn: Turn, case: Case, best: Candidate, ranking: Ranking, lease: str) -> None:
    """Place the call on the candidate `best`; `lease`: what became of its lease."""
    state, request = turn.state, case.ask.request
    via: RouteVia = "retry" if request.attempt else "cost" if state.policy.name == "talaria" else "policy"
    tokens = max(1, best.prompt_tokens - best.cost.reused)
    place(turn, case, Target(best.iid, via, tokens, best.wait_ms + best.own_ms, best.state), lease, ranking)


class Target(NamedTuple):
    """Where a call goes, why, and what it is expected to cost there."""

    iid: str
    via: RouteVia
    tokens: int
    """To be prefilled, estimated."""
    wait_ms: float
    residence: str
    """Where the model's weights are there."""


def place(turn: Turn, case: Case, target: Target, lease: str, ranking: Ranking | None) -> None:
    """Enter the overlay, number the placement, answer."""
    state, now, request, entry = turn.state, turn.now, case.ask.request, case.entry
    iid, via, tokens, wait_ms, residence = target
    config, deadline = state.config, from_ms(request.deadline_ms)
    accept_by = max(now, min(deadline, now + config.accept_s))
    # One heartbeat more: what was taken up at the last moment is in the next snapshot, not yet in this one.
    in_flight = state.overlay.enter(iid, request.model, tokens, accept_by + config.heartbeat_s)
    placement = Placement(
        iid=iid,
        fence=Fence(
            partition=case.partition,
            owner_rev=state.owned[case.partition].rev,
            rid=request.rid,
            attempt=request.attempt,
        ),
        router=state.router,
        router_epoch=state.epoch,
        seq=in_flight.seq,
        via=via,
        accept_by_ms=to_ms(accept_by),
        deadline_ms=request.deadline_ms,
        wait_ms=round(wait_ms),
        continuation=entry is not None and entry.iid == iid,
    )
    forget_at = max(deadline, accept_by) + config.skew_s
    parent = request.parent_session or ""
    state.calls.place(
        request.rid,
        Placed(request.attempt, request.tenant, placement, accept_by, forget_at, request.prefix_id, parent),
    )
    state.returns.came(case.key)
    counts = state.counts
    counts.routed[via] += 1
    turn.out.append(Reply(case.ask.to, RouteReply(placement=placement)))
    avoidable = False
    if residence != "active":
        counts.opens[residence] += 1
        avoidable = state.cluster.active_elsewhere(request.model, iid, now)
        counts.avoidable_opens += avoidable
    spilled = ranking is not None and not ranking.order and ranking.to_be_refused_there() is None
    waited_ms = (now - case.since) * 1000
    decision = Decision(request, case.partition, placement, lease, ranking, waited_ms, avoidable, spilled)
    turn.out.append(Emit(route_event(state.router, now, state.cluster.version, decision)))


def spill(turn: Turn, case: Case, ranking: Ranking, lease: str) -> bool:
    """Place the call where the target will be missed, if that is what is to be done and somebody can take it at all."""
    state = turn.state
    best = ranking.spill() if state.config.overload == "spill" else None
    if best is None:
        return False
    state.counts.spilled += 1
    place_on(turn, case, best, ranking, lease)
    return True


def refusal(turn: Turn, case: Case, ranking: Ranking) -> Verdict | None:
    """Why the call cannot be placed; None: for want of room alone."""
    state, model = turn.state, case.ask.request.model
    if not state.cluster.serving(model) and model not in state.config.catalog:
        return verdicts.unknown_model(model, sorted(state.config.catalog))
    return None if ranking.refused else verdicts.no_instance(model, ranking.reasons)


def never(turn: Turn, case: Case, ranking: Ranking) -> Verdict | None:
    """Why a call that waits for its model to be opened waits in vain: that failed, and nobody else may have it soon."""
    if not ranking.reasons["failed_model"] or any(ranking.reasons[reason] for reason in PASSING):
        return None
    return refusal(turn, case, ranking)


def may_pass(turn: Turn, case: Case, ranking: Ranking) -> bool:
    """Whether somebody who cannot take the call now may be able to soon, and it has not waited long enough for that."""
    config, request = turn.state.config, case.ask.request
    if turn.now - case.since >= config.patience_s or turn.now >= from_ms(request.deadline_ms):
        return False
    passing = PASSING if request.recovering else PASSING - {"excluded"}
    return any(ranking.reasons[reason] for reason in passing)


def overloaded(turn: Turn, case: Case, ranking: Ranking) -> Verdict:
    """All are full: come back when the least busy one has worked its excess off, or a full queue has a place."""
    state, now, model = turn.state, turn.now, case.ask.request.model
    first = state.cluster.get(ranking.refused[0].iid)
    assert first is not None
    places = max(1, first.models[model].max_running) * (ranking.reasons["queue"] + ranking.reasons["round"])
    per_s = state.returns.per_s(model, now) or max(1, places) / max(1e-3, state.profiles.call_s(model))
    waits = [] if ranking.excess_ms is None else [ranking.excess_ms / 1000]
    if ranking.reasons["queue"]:
        waits.append(1 / per_s)
    ahead = sum(1 for w in state.waiting.values() if w.in_line and w.case.ask.request.model == model)
    first_s = max(min(waits, default=0.0), ahead / per_s)
    retry_s = state.returns.after_s(model, case.key, now, first_s, per_s)
    return verdicts.overloaded(model, ranking.reasons, retry_s)


def tenants_rate(state: RouterState, now: float, case: Case, at_once: int) -> float:
    """Calls of the case's tenant that end per second; `at_once`: that it has in flight."""
    request = case.ask.request
    measured = state.returns.per_s(("tenant", request.tenant), now)
    return measured or max(1, at_once) / max(1e-3, state.profiles.call_s(request.model))


def beyond_share(turn: Turn, case: Case, waiting: list[Waiting]) -> Verdict:
    """It had to leave the queue: come back when what its tenant still has in it will have gone."""
    state, tenant = turn.state, case.ask.request.tenant
    left = sum(1 for w in waiting if w.case.ask.request.tenant == tenant) - 1
    per_s = tenants_rate(state, turn.now, case, state.calls.in_flight[tenant])
    retry_s = state.returns.after_s(("tenant", tenant), case.key, turn.now, (left + 1) / per_s, per_s)
    return verdicts.queue_share(tenant, retry_s)


def refuse(
    turn: Turn,
    case: Case,
    verdict: Verdict,
    *,
    lease: str = "none",
    ranking: Ranking | None = None,
    quiet: bool = False,
) -> None:
    """`quiet`: no event. It was no decision: the owner tells of the call, or it came too late to matter to anyone."""
    turn.state.counts.verdicts[verdict.reason] += 1
    turn.out.append(Reply(case.ask.to, RouteReply(verdict=verdict)))
    if quiet or verdict.reason == "not_owner":
        return
    waited_ms = (turn.now - case.since) * 1000
    decision = Decision(case.ask.request, case.partition, verdict, lease, ranking, waited_ms)
    turn.out.append(Emit(route_event(turn.state.router, turn.now, turn.state.cluster.version, decision)))
