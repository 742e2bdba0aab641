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
    queue, batch = state.queues[slot.model], state.batch(slot)
    ranked = queue.ranked(now, state.config.patience_ms)
    return admission.for_p(slot, queue, ranked, batch, lambda ms: state.room_ms(now, slot, ms) - reserve_ms)


def batch_of_sp(now: float, state: State, slot: Slot) -> list[str]:
    """The batch for an SP now."""
    calls = returning(state, slot)
    if not calls:
        return []
    rank = {c.rid: i for i, c in enumerate(state.queues[slot.model].ranked(now, state.config.patience_ms))}
    calls.sort(key=lambda call: rank[call.rid])
    return admission.fill(state.batch(slot), calls, lambda ms: state.room_ms(now, slot, ms))


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
