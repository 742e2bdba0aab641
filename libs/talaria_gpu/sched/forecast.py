"""What the slot scheduler foresees: when it decides anew, how long a slot stays open, who will be late (3.4, 4.1)."""

from __future__ import annotations

import math

from talaria_gpu.engine.contract import PrefixState
from talaria_gpu.sched import choice
from talaria_gpu.sched.messages import Call, Phase
from talaria_gpu.sched.state import State

_NO_PREFIX = PrefixState()


def linger_until(now: float, state: State) -> float:
    """See `SlotScheduler.linger_until`."""
    slot, other = state.slot, state.next_other()
    if slot is None or other is None or slot.plan is None or slot.unsettled:
        return now
    queue = state.queues[slot.model]
    if queue.running or slot.phase is Phase.DFIN or slot.committed:
        return now
    until = choice.worth_waiting(now, state, slot, other)
    if until is None or until <= now or not queue.waiting.keys() <= state.fresh or choice.batch_of_sp(now, state, slot):
        return now
    return until


def slot_remaining_ms(now: float, state: State) -> float:
    """See `SlotScheduler.slot_remaining_ms`."""
    slot = state.slot
    if slot is None or slot.phase is Phase.DFIN:
        return 0.0
    if slot.plan is None:
        return state.config.slot_ms
    return max(0.0, state.room_ms(now, slot, 0.0))


def at_risk(now: float, state: State) -> int:
    """See `SlotScheduler.at_risk`."""
    return sum(
        now + ms / 1000 > min(call.arrival + state.config.t_ttft_ms / 1000, call.deadline or math.inf)
        for model, wait_ms in _waits_ms(now, state).items()
        for call, ms in _first_tokens(state, model, wait_ms)
    )


def boundary_ms(now: float, state: State) -> float:
    """See `SlotScheduler.boundary_ms`."""
    slot = state.slot
    if slot is None or state.next_other() is None:
        return math.inf
    if slot.plan is None:
        return 0.0
    if slot.phase is not Phase.DFIN:
        return max(0.0, state.room_ms(now, slot, 0.0))
    return max(0.0, slot.lost_ms) if state.book.lossy and slot.decoded >= slot.plan.decodes else math.inf


def boundary_steps(now: float, state: State) -> int | None:
    """See `SlotScheduler.boundary_steps`."""
    slot = state.slot
    if slot is None or state.next_other() is None:
        return None
    if slot.plan is None or slot.phase in {Phase.P, Phase.SP}:
        return 1
    if slot.phase is Phase.DFIN:
        left = slot.plan.decodes - slot.decoded
        return left if left > 0 else None
    candidates = choice.returning(now, state, slot)
    if not candidates:
        return None
    # Steps faster than predicted make room for a return that does not fit now.
    decode_ms, batch = state.estimates.decode_ms(slot.model), state.batch(slot)
    short_ms = min(-state.room_ms(now, slot, batch.cost_ms(call)) for call in candidates)
    return 1 if short_ms <= 0 or not decode_ms else max(1, int(short_ms / decode_ms))


def _waits_ms(now: float, state: State) -> dict[str, float]:
    """Until each model with work can prefill what waits for it now."""
    slot, plan, estimates = state.slot, state.book.plan, state.estimates
    if slot is None or slot.plan is None or plan is None:
        return {name: estimates.to_switch_ms(name) for name, queue in state.queues.items() if queue}
    waits: dict[str, float] = {}
    at_ms = max(0.0, (slot.end - now) * 1000)
    for name in state.with_work(slot.model)[1:]:
        at_ms += estimates.to_switch_ms(name)
        waits[name] = at_ms
        planned = plan.slots.get(name)
        at_ms += planned.length_ms if planned else state.config.slot_ms
    waits[slot.model] = 0.0 if slot.phase is Phase.P else at_ms + estimates.to_switch_ms(slot.model)
    return waits


def _first_tokens(state: State, model: str, wait_ms: float) -> list[tuple[Call, float]]:
    """The model's waiting calls with the predicted ms until their first token, one after the other."""
    per_token = state.estimates.prefill_ms_per_token.get(model, 0.0)
    out: list[tuple[Call, float]] = []
    for call in state.queues[model].waiting.values():
        if call.rid not in state.out:
            cached = state.prefixes.get(call.rid, _NO_PREFIX)
            wait_ms += per_token * max(1, call.tokens - cached.device - cached.host)
            out.append((call, wait_ms))
    return out
