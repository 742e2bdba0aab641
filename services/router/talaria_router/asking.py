"""A call asks for a place: Algorithm 1 from the lease to the answer (DESIGN 4 step 2, DESIGN 5).

What makes a call wait (a router that has just started and knows no instance yet, its session's record in the bucket, a
health probe, room, the opening of its model, an instance that is silent or being restarted) puts it into
`state.waiting` under its rid, each wait bounded; asking again while it waits only renews who is to be answered.
"""

from __future__ import annotations

from typing import Literal

from talaria_common.clock import from_ms
from talaria_common.wire import Queued, RouteReply
from talaria_router import placing, verdicts
from talaria_router.calls import Case, Waiting
from talaria_router.config import PROBE_WAIT_S, RESTORE_WAIT_S
from talaria_router.cost import profile_of
from talaria_router.leases import obstacle
from talaria_router.messages import Ask, Dirty, Load, Probe, Reply
from talaria_router.ranking import Ranking
from talaria_router.sessions import Entry, key_of
from talaria_router.state import Turn

_SETTLED = frozenset({"honoured", "probing"})
"""Fates of a lease after which nothing is left to decide."""
TELL_AT = 0.8
"""A call that waits for room is told so after this part of the time after which its api would ask again."""
ASKS_MISSED = 3
"""A call that waits for room is dropped when its api did not ask again for this many of its intervals."""


def ask(turn: Turn, message: Ask) -> None:
    """A call asks, for the first time or again."""
    state, now, request = turn.state, turn.now, message.request
    case = Case(message, *key_of(request.tenant, request.session, request.model), now)
    if case.partition not in state.owned:
        placing.refuse(turn, case, verdicts.not_owner(case.partition))
        return
    if from_ms(request.deadline_ms) + state.config.skew_s < now:
        placing.refuse(turn, case, verdicts.expired("the call's deadline has passed"), quiet=True)
        return
    placed = state.calls.get(request.rid)
    if state.calls.over(request.rid, request.attempt) or (placed is not None and request.attempt < placed.attempt):
        placing.refuse(turn, case, verdicts.expired("this attempt is over: it ended, or a later one was placed"))
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
    case.entry = state.entry(case.key, case.partition)
    if case.entry is None and now < state.owned[case.partition].restore_until:
        state.waiting[case.ask.request.rid] = Waiting(case, "restore", now + RESTORE_WAIT_S, now)
        turn.out.append(Load(case.key))
        return
    decide(turn, case)


def decide(turn: Turn, case: Case, *, probed: bool | None = None) -> None:
    """Lease first, then cost; the session's entry has been looked up.

    `probed`: what a health probe of the leased instance said, None if there was none.
    """
    state, now, request = turn.state, turn.now, case.ask.request
    if _limited(turn, case):
        return
    lease = "none" if case.entry is None else _returned(turn, case, case.entry, probed)
    if lease in _SETTLED:
        return
    ranking = placing.rank(state, now, case)
    if ranking.reasons:
        state.counts.rejected.update(ranking.reasons)
    if _opens(turn, request.model, ranking):
        state.waiting[request.rid] = Waiting(case, "open", from_ms(request.deadline_ms), now)
        return
    if placing.settle(turn, case, ranking, lease):
        return
    verdict = placing.refusal(turn, case, ranking)
    if verdict is None:
        if placing.spill(turn, case, ranking, lease) or (state.config.overload == "queue" and _queue(turn, case)):
            return
    elif placing.may_pass(turn, case, ranking) and _queue(turn, case, "fit"):
        return
    if verdict is None:
        verdict = placing.overloaded(turn, case, ranking)
    placing.refuse(turn, case, verdict, lease=lease, ranking=ranking)


def room(turn: Turn) -> None:
    """Something changed: place those in line, by priority, fair share and age.

    Where one finds no place, those who hope for the same (its model, but for the instances that failed it) find none.
    """
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
        ranking = placing.rank(state, turn.now, w.case)
        if _opens(turn, request.model, ranking):
            w.why, w.until = "open", from_ms(request.deadline_ms)
        elif placing.settle(turn, w.case, ranking, "none"):
            del state.waiting[request.rid]
            continue
        elif w.why == "open" and (verdict := placing.never(turn, w.case, ranking)) is not None:
            del state.waiting[request.rid]
            placing.refuse(turn, w.case, verdict, ranking=ranking)
            continue
        hope = _hope(turn, w.case)
        queue = {rid: q for rid, q in queue.items() if _hope(turn, q.case) != hope}


def _hope(turn: Turn, case: Case) -> tuple[str, tuple[str, ...]]:
    return case.ask.request.model, placing.excluded(turn.state, turn.now, case)


def _opens(turn: Turn, model: str, ranking: Ranking) -> bool:
    """Whether the best place is one where the model is not open yet; then that is under way, and the call waits."""
    state, best = turn.state, ranking.order[0] if ranking.order else None
    if best is None:
        return False
    if best.state == "loading":
        return True  # it would refuse the call still
    if best.state != "cold":
        return False
    control = state.replicas.open(best.iid, model, turn.now)
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
    if state.config.overload != "queue" or not _queue(turn, case):
        per_s = placing.tenants_rate(state, turn.now, case, limit)
        retry_s = state.returns.after_s(("tenant", tenant), case.key, turn.now, 1 / per_s, per_s)
        placing.refuse(turn, case, verdicts.tenant_limit(tenant, limit, retry_s))
    return True


def _queue(turn: Turn, case: Case, why: Literal["room", "fit"] = "room") -> bool:
    """Let the call wait in line, if the queue has a place for it, or makes one."""
    state, request = turn.state, case.ask.request
    waiting = [w for w in state.waiting.values() if w.in_line]
    if len(waiting) >= state.config.queue_max:
        out = state.fairness.makes_room(waiting, request.tenant, state.config.queue_max)
        if out is None:
            return False
        del state.waiting[out.case.ask.request.rid]
        placing.refuse(turn, out.case, placing.beyond_share(turn, out.case, waiting))
    state.counts.queued += 1
    until = from_ms(request.deadline_ms)
    if why == "fit":
        until = min(until, case.since + state.config.patience_s)
    state.waiting[request.rid] = Waiting(case, why, until, turn.now)
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
        if state.waiting.get(rid) is not w:
            continue  # it had to make room for one of those before it, and was told
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
        placing.refuse(turn, w.case, verdicts.not_owner(w.case.partition))
    elif w.why == "view":
        proceed(turn, w.case)
    elif w.in_line and w.why != "fit":
        why = "no room" if w.why == "room" else "the model was not opened"
        placing.refuse(turn, w.case, verdicts.expired(f"{why} before the call's deadline"))
    else:
        w.case.entry = state.entry(w.case.key, w.case.partition)
        decide(turn, w.case, probed=probed)
    if state.probing.get(w.case.key) == rid and rid not in state.waiting:
        del state.probing[w.case.key]


def _returned(turn: Turn, case: Case, entry: Entry, probed: bool | None) -> str:
    """The session is back; returns its lease's fate, "none" if it has none that this call may use."""
    state, now, rid = turn.state, turn.now, case.ask.request.rid
    if entry.away_since > 0:
        state.gaps.returned((entry.tenant, entry.model), now - entry.away_since)
        entry.away_since = 0.0
    state.sessions.touch(case.key, entry, now)
    parent = case.ask.request.parent_session
    if parent and parent != entry.parent:
        state.sessions.adopt(case.key, entry, parent)
    if entry.lease_until > 0 and state.probing.get(case.key, rid) == rid:
        return _try_lease(turn, case, entry, probed)
    return "none"


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
    place = placing.Target(entry.iid, "lease", tokens, tokens * profile.prefill_ms_per_token, residence)
    placing.place(turn, case, place, "honoured", None)
    turn.out.append(Dirty(case.key))
    return "honoured"
