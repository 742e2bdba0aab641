"""What the open slot does next with what waits: its batches of P and SP, and whether an idle one waits for a return."""

from __future__ import annotations

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
    calls = returning(state, slot)
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


def returning(state: State, slot: Slot) -> list[Call]:
    """The calls that SP may let in, whether they fit or not."""
    if not state.config.ablation.sp:
        return []
    return admission.for_sp(slot, state.queues[slot.model], state.prefixes)


def worth_waiting(now: float, state: State, slot: Slot, other: str) -> float | None:
    """Until when an idle slot waits for a return (s): never beyond its end, nor longer than leaving would cost."""
    if not state.config.ablation.sp or state.room_ms(now, slot, 0.0) <= admission.EPS_MS:
        return None
    leaving_ms = state.estimates.to_switch_ms(other) + state.estimates.to_switch_ms(slot.model)
    until = state.returns.wait_until(slot.model, leaving_ms)
    return None if until is None else min(until, slot.end)
