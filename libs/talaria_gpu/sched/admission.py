"""Which waiting calls prefill next: the batches of P and of SP (3.4)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from talaria_gpu.sched.demand import Batch
from talaria_gpu.sched.messages_new import Call
from talaria_gpu.sched.queue import ModelQueue
from talaria_gpu.sched.slot import Slot

EPS_MS = 1e-6
"""What floating point may lose."""
Room = Callable[[float], float]
"""ms of prefill -> what would then be left beyond all protected decode; < 0: too much."""


def for_p(slot: Slot, ranked: Sequence[Call], batch: Batch, room: Room) -> list[str]:
    """Ordinary work that waited when the slot opened, the most urgent first; the call that the slot owes always.

    A call that does not fit lets others of its own rank by, but none of a lower priority.
    """
    return _fill(batch, [c for c in ranked if c.rid not in slot.late], room, always=slot.owed)


def for_sp(slot: Slot, queue: ModelQueue, ranked: Sequence[Call], batch: Batch, room: Room) -> list[str]:
    """Calls that return while the slot is open, as many as fit; nothing enters at the cost of protected decode.

    Eligible is a continuation that came after P began, or that P had no room for, whose prefix is on the device or can
    be restored here. A call that the device retracted in this slot has been let in once, and may come back.
    """

    def eligible(call: Call) -> bool:
        if queue.was_retracted(call.rid):
            return True
        if not call.is_continuation or not (call.rid in slot.late or call.rid in slot.carried):
            return False
        return sum(batch.cached(call)) > 0

    return _fill(batch, [c for c in ranked if eligible(c)], room, always=None)


def _fill(batch: Batch, calls: Sequence[Call], room: Room, always: str | None) -> list[str]:
    for call in calls:
        if call.rid == always:
            batch.add(call)
    left_out: int | None = None
    for call in calls:
        if call.rid == always:
            continue
        if left_out is not None and call.priority < left_out:
            break
        if batch.has_room(call) and room(batch.cost_ms(call)) >= -EPS_MS:
            batch.add(call)
        else:
            left_out = call.priority if left_out is None else max(left_out, call.priority)
    return batch.rids
