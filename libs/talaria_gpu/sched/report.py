"""A slot's report when it is over: one term of Eq. 3."""

from __future__ import annotations

from collections import Counter
from typing import Literal, get_args

from talaria_gpu.engine.contract import PrefixState
from talaria_gpu.sched.demand import Batch
from talaria_gpu.sched.messages import Call, Phase, SlotOver
from talaria_gpu.sched.slot import Slot
from talaria_gpu.sched.state import State

_NO_PREFIX = PrefixState()
Why = Literal["late", "prefix", "rows", "time", "retracted"]
"""Why a call waits for the model's next slot.

late: it came after P began, and is none that SP lets in; prefix: it came back, but nothing of it is cached here; rows:
the device had no rows or no place for it; time: it did not fit beside protected decode; retracted: it ran, and the
device ran short of rows.
"""
WHY: tuple[Why, ...] = get_args(Why)


def slot_over(now: float, state: State, slot: Slot, reason: Literal["drained", "budget", "idle"]) -> SlotOver:
    """Of `slot`, which ends now."""
    queue, counts, plan, spent = state.queues[slot.model], slot.counts, state.book.plan, slot.spent_ms
    waiting, batch = list(queue.waiting.values()), state.batch(slot)
    parked = [call for call in waiting if not queue.was_retracted(call.rid)]
    return SlotOver(
        model=slot.model,
        switch_ms=slot.switch_ms,
        p_ms=spent[Phase.P],
        d1_ms=spent[Phase.D1],
        sp_ms=spent[Phase.SP],
        d_ms=spent[Phase.D],
        dfin_ms=spent[Phase.DFIN],
        linger_ms=slot.linger_ms,
        sps=counts.sps,
        prefills=counts.prefills,
        decodes=counts.decodes,
        admitted=counts.admitted,
        sp_admitted=counts.sp_admitted,
        sp_carried=counts.sp_carried,
        sp_deferred=sum(c.is_continuation and (c.rid in slot.late or c.rid in slot.carried) for c in parked),
        deferred=len(waiting),
        deferred_why=Counter(_why(state, slot, call, batch) for call in waiting),
        running=len(queue.running),
        protected=slot.plan.decodes if slot.plan else 0,
        planned_ms=slot.plan.length_ms if slot.plan else 0.0,
        round=state.book.number,
        round_planned_ms=plan.round_ms if plan else 0.0,
        round_ms=(now - state.book.began) * 1000,
        infeasible=plan.infeasible if plan else (),
        reason=reason,
    )


def _why(state: State, slot: Slot, call: Call, batch: Batch) -> Why:
    """As far as the end of the slot still shows it: rows and places are those of now."""
    if state.queues[slot.model].was_retracted(call.rid):
        return "retracted"
    if call.rid in slot.late:
        if not (state.config.ablation.sp and call.is_continuation):
            return "late"
        if not sum(state.prefixes.get(call.rid, _NO_PREFIX)):
            return "prefix"
    refused = slot.refused and call.rid == slot.owed
    return "time" if batch.has_room(call) and not refused else "rows"
