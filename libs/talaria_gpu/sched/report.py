"""A slot's report when it is over: one term of Eq. 3."""

from __future__ import annotations

from typing import Literal

from talaria_gpu.sched.messages import Phase, SlotOver
from talaria_gpu.sched.slot import Slot
from talaria_gpu.sched.state import State


def slot_over(now: float, state: State, slot: Slot, reason: Literal["drained", "budget", "idle"]) -> SlotOver:
    """Of `slot`, which ends now."""
    queue, counts, plan, spent = state.queues[slot.model], slot.counts, state.book.plan, slot.spent_ms
    deferred = [call for call in queue.waiting.values() if not queue.was_retracted(call.rid)]
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
        sp_deferred=sum(c.is_continuation and (c.rid in slot.late or c.rid in slot.carried) for c in deferred),
        deferred=len(deferred),
        retracted=len(queue.running),
        protected=slot.plan.decodes if slot.plan else 0,
        planned_ms=slot.plan.length_ms if slot.plan else 0.0,
        round=state.book.number,
        round_planned_ms=plan.round_ms if plan else 0.0,
        round_ms=(now - state.book.began) * 1000,
        infeasible=plan.infeasible if plan else (),
        reason=reason,
    )
