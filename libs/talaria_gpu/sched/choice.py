"""What the open slot does next with what waits: its batches of P and SP, and whether an idle one waits for a return."""

from __future__ import annotations

import math

from talaria_gpu.sched import admission
from talaria_gpu.sched.messages import Call
from talaria_gpu.sched.slot import Slot
from talaria_gpu.sched.state import State


def batch_of_p(now: float, state: State, slot: Slot) -> list[str]:
    """P's next batch; part of what is left is kept for the returns that the slot can expect."""
    reserve_ms = 0.0
    if state.config.ablation.sp:
        reserve_ms = min(state.book.sp_ms(slot.model), max(0.0, state.room_ms(now, slot, 0.0)) / 2)
    queue, patience_ms = state.queues[slot.model], state.config.patience_ms
    return admission.for_p(
        slot,
        queue,
        queue.ranked(now, patience_ms),
        state.batch(slot),
        room=lambda ms: state.room_ms(now, slot, ms) - reserve_ms,
        rank=lambda call: queue.rank(call, now, patience_ms),
    )


def batch_of_sp(now: float, state: State, slot: Slot) -> list[str]:
    """The batch for an SP now."""
    calls = returning(now, state, slot)
    if not calls:
        return []
    queue, patience_ms = state.queues[slot.model], state.config.patience_ms
    place = {c.rid: i for i, c in enumerate(queue.ranked(now, patience_ms))}
    calls.sort(key=lambda call: place[call.rid])
    return admission.fill(
        state.batch(slot),
        calls,
        room=lambda ms: state.room_ms(now, slot, ms),
        rank=lambda call: queue.rank(call, now, patience_ms),
    )


def returning(now: float, state: State, slot: Slot) -> list[Call]:
    """The calls that SP may let in, whether they fit or not.

    While the call that the slot owes waits for rows or a place, nobody of a lower rank goes by; once it is overdue,
    nobody at all but what ran before, so that running calls make room for it.
    """
    if not state.config.ablation.sp:
        return []
    queue = state.queues[slot.model]
    calls = admission.for_sp(slot, queue, state.prefixes)
    owed_rank = rank_of_owed(now, state, slot)
    if owed_rank is None:
        return calls
    return [
        call
        for call in calls
        if queue.was_retracted(call.rid)
        or call.rid == slot.owed
        or (owed_rank < math.inf and queue.rank(call, now, state.config.patience_ms) >= owed_rank)
    ]


def rank_of_owed(now: float, state: State, slot: Slot) -> float | None:
    """Of the call that the slot owes its first token, while it waits; inf: it is overdue. None: there is none."""
    queue = state.queues[slot.model]
    owed = queue.waiting.get(slot.owed) if slot.owed is not None else None
    return queue.rank(owed, now, state.config.patience_ms) if owed is not None else None


def worth_waiting(now: float, state: State, slot: Slot, other: str) -> float | None:
    """Until when an idle slot waits for a return (s): never beyond its end, nor longer than leaving would cost."""
    if not state.config.ablation.sp or state.room_ms(now, slot, 0.0) <= admission.EPS_MS:
        return None
    if rank_of_owed(now, state, slot) is not None:
        return None  # it is waited for elsewhere: the sooner this slot ends, the sooner it has its next one
    leaving_ms = state.estimates.to_switch_ms(other) + state.estimates.to_switch_ms(slot.model)
    until = state.returns.wait_until(slot.model, leaving_ms)
    return None if until is None else min(until, slot.end)
