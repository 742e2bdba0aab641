"""What has happened, written into the slot scheduler's state: calls that come and go, steps, switches, deadlines."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from talaria_gpu.engine.contract import PrefixState, StepResult
from talaria_gpu.sched.messages import AbortCall, Call, Effect, Phase, Switched
from talaria_gpu.sched.slot import Slot
from talaria_gpu.sched.state import State

_NO_PREFIX = PrefixState()


def arrived(now: float, state: State, call: Call) -> None:
    """The engine took a call."""
    queue, slot = state.queues[call.model], state.slot
    if call.is_continuation:
        state.returns.arrived(now, call.model, call.session)
    if slot is not None and slot.mark is None:  # the first call after a rest, whosever turn it is
        slot.mark = now
        slot.restart(now, None)
    if slot is not None and call.model == slot.model:
        if not queue and slot.plan is None and state.next_other() is None:
            slot.restart(now, call.rid)
        else:
            slot.late.add(call.rid)
            if not queue and slot.plan is None and slot.owed is None and not slot.decoded:
                slot.owed = call.rid  # others came before it, and nobody has decided yet
        if not queue:
            slot.stuck = slot.empty = False
    elif not queue:
        state.joined(call.model)
    queue.add(call)
    state.model_of[call.rid] = call.model
    if call.deadline:
        if len(state.deadlines) > 2 * len(state.model_of) + 64:  # most are of calls that finished in time
            state.deadlines = [entry for entry in state.deadlines if entry[1] in state.model_of]
            heapq.heapify(state.deadlines)
        heapq.heappush(state.deadlines, (call.deadline, call.rid))


def stepped(now: float, state: State, model: str, result: StepResult, waiting: Sequence[str]) -> None:
    """A step of `model` is over; `waiting` is the engine's queue after it."""
    queue, slot = state.queues[model], state.slot
    state.estimates.step(model, result)
    if result.kind == "prefill" or any(tokens.finished for tokens in result.tokens):
        state.fresh.clear()
    # A decode starts nothing; it changes the queue only when it retracts, and then the number changes.
    before = set(queue.waiting) if result.kind != "decode" or len(waiting) != len(queue.waiting) else None
    if before is not None:
        queue.sync(waiting)
    if slot is not None and slot.model == model:
        gone = before - queue.waiting.keys() if before is not None else ()
        back = queue.waiting.keys() - before if before is not None else ()
        restoring = {rid for rid in slot.committed if state.prefixes.get(rid, _NO_PREFIX).host}
        of_p = slot.phase is Phase.P
        slot.stepped(now, result, started=gone, back=back, restoring=restoring)
        if of_p and slot.phase is not Phase.P:
            slot.left_p(queue.waiting.values())
    for tokens in result.tokens:
        if tokens.token_ids:
            state.out[tokens.rid] = state.out.get(tokens.rid, 0) + len(tokens.token_ids)
            if slot and slot.owed == tokens.rid:
                slot.owed = None
        if tokens.finished:
            call = queue.running.get(tokens.rid) or queue.waiting.get(tokens.rid)
            if call is not None:
                state.returns.finished(now, model, call.session)
            forget(now, state, tokens.rid)


def switched(now: float, state: State, message: Switched) -> None:
    """A model is in the device buffer: its slot opens."""
    model, switch_ms = message.model, message.switch_ms
    if state.slot is not None:
        state.queues[state.slot.model].after_switch(message.left, suspended=message.suspended)
    if message.suspended or message.retracted:
        state.book.lossy = message.retracted > 0
    if not message.failed:
        loaded, weights = message.loaded_bytes, message.weight_bytes
        state.estimates.switch(model, switch_ms, loaded_bytes=loaded, weight_bytes=weights)
    state.fresh.clear()
    owed = state.queues[model].owed(now, state.config.patience_ms)
    mark = now if state.model_of else None
    state.slot = slot = Slot(model, now, switch_ms, owed=owed.rid if owed else None, mark=mark)
    if state.next_other() is None:
        state.book.alone()
    else:
        slot.plan = state.book.slot(now - switch_ms / 1000, state.with_work(model), state.prefixes, state.out)
        slot.end = now + slot.plan.length_ms / 1000


def forget(now: float, state: State, rid: str, *, dropped: bool = False) -> None:
    """A call is over, or gone (`dropped`: before its end)."""
    model = state.model_of.pop(rid, None)
    if model is None:
        return
    queue, slot = state.queues[model], state.slot
    queue.remove(rid)
    state.out.pop(rid, None)
    state.prefixes.pop(rid, None)
    state.fresh.discard(rid)
    if slot is None:
        return
    if model == slot.model:
        slot.left(rid)
        slot.unsettled = slot.unsettled or dropped
        if not queue:
            slot.tick(now)
            slot.pending_ms = 0.0
    if not state.model_of:
        slot.tick(now)
        slot.mark = slot.plan = None
        state.book.alone()


def expire(now: float, state: State) -> list[Effect]:
    """Drop the calls whose deadline has passed."""
    effects: list[Effect] = []
    while state.deadlines and state.deadlines[0][0] <= now:
        _, rid = heapq.heappop(state.deadlines)
        model = state.model_of.get(rid)
        if model is not None:
            forget(now, state, rid, dropped=True)
            effects.append(AbortCall(rid, model, "deadline"))
    return effects
