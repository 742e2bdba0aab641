"""What happens apart from asks: completions, views and snapshots, probes, restored sessions, ownership, time."""

from __future__ import annotations

from sys import intern

from talaria_common.clock import from_ms
from talaria_common.wire import ClusterView, Completion, Snapshot
from talaria_router import asking
from talaria_router.calls import Placed
from talaria_router.messages import Controlled, Dirty, Follow, Gained, Lost, Probed, Restored
from talaria_router.replicas import leader
from talaria_router.sessions import Entry, key_of
from talaria_router.state import Owned, RouterState, Turn


def completed(turn: Turn, c: Completion) -> None:
    """The completion hook (4.1): the overlay drops the call, the session's entry follows it, a lease is installed."""
    state = turn.state
    _off_the_load(state, c)
    placed = state.calls.get(c.rid)
    if not state.calls.complete(c.rid, c.attempt):
        return
    state.returns.ended(c.model, turn.now)
    if placed is not None:
        state.returns.ended(("tenant", placed.tenant), turn.now)
        # Not always the one it was placed by: asked again after its deadline, the attempt was placed a second time.
        state.overlay.leave(placed.placement.iid, placed.placement.seq)
    if c.ok:
        state.profiles.completed(c)
        if placed is not None and placed.prefix_id:
            state.shared.computed((c.tenant, c.model, placed.prefix_id), c.iid, c.epoch, c.kv_epoch)
        if placed is not None and placed.placement.via == "lease" and c.cached_tokens == 0:
            state.leases.missed()
    key, partition = key_of(c.tenant, c.session, c.model)
    if partition in state.owned:
        if c.session_final:
            _drop(turn, key, "final")
            turn.out.append(Dirty(key))
        elif c.ok:
            _session_follows(turn, c, key, partition, placed)
    if c.session_final:
        _sub_agents_end(turn, c.tenant, c.session)
    asking.room(turn)
    state.ranker.boards.settle_one(c.model)


def viewed(turn: Turn, view: ClusterView) -> None:
    """Telemetry's view."""
    state = turn.state
    fresh, gone = state.cluster.view(turn.now, view)
    for iid in fresh:
        _reconcile(state, iid)
    for iid in gone:
        state.overlay.forget(iid)
        state.profiles.forget(iid)
    asking.informed(turn)
    asking.room(turn)
    state.ranker.boards.settle(viewed=True)


def heard(turn: Turn, snapshot: Snapshot) -> None:
    """A snapshot straight from its instance, while telemetry is silent."""
    if turn.state.cluster.heard(turn.now, snapshot):
        _reconcile(turn.state, snapshot.iid)
        asking.room(turn)


def probed(turn: Turn, message: Probed) -> None:
    """The instance answered its health probe, or did not: those who waited for it go on."""
    state = turn.state
    for rid in [rid for rid, w in state.waiting.items() if w.probe == message.iid]:
        case = state.waiting[rid].case
        entry = state.entry(case.key, case.partition)
        same_life = entry is not None and entry.iid_epoch == message.epoch
        asking.resume(turn, rid, probed=message.ok and same_life)


def restored(turn: Turn, message: Restored) -> None:
    """The bucket's answer about a session that we had not known: it counts only if nothing newer came meanwhile."""
    state, now, record = turn.state, turn.now, message.record
    waiting = [rid for rid, w in state.waiting.items() if w.why == "restore" and w.case.key == message.key]
    if record is not None:
        key, partition = key_of(record.tenant, record.session, record.model)
        owned = state.owned.get(partition)
        idle = from_ms(record.last_use_ms) + state.config.session_idle_s < now
        if key == message.key and owned is not None and not idle and state.entry(key, partition) is None:
            _drop(turn, key, "moved")
            entry = Entry.restored(record)
            most_s = max(state.config.tau_s, state.config.tau_learn_max_s)
            until, entry.lease_until = min(entry.lease_until, now + most_s), 0.0
            entry.owner_rev = owned.rev
            state.sessions.put(key, entry)
            state.counts.restored += 1
            if until > now and state.policy.leases:
                state.leases.install(key, entry, until)
                turn.lease_event("installed", entry, "restored")
    for rid in waiting:
        asking.resume(turn, rid)


def gained(turn: Turn, message: Gained) -> None:
    """A partition is ours."""
    until = turn.now + turn.state.config.session_idle_s if message.may_hold else turn.now
    turn.state.owned[message.partition] = Owned(message.rev, until)


def lost(turn: Turn, message: Lost) -> None:
    """A partition has moved: whoever waits for us there must ask the new owner. Entries fade by their owner_rev."""
    state = turn.state
    state.owned.pop(message.partition, None)
    for rid in [rid for rid, w in state.waiting.items() if w.case.partition == message.partition]:
        asking.resume(turn, rid)


def ticked(turn: Turn) -> None:
    """Time has passed."""
    state, now = turn.state, turn.now
    for key, entry in state.sessions.expired(now):
        turn.expire_lease(key, entry)
    state.counts.not_taken_up += state.overlay.expire(now)
    state.calls.expire(now)
    while (key_due := state.sessions.overdue(now)) is not None:
        _drop(turn, key_due, "evicted")
    asking.informed(turn)
    asking.overdue(turn)
    follow = state.cluster.watch(now)
    if follow is not None:
        turn.out.append(Follow(follow))
    _replicas(turn)
    asking.room(turn)
    asking.heartbeat(turn)
    state.ranker.boards.settle(viewed=False)


def controlled(turn: Turn, message: Controlled) -> None:
    """An instance opens or closes a model, or will not: then those who wait for it look elsewhere."""
    state = turn.state
    state.counts.commands[f"{message.control.verb}_refused"] += not message.ok
    state.replicas.answered(turn.now, message.control, ok=message.ok)
    asking.room(turn)


def _replicas(turn: Turn) -> None:
    state = turn.state
    closes = state.policy.eq2
    for control in state.replicas.look(turn.now, state.demand, lambda model: closes and leader(model) in state.owned):
        state.counts.commands[control.verb] += 1
        turn.out.append(control)


def _off_the_load(state: RouterState, c: Completion) -> None:
    """The call is over on its instance: it leaves the overlay, or offsets the snapshot that still counts it."""
    mine = c.router == state.router and c.router_epoch == state.epoch
    if mine and state.overlay.leave(c.iid, c.seq):
        return
    instance = state.cluster.get(c.iid)
    if instance is None or instance.snapshot.epoch != c.epoch or c.at_ms <= instance.snapshot.at_ms:
        return
    seen = instance.snapshot.seen.get(f"{c.router}/{c.router_epoch}")
    if seen is not None and c.seq <= seen.upto and c.seq not in seen.missing and not state.calls.over(c.rid, c.attempt):
        state.overlay.ended(c.iid, c.model, c.at_ms)


def _sub_agents_end(turn: Turn, tenant: str, session: str) -> None:
    """The session is over, and with it those that it began, wherever their partitions' owner hears of it."""
    over = [session]
    while over:
        for key, entry in turn.state.sessions.children(tenant, over.pop()):
            _drop(turn, key, "final")
            turn.out.append(Dirty(key))
            over.append(entry.session)


def _session_follows(turn: Turn, c: Completion, key: str, partition: int, placed: Placed | None) -> None:
    """The session was last there, with that KV; it holds a lease there for τ."""
    state, now = turn.state, turn.now
    entry = state.entry(key, partition)
    if entry is None:
        _drop(turn, key, "moved")
        # One text for all sessions of a tenant, model and instance: at a million sessions that halves the table.
        tenant, model, home = intern(c.tenant), intern(c.model), intern(c.iid)
        entry = Entry(tenant, c.session, model, now, home=home, owner_rev=state.owned[partition].rev)
    elif entry.lease_until > 0:
        turn.discard_lease(key, entry, "superseded")
    entry.iid, entry.iid_epoch = intern(c.iid), intern(c.epoch)
    entry.kv_tokens, entry.kv_epoch, entry.prefix_handle = c.kv_tokens, c.kv_epoch, c.prefix_handle
    entry.calls += 1
    entry.last_use = entry.away_since = now
    state.gaps.completed((entry.tenant, entry.model))
    state.sessions.put(key, entry)
    if placed is not None:
        entry.prefix_id = intern(placed.prefix_id)
        if placed.parent and placed.parent != entry.parent:
            state.sessions.adopt(key, entry, intern(placed.parent))
    turn.out.append(Dirty(key))
    # A completion that was held up (a reconnect) reserves only what is left of τ; clocks may differ by the tolerance.
    late = max(0.0, now - from_ms(c.at_ms) - state.config.skew_s)
    until = now + state.gaps.tau_s((entry.tenant, entry.model)) - late
    if state.policy.leases and until > now:
        state.leases.install(key, entry, until)
        turn.lease_event("installed", entry, rid=c.rid)


def _drop(turn: Turn, key: str, reason: str) -> None:
    """Remove an entry here, settling its lease first. The bucket keeps what is idle until its own time is up."""
    entry = turn.state.sessions.get(key)
    if entry is None:
        return
    if entry.lease_until > 0:
        turn.discard_lease(key, entry, reason)
    turn.state.sessions.remove(key)


def _reconcile(state: RouterState, iid: str) -> None:
    instance = state.cluster.get(iid)
    assert instance is not None
    snapshot = instance.snapshot
    state.overlay.reconcile(iid, snapshot.seen.get(state.me), snapshot.at_ms)
    for model in snapshot.models:
        state.profiles.snapshot(model)
