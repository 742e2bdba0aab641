"""The slot scheduler: which model has the device, what may prefill now, when a slot ends (3.4, DESIGN 6).

While one model alone has work there are no rounds: everything that waits may prefill, and nothing is switched. As soon
as a second one has work, time is shared out in rounds (`plan`): each model with work gets one slot in turn,

    P → D1 → (SP → D)* → Dfin.

- **P** prefills what waited when the slot opened, the most urgent first, as far as protected decode leaves room. Calls
  that ran before and lost their KV always come back in, for protected decode is theirs; without such, the first in line
  does: a slot owes it a token, so every call is answered at last.
- **SP**, at decode boundaries only, lets in calls that return while the slot is open (`admission`).
- **Dfin** begins when nothing more fits beside protected decode, and admits nothing. The slot ends when d_m iterations
  have run, all told, or nothing runs any more. Where a switch keeps no KV, it also waits until decode has run for as
  long as the prefill that would be lost: on a slow device, slots would otherwise do little but prefill the same calls.
- A batch of P or SP is chosen by prediction and, once begun, finished: half a prompt is of no use to anybody.
- A slot ends early when there is nothing left for it to do; after a model's last call it lingers for the next return
  if switching away and back would take longer (`returns`).

So a model with work waits for at most one slot of each other model, and Eq. 5 bounds that wait as far as predictions
hold; what cannot hold is in the plan's `infeasible`, and in every slot's report.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Literal

from talaria_gpu.engine.contract import PrefixState, StepResult
from talaria_gpu.sched import admission
from talaria_gpu.sched.book import RoundBook
from talaria_gpu.sched.config import SlotConfig
from talaria_gpu.sched.demand import Batch, Capacity
from talaria_gpu.sched.estimates import Estimates
from talaria_gpu.sched.messages import (
    AbortCall,
    Arrived,
    Call,
    Effect,
    Left,
    Message,
    Phase,
    RunStep,
    RunSwitch,
    SlotOver,
    Stepped,
    Switched,
    Tick,
    Turn,
)
from talaria_gpu.sched.plan import RoundPlan
from talaria_gpu.sched.queue import ModelQueue
from talaria_gpu.sched.returns import Returns
from talaria_gpu.sched.slot import Slot

Reason = Literal["drained", "budget", "idle"]
__all__ = ["SlotConfig", "SlotScheduler"]
_NOTHING: frozenset[str] = frozenset()
_NO_PREFIX = PrefixState()
_ASK_MAX = 64
"""Prefix look-ups per turn and model."""


class SlotScheduler:
    """The core. `handle` is its only way to change; times are seconds of one clock."""

    def __init__(
        self,
        models: Sequence[str],
        config: SlotConfig,
        active: str | None = None,
        now: float = 0.0,
        capacity: Mapping[str, Capacity] | None = None,
    ) -> None:
        """Schedule `models`.

        Args:
            models: all models of the instance; slots rotate in this order.
            config: targets and budgets.
            active: the model that is in the device buffer already, if one is.
            now: the time.
            capacity: of the device, by model.
        """
        self._order = {name: position for position, name in enumerate(models)}
        self._names = tuple(models)
        self._config = config
        self._capacity = dict(capacity or {})
        self._queues = {name: ModelQueue() for name in models}
        self._model_of: dict[str, str] = {}
        self._out: dict[str, int] = {}
        self._prefixes: dict[str, PrefixState] = {}
        self._fresh: set[str] = set()
        """Calls whose prefix was looked up since the device's cache last changed."""
        self._deadlines: list[tuple[float, str]] = []
        self._slot = None if active is None else Slot(active, opened=now)
        self._returns = Returns()
        self.estimates = Estimates()
        self._book = RoundBook(config, self.estimates, self._queues)

    # --- what it knows

    @property
    def active(self) -> str | None:
        """The model in the device buffer."""
        return self._slot.model if self._slot else None

    @property
    def phase(self) -> Phase | None:
        """The open slot's phase."""
        return self._slot.phase if self._slot else None

    @property
    def plan(self) -> RoundPlan | None:
        """The round in progress; None while at most one model has work."""
        return self._book.plan

    @property
    def upcoming(self) -> str | None:
        """The model that gets the next slot: what staging may prepare. None: nobody waits."""
        return self._next_other()

    @property
    def resting(self) -> bool:
        """No call is unfinished and the engine has nothing to release: `Turn` would ask for nothing."""
        return not self._model_of and not (self._slot and self._slot.unsettled)

    def model_of(self, rid: str) -> str | None:
        """The model of an unfinished call; None: it is finished or was never here."""
        return self._model_of.get(rid)

    def calls_of(self, model: str) -> list[str]:
        """The model's unfinished calls."""
        return [rid for rid, its in self._model_of.items() if its == model]

    def opened(self, model: str, capacity: Capacity) -> None:
        """A model's device sizes, now that it is open."""
        self._capacity[model] = capacity

    def next_deadline(self) -> float | None:
        """The earliest deadline of an unfinished call, seconds."""
        while self._deadlines and self._deadlines[0][1] not in self._model_of:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def linger_until(self, now: float) -> float:
        """Until when `Turn` would answer with nothing though calls wait (s); `now`: not so."""
        slot, other = self._slot, self._next_other()
        if slot is None or other is None or slot.plan is None or slot.unsettled:
            return now
        queue = self._queues[slot.model]
        if queue.running or slot.phase is Phase.DFIN or slot.committed:
            return now
        until = self._worth_waiting(now, slot, other)
        if until is None or until <= now or not queue.waiting.keys() <= self._fresh or self._eligible(now, slot):
            return now
        return until

    def slot_remaining_ms(self, now: float) -> float:
        """Until the slot admits nothing more; the whole slot while no other model has work, 0 in Dfin."""
        slot = self._slot
        if slot is None or slot.phase is Phase.DFIN:
            return 0.0
        if slot.plan is None:
            return self._config.slot_ms
        return max(0.0, self._room(now, slot, 0.0))

    def at_risk(self, now: float) -> int:
        """Waiting calls whose first token is predicted after T_TTFT or after their deadline (deadline risk, 3.4)."""
        return sum(
            now + ms / 1000 > min(call.arrival + self._config.t_ttft_ms / 1000, call.deadline or math.inf)
            for model, wait_ms in self._waits_ms(now).items()
            for call, ms in self._first_tokens(model, wait_ms)
        )

    def asks(self) -> list[str]:
        """The calls whose `Engine.prefix_state` the next `Turn` should bring: those it may have to choose among.

        Each is asked for once while nothing happens that could change the answer.
        """
        slot = self._slot
        if self._next_other() is None:
            return []
        rids: list[str] = []
        for name, queue in self._queues.items():
            if slot is None or name != slot.model:
                rids += [rid for rid in itertools.islice(queue.waiting, _ASK_MAX) if rid not in self._prefixes]
            elif slot.committed.isdisjoint(queue.waiting):
                rids += [rid for rid in itertools.islice(queue.waiting, _ASK_MAX) if rid not in self._fresh]
        return rids

    def boundary_ms(self, now: float) -> float:
        """Until time alone may change what it asks for: a macro-step (sim engine) must be over by then. inf: never."""
        slot = self._slot
        if slot is None or self._next_other() is None:
            return math.inf
        if slot.plan is None:
            return 0.0
        if slot.phase is not Phase.DFIN:
            return max(0.0, self._room(now, slot, 0.0))
        return max(0.0, slot.lost_ms) if self._book.lossy and slot.decoded >= slot.plan.decodes else math.inf

    def boundary_steps(self, now: float) -> int | None:
        """Decode iterations until their number may change what it asks for, likewise; None: never."""
        slot = self._slot
        if slot is None or self._next_other() is None:
            return None
        if slot.plan is None or slot.phase in {Phase.P, Phase.SP}:
            return 1
        if slot.phase is Phase.DFIN:
            left = slot.plan.decodes - slot.decoded
            return left if left > 0 else None
        candidates = self._returning(slot)
        if not candidates:
            return None
        # Steps faster than predicted make room for a return that does not fit now.
        decode_ms, batch = self.estimates.decode_ms(slot.model), self._batch(slot)
        short_ms = min(-self._room(now, slot, batch.cost_ms(call)) for call in candidates)
        return 1 if short_ms <= 0 or not decode_ms else max(1, int(short_ms / decode_ms))

    # --- what it is told

    def handle(self, now: float, message: Message) -> list[Effect]:
        """Take `message` at time `now`; returns what to do, in order."""
        match message:
            case Turn(prefixes=prefixes):
                self._prefixes.update(prefixes)
                self._fresh.update(prefixes)
                return [*self._expire(now), *self._decide(now)]
            case Tick():
                return self._expire(now)
            case Stepped(model=model, result=result, waiting=waiting):
                self._stepped(now, model, result, waiting)
            case Arrived(call=call):
                self._arrived(now, call)
            case Left(rid=rid):
                self._forget(now, rid, dropped=True)
            case Switched():
                self._switched(now, message)
        return []

    def _arrived(self, now: float, call: Call) -> None:
        queue, slot = self._queues[call.model], self._slot
        if call.is_continuation:
            self._returns.arrived(now, call.model, call.session)
        if slot is not None and call.model == slot.model:
            if not queue and slot.plan is None and self._next_other() is None:
                slot.restart(now, call.rid)
            else:
                slot.late.add(call.rid)
            if not queue:
                slot.mark = now if slot.mark is None else slot.mark
                slot.stuck = slot.empty = False
        queue.add(call)
        self._model_of[call.rid] = call.model
        if call.deadline:
            if len(self._deadlines) > 2 * len(self._model_of) + 64:  # most are of calls that finished in time
                self._deadlines = [entry for entry in self._deadlines if entry[1] in self._model_of]
                heapq.heapify(self._deadlines)
            heapq.heappush(self._deadlines, (call.deadline, call.rid))

    def _stepped(self, now: float, model: str, result: StepResult, waiting: Sequence[str]) -> None:
        queue, slot = self._queues[model], self._slot
        self.estimates.step(model, result)
        if result.kind == "prefill" or any(tokens.finished for tokens in result.tokens):
            self._fresh.clear()
        # A decode starts nothing; it changes the queue only when it retracts, and then the number changes.
        before = set(queue.waiting) if result.kind != "decode" or len(waiting) != len(queue.waiting) else None
        if before is not None:
            queue.sync(waiting)
        if slot is not None and slot.model == model:
            gone = before - queue.waiting.keys() if before is not None else ()
            back = queue.waiting.keys() - before if before is not None else ()
            restoring = {rid for rid in slot.committed if self._prefixes.get(rid, _NO_PREFIX).host}
            slot.stepped(now, result, started=gone, back=back, restoring=restoring)
        for tokens in result.tokens:
            if tokens.token_ids:
                self._out[tokens.rid] = self._out.get(tokens.rid, 0) + len(tokens.token_ids)
                if slot and slot.owed == tokens.rid:
                    slot.owed = None
            if tokens.finished:
                call = queue.running.get(tokens.rid) or queue.waiting.get(tokens.rid)
                if call is not None:
                    self._returns.finished(now, model, call.session)
                self._forget(now, tokens.rid)

    def _switched(self, now: float, message: Switched) -> None:
        model, switch_ms = message.model, message.switch_ms
        if self._slot is not None:
            self._queues[self._slot.model].after_switch(message.left, suspended=message.suspended)
        if message.suspended or message.retracted:
            self._book.lossy = message.retracted > 0
        self.estimates.switch(model, switch_ms)
        self._fresh.clear()
        queue = self._queues[model]
        first = next(iter(queue.ranked(now, self._config.patience_ms)), None)
        self._slot = slot = Slot(model, now, switch_ms, owed=first.rid if first else None, mark=now if queue else None)
        if self._next_other() is None:
            self._book.alone()
        else:
            slot.plan = self._book.slot(now - switch_ms / 1000, self._with_work(model), self._prefixes, self._out)
            slot.end = now + slot.plan.length_ms / 1000

    def _forget(self, now: float, rid: str, *, dropped: bool = False) -> None:
        model = self._model_of.pop(rid, None)
        if model is None:
            return
        queue, slot = self._queues[model], self._slot
        queue.remove(rid)
        self._out.pop(rid, None)
        self._prefixes.pop(rid, None)
        self._fresh.discard(rid)
        if slot is None or model != slot.model:
            return
        slot.invested_ms.pop(rid, None)
        for each in (slot.committed, slot.late, slot.carried):
            each.discard(rid)
        if slot.owed == rid:
            slot.owed = None
        slot.unsettled = slot.unsettled or dropped
        if not queue:
            slot.tick(now)
            slot.pending_ms = 0.0
            if self._next_other() is None:
                slot.mark = None

    def _expire(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, rid = heapq.heappop(self._deadlines)
            model = self._model_of.get(rid)
            if model is not None:
                self._forget(now, rid, dropped=True)
                effects.append(AbortCall(rid, model, "deadline"))
        return effects

    # --- what it decides

    def _decide(self, now: float) -> list[Effect]:
        other, slot = self._next_other(), self._slot
        if slot is None:
            return [RunSwitch(other)] if other else []
        slot.lingering = slot.plan is not None and not self._queues[slot.model].running
        slot.tick(now)
        slot.lingering = False
        if other is None:
            return self._alone(now, slot)
        if slot.plan is None:
            self._compete(now, slot)
        move = self._advance(now, slot, other)
        if isinstance(move, frozenset):
            return [RunStep(slot.model, move)]
        if slot.unsettled:
            return [RunStep(slot.model, _NOTHING)]  # so that no dropped call is carried over a switch
        if move == "linger":
            return []
        return [self._close(now, slot, move), RunSwitch(other)]

    def _alone(self, now: float, slot: Slot) -> list[Effect]:
        """Nobody else has work: whatever round there was is over, and everything may prefill."""
        if slot.plan is not None:
            slot.enter(Phase.D, now)
            slot.plan = None
        self._book.alone()
        queue = self._queues[slot.model]
        if queue:
            return [RunStep(slot.model, queue.admissible(now, self._config.patience_ms))]
        return [RunStep(slot.model, _NOTHING)] if slot.unsettled else []

    def _compete(self, now: float, slot: Slot) -> None:
        """A second model has work: what the slot has had since it opened counts, and all that waits now is P's."""
        self._book.alone()
        slot.plan = self._book.slot(now, self._with_work(slot.model), self._prefixes, self._out)
        slot.empty = not self._queues[slot.model]
        if slot.mark is None:
            slot.opened = slot.mark = now
        length_s = slot.plan.length_ms / 1000
        slot.end = max(now, slot.opened + length_s)
        self._book.began = max(slot.opened - slot.switch_ms / 1000, now - length_s)
        slot.late.clear()
        slot.phase = Phase.P

    def _advance(self, now: float, slot: Slot, other: str) -> frozenset[str] | Reason | Literal["linger"]:
        """Go on in the slot: the calls to admit in its next step, or why there is none."""
        queue = self._queues[slot.model]
        if slot.stuck and slot.phase is not Phase.DFIN:
            slot.owed = None
            slot.enter(Phase.DFIN, now)
        slot.committed &= queue.waiting.keys()
        if slot.committed and slot.boundary and slot.owed is None and self._room(now, slot, 0.0) <= admission.EPS_MS:
            slot.committed.clear()  # decode ran while it waited for its prefix, and there is no time left
        if not slot.committed and slot.phase is not Phase.DFIN:
            slot.committed = set(self._open_p(now, slot) or self._open_sp(now, slot))
        if slot.committed:
            return frozenset(slot.committed)
        if not queue.running:
            return self._nothing_left(now, slot, other)
        if slot.phase is Phase.DFIN and (slot.stuck or slot.earned(self._book.lossy)):
            return "budget"
        return _NOTHING

    def _open_p(self, now: float, slot: Slot) -> list[str]:
        """In P, its next batch; when nothing more of it fits, P is over."""
        if slot.phase is not Phase.P:
            return []
        batch = self._batch_of_p(now, slot)
        if not batch:
            waiting = self._queues[slot.model].waiting.values()
            slot.carried = {c.rid for c in waiting if c.is_continuation and c.rid not in slot.late}
            slot.enter(Phase.D1, now)
        return batch

    def _open_sp(self, now: float, slot: Slot) -> list[str]:
        """In decode, the batch of an SP that begins now, if there is one; enters Dfin when none can fit any more."""
        if slot.phase is Phase.SP:
            slot.enter(Phase.D, now)
        if self._room(now, slot, 0.0) <= admission.EPS_MS:
            slot.enter(Phase.DFIN, now)
            return []
        batch = self._eligible(now, slot) if slot.boundary or not self._queues[slot.model].running else []
        if batch:
            slot.enter(Phase.SP, now)
            slot.counts.sps += 1
        return batch

    def _nothing_left(self, now: float, slot: Slot, other: str) -> Reason | Literal["linger"]:
        if slot.phase is Phase.DFIN:
            return "drained"
        until = self._worth_waiting(now, slot, other)
        return "linger" if until is not None and until > now else "idle"

    def _worth_waiting(self, now: float, slot: Slot, other: str) -> float | None:
        """Until when an idle slot waits for a return: never beyond its end, nor longer than leaving would cost."""
        if not self._config.ablation.sp or self._room(now, slot, 0.0) <= admission.EPS_MS:
            return None
        leaving_ms = self.estimates.to_switch_ms(other) + self.estimates.to_switch_ms(slot.model)
        until = self._returns.wait_until(slot.model, leaving_ms)
        return None if until is None else min(until, slot.end)

    def _batch_of_p(self, now: float, slot: Slot) -> list[str]:
        reserve_ms = 0.0
        if self._config.ablation.sp:
            reserve_ms = min(self._book.sp_ms(slot.model), max(0.0, self._room(now, slot, 0.0)) / 2)
        queue, batch = self._queues[slot.model], self._batch(slot)
        ranked = queue.ranked(now, self._config.patience_ms)
        return admission.for_p(slot, queue, ranked, batch, lambda ms: self._room(now, slot, ms) - reserve_ms)

    def _eligible(self, now: float, slot: Slot) -> list[str]:
        """The batch for an SP now."""
        returning = self._returning(slot)
        if not returning:
            return []
        rank = {c.rid: i for i, c in enumerate(self._queues[slot.model].ranked(now, self._config.patience_ms))}
        returning.sort(key=lambda call: rank[call.rid])
        return admission.fill(self._batch(slot), returning, lambda ms: self._room(now, slot, ms))

    def _returning(self, slot: Slot) -> list[Call]:
        """The calls that SP may let in, whether they fit or not."""
        if not self._config.ablation.sp:
            return []
        return admission.for_sp(slot, self._queues[slot.model], self._prefixes)

    def _batch(self, slot: Slot) -> Batch:
        return Batch(
            slot.model,
            self.estimates,
            self._prefixes,
            self._out,
            capacity=self._capacity.get(slot.model),
            running=self._queues[slot.model].running.values(),
        )

    def _room(self, now: float, slot: Slot, more_ms: float) -> float:
        return slot.room_ms(now, self.estimates.decode_ms(slot.model), self._book.lossy, more_ms)

    def _close(self, now: float, slot: Slot, reason: Reason) -> SlotOver:
        queue, counts, plan = self._queues[slot.model], slot.counts, self._book.plan
        self._book.closed(slot.model, slot.spent_ms[Phase.SP])
        deferred = [call for call in queue.waiting.values() if not queue.was_retracted(call.rid)]
        over = SlotOver(
            model=slot.model,
            switch_ms=slot.switch_ms,
            p_ms=slot.spent_ms[Phase.P],
            d1_ms=slot.spent_ms[Phase.D1],
            sp_ms=slot.spent_ms[Phase.SP],
            d_ms=slot.spent_ms[Phase.D],
            dfin_ms=slot.spent_ms[Phase.DFIN],
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
            round=self._book.number,
            round_planned_ms=plan.round_ms if plan else 0.0,
            round_ms=(now - self._book.began) * 1000,
            infeasible=plan.infeasible if plan else (),
            reason=reason,
        )
        if slot.empty:
            self._book.alone()
        return over

    # --- the rotation

    def _with_work(self, first: str) -> list[str]:
        """`first` and, in the order of their slots, the other models with work.

        The order is a fixed rotation, so that nobody is overtaken twice; what staging knows of
        the next model's readiness would enter here.
        """
        start = self._order[first]
        names = [self._names[(start + i) % len(self._names)] for i in range(len(self._names))]
        return [name for name in names if name == first or self._queues[name]]

    def _next_other(self) -> str | None:
        """The next model in the rotation, after the active one, that has work."""
        active = self._slot.model if self._slot else None
        start = -1 if active is None else self._order[active]
        for i in range(1, len(self._names) + 1):
            name = self._names[(start + i) % len(self._names)]
            if name != active and self._queues[name]:
                return name
        return None

    # --- predictions

    def _waits_ms(self, now: float) -> dict[str, float]:
        """Until each model with work can prefill what waits for it now."""
        slot = self._slot
        if slot is None or slot.plan is None or self._book.plan is None:
            return {name: self.estimates.to_switch_ms(name) for name, queue in self._queues.items() if queue}
        waits: dict[str, float] = {}
        at_ms = max(0.0, (slot.end - now) * 1000)
        for name in self._with_work(slot.model)[1:]:
            at_ms += self.estimates.to_switch_ms(name)
            waits[name] = at_ms
            planned = self._book.plan.slots.get(name)
            at_ms += planned.length_ms if planned else self._config.slot_ms
        waits[slot.model] = 0.0 if slot.phase is Phase.P else at_ms + self.estimates.to_switch_ms(slot.model)
        return waits

    def _first_tokens(self, model: str, wait_ms: float) -> list[tuple[Call, float]]:
        """The model's waiting calls with the predicted ms until their first token, one after the other."""
        per_token = self.estimates.prefill_ms_per_token.get(model, 0.0)
        out: list[tuple[Call, float]] = []
        for call in self._queues[model].waiting.values():
            if call.rid not in self._out:
                cached = self._prefixes.get(call.rid, _NO_PREFIX)
                wait_ms += per_token * max(1, call.tokens - cached.device - cached.host)
                out.append((call, wait_ms))
        return out
