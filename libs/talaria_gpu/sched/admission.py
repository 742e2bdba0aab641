"""Which waiting calls prefill next: the batches of P and of SP (3.4)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from talaria_gpu.engine.contract import PrefixState
from talaria_gpu.sched.demand import Batch
from talaria_gpu.sched.messages import Call
from talaria_gpu.sched.queue import ModelQueue
from talaria_gpu.sched.slot import Slot

EPS_MS = 1e-6
"""What floating point may lose."""
_NONE = PrefixState()
Room = Callable[[float], float]
"""ms of prefill -> what would then be left beyond all protected decode; < 0: too much."""
Rank = Callable[[Call], float]
"""A call's priority, or more: see `ModelQueue.rank`."""


def for_p(slot: Slot, queue: ModelQueue, ranked: Sequence[Call], batch: Batch, *, room: Room, rank: Rank) -> list[str]:
    """Ordinary work that waited when the slot opened, the most urgent first.

    Always the call that the slot owes, and all that ran before and lost their KV: protected decode is theirs. Where
    the device has no room for one of them, others get by or not as in `fill`.
    """
    calls = [call for call in ranked if call.rid not in slot.late]
    must = [call for call in calls if call.rid == slot.owed or queue.was_retracted(call.rid)]
    left_out: float | None = None
    for call in must:
        overdue = rank(call) == math.inf
        refused = slot.refused and call.rid == slot.owed and not overdue
        if batch.has_room(call) and not refused:
            batch.add(call)
        elif overdue:
            return batch.rids
        else:
            left_out = rank(call)
    return fill(batch, [call for call in calls if call not in must], room=room, rank=rank, left_out=left_out)


def for_sp(slot: Slot, queue: ModelQueue, prefixes: Mapping[str, PrefixState]) -> list[Call]:
    """The calls that may enter the open slot (DESIGN 6).

    Eligible is a continuation that came after P began, or that P had no room for, whose prefix is on the device or can
    be restored here. A call that the device retracted in this slot has been let in once, and may come back.
    """

    def eligible(call: Call) -> bool:
        if queue.was_retracted(call.rid):
            return True
        if not call.is_continuation or not (call.rid in slot.late or call.rid in slot.carried):
            return False
        return sum(prefixes.get(call.rid, _NONE)) > 0

    return [call for call in queue.waiting.values() if eligible(call)]


def fill(batch: Batch, calls: Sequence[Call], *, room: Room, rank: Rank, left_out: float | None = None) -> list[str]:
    """Take in what fits, in order. A call that does not fit lets others of its own rank by, but none of a lower.

    One that is overdue, or ran before, and finds no rows or no place lets nobody by: smaller calls would take them
    for ever. `left_out`: the rank of one that found none before.
    """
    for call in calls:
        if left_out is not None and rank(call) < left_out:
            break
        has_room = batch.has_room(call)
        if has_room and room(batch.cost_ms(call)) >= -EPS_MS:
            batch.add(call)
            continue
        if not has_room and rank(call) == math.inf:
            break
        left_out = rank(call) if left_out is None else max(left_out, rank(call))
    return batch.rids
