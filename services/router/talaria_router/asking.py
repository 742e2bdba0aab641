"""A call asks for a place: Algorithm 1 from the lease to the answer (DESIGN 4 step 2, DESIGN 5).

What makes a call wait (a router that has just started and knows no instance yet, its session's record in the bucket, a
health probe, room, the opening of its model) puts it into `state.waiting` under
its rid, each wait bounded; asking again while it waits only renews who is to be answered.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from talaria_common.clock import from_ms, to_ms
from talaria_common.ids import PARTITIONS, hash_id
from talaria_common.wire import Fence, Placement, Queued, RouteReply, RouteRequest, Verdict
from talaria_common.wire.route import RouteVia
from talaria_router import verdicts
from talaria_router.admission import retry_after_s
from talaria_router.calls import Case, Placed, Waiting
from talaria_router.config import PROBE_WAIT_S, RESTORE_WAIT_S
from talaria_router.cost import Call, Candidate, profile_of
from talaria_router.events import Decision, route_event
from talaria_router.leases import obstacle
from talaria_router.messages import Ask, Dirty, Emit, Load, Probe, Reply
from talaria_router.ranking import Ranking
from talaria_router.sessions import Entry
from talaria_router.state import RouterState, Turn

_NOBODY: frozenset[str] = frozenset()
TELL_AT = 0.8
"""A call that waits for room is told so after this part of the time after which its api would ask again."""
ASKS_MISSED = 3
"""A call that waits for room is dropped when its api did not ask again for this many of its intervals."""


@lru_cache(8192)
def key_of(tenant: str, session: str, model: str) -> tuple[str, int]:
    """(key, partition) of a session on a model. The partition is `ids.partition_of`, without hashing twice."""
    key = hash_id(tenant, session, model)
    return key, int(key[:8], 16) % PARTITIONS


def ask(turn: Turn, message: Ask) -> None:
    """A call asks, for the first time or again."""
    state, now, request = turn.state, turn.now, message.request
    case = Case(message, *key_of(request.tenant, request.session, request.model), now)
    if case.partition not in state.owned:
        _refuse(turn, case, verdicts.not_owner(case.partition))
        return
    if from_ms(request.deadline_ms) + state.config.skew_s < now:
        _refuse(turn, case, verdicts.expired("the call's deadline has passed"), quiet=True)
        return
    placed = state.calls.get(request.rid)
    if state.calls.over(request.rid, request.attempt) or (placed is not None and request.attempt < placed.attempt):
        _refuse(turn, case, verdicts.expired("this attempt is over: it ended, or a later one was placed"))
        return
    if placed is not None and placed.attempt == request.attempt and now <= placed.accept_by:
        turn.out.append(Reply(message.to, RouteReply(placement=placed.placement)))
        return
    if placed is not None:
        state.overlay.leave(placed.placement.iid, placed.placement.seq)
    waiting = state.waiting.get(request.rid)
    if waiting is not None:
        if request.attempt >= waiting.case.ask.request.attempt:
            waiting.case.ask, waiting.asked_at = message, now
        return
    if placed is None:
        state.arrival(request.model, now)
    if not state.cluster.informed(now):
        until = now + state.config.heartbeat_s * state.config.missed
        state.waiting[request.rid] = Waiting(case, "view", until, now)
        return
    proceed(turn, case)


def proceed(turn: Turn, case: Case) -> None:
    """With a picture of the instances: the session's record first, if only the bucket may have it."""
    state, now = turn.state, turn.now
    if state.entry(case.key, case.partition) is None and now < state.owned[case.partition].restore_until:
        state.waiting[case.ask.request.rid] = Waiting(case, "restore", now + RESTORE_WAIT_S, now)
        turn.out.append(Load(case.key))
        return
    decide(turn, case)


def decide(turn: Turn, case: Case, *, probed: bool | None = None) -> None:
    """Lease first, then cost. `probed`: what a health probe of the leased instance said, None if there was none."""
    state, now, request = turn.state, turn.now, case.ask.request
    if _limited(turn, case):
        return
    entry = case.entry = state.entry(case.key, case.partition)
    lease = "none"
    if entry is not None:
        if entry.away_since > 0:
            state.gaps.returned((entry.tenant, entry.model), now - entry.away_since)
            entry.away_since = 0.0
        state.sessions.touch(case.key, entry, now)
        if entry.lease_until > 0 and state.probing.get(case.key, request.rid) == request.rid:
            lease = _try_lease(turn, case, entry, probed)
            if lease in {"honoured", "probing"}:
                return
    ranking = _rank(state, now, request, entry)
    if ranking.reasons:
        state.counts.rejected.update(ranking.reasons)
    if _opens(turn, request.model, ranking):
        state.waiting[request.rid] = Waiting(case, "open", from_ms(request.deadline_ms), now)
        return
    if _settle(turn, case, ranking, lease):
        return
    verdict = _refusal(state, request, ranking)
    if verdict.reason == "overloaded" and (_spill(turn, case, ranking, lease) or _queue(turn, case)):
        return
    _refuse(turn, case, verdict, lease=lease, ranking=ranking)


def room(turn: Turn) -> None:
    """Something changed: place those who wait for room, by priority, fair share and age; a full model is tried once."""
    state = turn.state
    queue = {rid: w for rid, w in state.waiting.items() if w.in_line}
    while queue:
        w = state.fairness.next(queue.values())
        request = w.case.ask.request
        del queue[request.rid]
        if state.fairness.limited(request.tenant) is not None:
            queue = {rid: q for rid, q in queue.items() if q.case.ask.request.tenant != request.tenant}
            continue
        w.case.entry = state.entry(w.case.key, w.case.partition)
        ranking = _rank(state, turn.now, request, w.case.entry)
        if _opens(turn, request.model, ranking):
            w.why = "open"
            queue = {rid: q for rid, q in queue.items() if q.case.ask.request.model != request.model}
        elif _settle(turn, w.case, ranking, "none"):
            del state.waiting[request.rid]
        else:
            queue = {rid: q for rid, q in queue.items() if q.case.ask.request.model != request.model}


def _opens(turn: Turn, model: str, ranking: Ranking) -> bool:
    """Whether the best place is one where the model has to be opened first; then that is under way."""
    state = turn.state
    if not state.policy.eq2 or not ranking.order or ranking.order[0].state != "cold":
        return False
    control = state.replicas.open(ranking.order[0].iid, model, turn.now)
    if control is not None:
        state.counts.commands["open"] += 1
        turn.out.append(control)
    return True


def heartbeat(turn: Turn) -> None:
    """Tell those who wait for room, and understand it, that they still do: before their api gives the ask up."""
    state, now = turn.state, turn.now
    every = state.config.ask_again_s * TELL_AT
    queue = [w for w in state.waiting.values() if w.in_line]
    for w in queue:
        if not w.case.ask.request.may_wait or now - max(w.asked_at, w.told_at) < every or w.told_at > w.asked_at:
            continue
        w.told_at = now
        waited_ms = round((now - w.case.since) * 1000)
        turn.out.append(Reply(w.case.ask.to, RouteReply(queued=Queued(waited_ms=waited_ms, waiting=len(queue)))))


def _limited(turn: Turn, case: Case) -> bool:
    """Whether the tenant has as many calls in flight as it may, and the call was told so or waits."""
    state, tenant = turn.state, case.ask.request.tenant
    limit = state.fairness.limited(tenant)
    if limit is None or state.calls.get(case.ask.request.rid) is not None:
        return False
    if not _queue(turn, case):
        _refuse(turn, case, verdicts.tenant_limit(tenant, limit))
    return True


def _queue(turn: Turn, case: Case) -> bool:
    """Let the call wait for room, if calls do and the queue has a place for it, or makes one."""
    state, request = turn.state, case.ask.request
    if state.config.overload != "queue":
        return False
    waiting = [w for w in state.waiting.values() if w.in_line]
    if len(waiting) >= state.config.queue_max:
        out = state.fairness.makes_room(waiting, request.tenant, state.config.queue_max)
        if out is None:
            return False
        del state.waiting[out.case.ask.request.rid]
        _refuse(turn, out.case, verdicts.queue_share(out.case.ask.request.tenant))
    state.counts.queued += 1
    state.waiting[request.rid] = Waiting(case, "room", from_ms(request.deadline_ms), turn.now)
    return True


def _spill(turn: Turn, case: Case, ranking: Ranking, lease: str) -> bool:
    """Place the call where the target will be missed, if that is what is to be done and somebody can take it at all."""
    state = turn.state
    best = ranking.spill() if state.config.overload == "spill" else None
    if best is None:
        return False
    state.counts.spilled += 1
    _place_on(turn, case, best, ranking, lease)
    return True


def informed(turn: Turn) -> None:
    """The instances are known now: those who came too early go on."""
    state = turn.state
    early = [rid for rid, w in state.waiting.items() if w.why == "view"]
    if early and state.cluster.informed(turn.now):
        for rid in early:
            resume(turn, rid)


def overdue(turn: Turn) -> None:
    """End the waits that have lasted long enough."""
    state, now = turn.state, turn.now
    for rid, w in list(state.waiting.items()):
        if w.in_line and now - w.asked_at > ASKS_MISSED * state.config.ask_again_s:
            del state.waiting[rid]
        elif now >= w.until:
            state.counts.restore_timeouts += w.why == "restore"
            resume(turn, rid, probed=False if w.why == "probe" else None)


def resume(turn: Turn, rid: str, *, probed: bool | None = None) -> None:
    """What the call waited for has come, or it has waited long enough."""
    state = turn.state
    w = state.waiting.pop(rid)
    if w.case.partition not in state.owned:
        _refuse(turn, w.case, verdicts.not_owner(w.case.partition))
    elif w.why == "view":
        proceed(turn, w.case)
    elif w.in_line:
        why = "no room" if w.why == "room" else "the model was not opened"
        _refuse(turn, w.case, verdicts.expired(f"{why} before the call's deadline"))
    else:
        decide(turn, w.case, probed=probed)
    if state.probing.get(w.case.key) == rid and rid not in state.waiting:
        del state.probing[w.case.key]


def _try_lease(turn: Turn, case: Case, entry: Entry, probed: bool | None) -> str:
    """Lines 1 to 9: consume the live lease, or discard it.

    Returns its fate. "honoured": the call was answered; "probing": it waits for the instance to say that it is well.
    """
    state, now, request = turn.state, turn.now, case.ask.request
    if entry.lease_until <= now:
        turn.expire_lease(case.key, entry)
        return "expired"
    reason = obstacle(state.cluster, entry, now, request.exclude)
    if reason == "stale" and probed is None:
        state.probing[case.key] = request.rid
        shared = any(w.probe == entry.iid for w in state.waiting.values())
        state.waiting[request.rid] = Waiting(case, "probe", now + PROBE_WAIT_S, now, probe=entry.iid)
        if not shared:
            state.counts.probes += 1
            turn.out.append(Probe(entry.iid))
        return "probing"
    if reason and not (reason == "stale" and probed):
        turn.discard_lease(case.key, entry, reason, request.rid)
        return reason
    instance = state.cluster.get(entry.iid)
    assert instance is not None
    profile = profile_of(instance, instance.models[entry.model], state.profiles)
    tokens = max(1, state.profiles.prompt_tokens(entry.model, request.prompt_bytes) - entry.kv_tokens)
    # Consumed together with the overlay's entry and before the answer: a second call of the session cannot have it too.
    state.leases.consume(entry)
    residence = instance.models[entry.model].state
    place = _Place(entry.iid, "lease", tokens, tokens * profile.prefill_ms_per_token, residence)
    _place(turn, case, place, "honoured", None)
    turn.out.append(Dirty(case.key))
    return "honoured"


def _rank(state: RouterState, now: float, request: RouteRequest, entry: Entry | None) -> Ranking:
    arrivals = state.arrivals.get(request.model)
    shared_tokens, sharers = 0, _NOBODY
    if request.prefix_id:
        sharers = state.shared.holders((request.tenant, request.model, request.prefix_id), state.cluster)
        shared_tokens = state.profiles.prompt_tokens(request.model, request.prefix_bytes) if sharers else 0
    call = Call(  # by position: for speed
        request.rid,
        request.model,
        state.profiles.prompt_tokens(request.model, request.prompt_bytes),
        request.max_tokens,
        entry,
        request.exclude,
        arrivals.turn - 1 if arrivals else 0,
        shared_tokens,
        sharers,
    )
    return state.ranker.rank(call, now, state.demand)


def _settle(turn: Turn, case: Case, ranking: Ranking, lease: str) -> bool:
    """Place the call on the best candidate. False: there is none."""
    best = ranking.order[0] if ranking.order else ranking.to_be_refused_there()
    if best is None:
        return False
    _place_on(turn, case, best, ranking, lease)
    return True


def _place_on(turn: Turn, case: Case, best: Candidate, ranking: Ranking, lease: str) -> None:
    state, request = turn.state, case.ask.request
    via: RouteVia = "retry" if request.attempt else "cost" if state.policy.name == "talaria" else "policy"
    tokens = best.prompt_tokens
    if best.kv != "missing" and case.entry is not None:
        tokens = max(1, tokens - case.entry.kv_tokens)
    _place(turn, case, _Place(best.iid, via, tokens, best.wait_ms + best.own_ms, best.state), lease, ranking)


class _Place(NamedTuple):
    iid: str
    via: RouteVia
    tokens: int
    wait_ms: float
    residence: str
    """Where the model's weights are there."""


def _place(turn: Turn, case: Case, place: _Place, lease: str, ranking: Ranking | None) -> None:
    """Enter the overlay, number the placement, answer."""
    state, now, request, entry = turn.state, turn.now, case.ask.request, case.entry
    iid, via, tokens, wait_ms, residence = place
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
    state.calls.place(
        request.rid, Placed(request.attempt, request.tenant, placement, accept_by, forget_at, request.prefix_id)
    )
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


def _refusal(state: RouterState, request: RouteRequest, ranking: Ranking) -> Verdict:
    model = request.model
    if not state.cluster.serving(model) and model not in state.config.catalog:
        return verdicts.unknown_model(model, sorted(state.config.catalog))
    if not ranking.refused:
        return verdicts.no_instance(model, ranking.reasons)
    first = state.cluster.get(ranking.refused[0].iid)
    assert first is not None
    profile = state.profiles.of(ranking.refused[0].iid, first.models[model])
    call_ms = profile.output_tokens * profile.decode_step_ms
    retry_s = retry_after_s(ranking.excess_ms, ranking.reasons["queue"] > 0, call_ms)
    return verdicts.overloaded(model, ranking.reasons, retry_s)


def _refuse(
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
