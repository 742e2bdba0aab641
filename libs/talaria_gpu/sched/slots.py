"""The slot scheduler: which model has the device, what may prefill now, when a slot ends (3.4, DESIGN 6).

While one model alone has work there are no rounds: everything that waits may prefill, and nothing is switched. As soon
as a second one has work, time is shared out in rounds (`plan`): each model with work gets one slot in turn,

    P → D1 → (SP → D)* → Dfin.

- **P** prefills what waited when the slot opened, the most urgent first, as far as protected decode leaves room. Calls
  that ran before and lost their KV always come back in, for protected decode is theirs; without such, the first in line
  does: a slot owes it a token, so every call is answered at last. While an overdue one finds no room on the device, P
  stays open for it and nobody else gets in, so that what runs makes room as it ends.
- **SP**, at decode boundaries only, lets in calls that return while the slot is open (`admission`).
- **Dfin** begins when nothing more fits beside protected decode, and admits nothing. The slot ends when d_m iterations
  have run, all told, or nothing runs any more. Where a switch keeps no KV, it also waits until decode has run for as
  long as the prefill that would be lost: on a slow device, slots would otherwise do little but prefill the same calls.
- A batch of P or SP is chosen by prediction and, once begun, finished: half a prompt is of no use to anybody. One that
  the engine has no room for is given up when the slot's time is over.
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

from talaria_gpu.sched import admission, choice, forecast, record, report
from talaria_gpu.sched.config import SlotConfig
from talaria_gpu.sched.demand import Capacity
from talaria_gpu.sched.estimates import Estimates
from talaria_gpu.sched.messages import (
    Arrived,
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
from talaria_gpu.sched.slot import Slot
from talaria_gpu.sched.state import State

Reason = Literal["drained", "budget", "idle"]
__all__ = ["SlotConfig", "SlotScheduler"]
_NOTHING: frozenset[str] = frozenset()
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
            models: all models of the instance; slots rotate in this order, as long as no other helps staging more.
            config: targets and budgets.
            active: the model that is in the device buffer already, if one is.
            now: the time.
            capacity: of the device, by model.
        """
        self._state = State(models, config, capacity or {})
        if active is not None:
            self._state.slot = Slot(active, opened=now)

    # --- what it knows

    @property
    def active(self) -> str | None:
        """The model in the device buffer."""
        return self._state.slot.model if self._state.slot else None

    @property
    def phase(self) -> Phase | None:
        """The open slot's phase."""
        return self._state.slot.phase if self._state.slot else None

    @property
    def plan(self) -> RoundPlan | None:
        """The round in progress; None while at most one model has work."""
        return self._state.book.plan

    @property
    def estimates(self) -> Estimates:
        """What was learnt of the engine's costs."""
        return self._state.estimates

    @property
    def upcoming(self) -> str | None:
        """The model that gets the next slot: what staging may prepare. None: nobody waits."""
        return self._state.next_other()

    @property
    def resting(self) -> bool:
        """No call is unfinished and the engine has nothing to release: `Turn` would ask for nothing."""
        return not self._state.model_of and not (self._state.slot and self._state.slot.unsettled)

    def model_of(self, rid: str) -> str | None:
        """The model of an unfinished call; None: it is finished or was never here."""
        return self._state.model_of.get(rid)

    def calls_of(self, model: str) -> list[str]:
        """The model's unfinished calls."""
        return [rid for rid, its in self._state.model_of.items() if its == model]

    def opened(self, model: str, capacity: Capacity) -> None:
        """A model's device sizes, now that it is open."""
        self._state.capacity[model] = capacity

    def next_deadline(self) -> float | None:
        """The earliest deadline of an unfinished call, seconds."""
        deadlines = self._state.deadlines
        while deadlines and deadlines[0][1] not in self._state.model_of:
            heapq.heappop(deadlines)
        return deadlines[0][0] if deadlines else None

    def linger_until(self, now: float) -> float:
        """Until when `Turn` would answer with nothing though calls wait (s); `now`: not so."""
        return forecast.linger_until(now, self._state)

    def slot_remaining_ms(self, now: float) -> float:
        """Until the slot admits nothing more; the whole slot while no other model has work, 0 in Dfin."""
        return forecast.slot_remaining_ms(now, self._state)

    def at_risk(self, now: float) -> int:
        """Waiting calls whose first token is predicted after T_TTFT or after their deadline (deadline risk, 3.4)."""
        return forecast.at_risk(now, self._state)

    def asks(self) -> list[str]:
        """The calls whose `Engine.prefix_state` the next `Turn` should bring: those it may have to choose among.

        Each is asked for once while nothing happens that could change the answer.
        """
        slot = self._state.slot
        if self._state.next_other() is None:
            return []
        known, fresh = self._state.prefixes, self._state.fresh
        rids: list[str] = []
        for name, queue in self._state.queues.items():
            if slot is None or name != slot.model:
                rids += [rid for rid in itertools.islice(queue.waiting, _ASK_MAX) if rid not in known]
            elif slot.committed.isdisjoint(queue.waiting):
                rids += [rid for rid in itertools.islice(queue.waiting, _ASK_MAX) if rid not in fresh]
        return rids

    def boundary_ms(self, now: float) -> float:
        """Until time alone may change what it asks for: a macro-step (sim engine) must be over by then. inf: never."""
        return forecast.boundary_ms(now, self._state)

    def boundary_steps(self, now: float) -> int | None:
        """Decode iterations until their number may change what it asks for, likewise; None: never."""
        return forecast.boundary_steps(now, self._state)

    # --- what it is told

    def handle(self, now: float, message: Message) -> list[Effect]:
        """Take `message` at time `now`; returns what to do, in order."""
        match message:
            case Turn(prefixes=prefixes):
                self._state.prefixes.update(prefixes)
                self._state.fresh.update(prefixes)
                return [*record.expire(now, self._state), *self._decide(now)]
            case Tick():
                return record.expire(now, self._state)
            case Stepped(model=model, result=result, waiting=waiting):
                record.stepped(now, self._state, model, result, waiting)
            case Arrived(call=call):
                record.arrived(now, self._state, call)
            case Left(rid=rid):
                record.forget(now, self._state, rid, dropped=True)
            case Switched():
                record.switched(now, self._state, message)
        return []

    # --- what it decides

    def _decide(self, now: float) -> list[Effect]:
        other, slot = self._state.next_other(), self._state.slot
        if slot is None:
            return [RunSwitch(other)] if other else []
        slot.lingering = slot.plan is not None and not self._state.queues[slot.model].running
        slot.tick(now)
        slot.lingering = False
        if other is None:
            return self._alone(now, slot)
        if slot.plan is None:
            other = self._compete(now, slot) or other
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
        self._state.book.alone()
        queue = self._state.queues[slot.model]
        if queue:
            return [RunStep(slot.model, queue.admissible(now, self._state.config.patience_ms))]
        return [RunStep(slot.model, _NOTHING)] if slot.unsettled else []

    def _compete(self, now: float, slot: Slot) -> str | None:
        """A second model has work: what the slot has had since it opened counts, and all that waits now is P's.

        Returns the model that is next, now that there is an order.
        """
        self._state.book.alone()
        self._state.reorder()
        slot.plan = self._state.book.slot(now, self._state.with_work(slot.model), self._state.prefixes, self._state.out)
        slot.empty = not self._state.queues[slot.model]
        length_s = slot.plan.length_ms / 1000
        slot.end = max(now, slot.opened + length_s)
        self._state.book.began = max(slot.opened - slot.switch_ms / 1000, now - length_s)
        slot.late.clear()
        slot.refused = False
        slot.phase = Phase.P
        return self._state.next_other()

    def _advance(self, now: float, slot: Slot, other: str) -> frozenset[str] | Reason | Literal["linger"]:
        """Go on in the slot: the calls to admit in its next step, or why there is none."""
        queue = self._state.queues[slot.model]
        if slot.stuck and slot.phase is not Phase.DFIN:
            slot.owed = None
            self._enter(now, slot, Phase.DFIN)
        slot.committed &= queue.waiting.keys()
        if slot.committed and slot.boundary and self._waits_in_vain(now, slot):
            self._enter(now, slot, Phase.DFIN)
        if slot.refused and choice.rank_of_owed(now, self._state, slot) != math.inf:
            slot.committed.discard(slot.owed or "")  # until it is overdue, others may have the room that it has not
        if not slot.committed and slot.phase is not Phase.DFIN:
            slot.committed = set(self._open_p(now, slot) or self._open_sp(now, slot))
        if slot.committed:
            return frozenset(slot.committed)
        if not queue.running:
            return self._nothing_left(now, slot, other)
        if slot.phase is Phase.DFIN and (slot.stuck or slot.earned(self._state.book.lossy)):
            return "budget"
        return _NOTHING

    def _open_p(self, now: float, slot: Slot) -> list[str]:
        """In P, its next batch; when nothing more of it fits, P is over.

        P stays open while running calls have the room of one that the slot owes and that is overdue: they decode.
        """
        if slot.phase is not Phase.P:
            return []
        batch = choice.batch_of_p(now, self._state, slot)
        waits = choice.rank_of_owed(now, self._state, slot) == math.inf and self._state.queues[slot.model].running
        if not batch and not (waits and self._has_time(now, slot)):
            self._enter(now, slot, Phase.D1)
        return batch

    def _open_sp(self, now: float, slot: Slot) -> list[str]:
        """In decode, the batch of an SP that begins now, if there is one; enters Dfin when none can fit any more."""
        if slot.phase is Phase.P:
            return []
        if slot.phase is Phase.SP:
            slot.enter(Phase.D, now)
        if not self._has_time(now, slot):
            slot.enter(Phase.DFIN, now)
            return []
        at_boundary = slot.boundary or not self._state.queues[slot.model].running
        batch = choice.batch_of_sp(now, self._state, slot) if at_boundary else []
        if batch:
            slot.enter(Phase.SP, now)
            slot.counts.sps += 1
        return batch

    def _has_time(self, now: float, slot: Slot) -> bool:
        """Whether there is time left beyond all protected decode."""
        return self._state.room_ms(now, slot, 0.0) > admission.EPS_MS

    def _waits_in_vain(self, now: float, slot: Slot) -> bool:
        """Whether time has run out while the batch under way waited for its prefix, or for room.

        What P must let in and has a prefix on its way may make the slot twice as long, and no longer: the prefix may
        find no room either.
        """
        if self._has_time(now, slot):
            return False
        queue, prefixes = self._state.queues[slot.model], self._state.prefixes
        must = [rid for rid in slot.committed if rid == slot.owed or queue.was_retracted(rid)]
        coming = any(rid in prefixes and prefixes[rid].host for rid in must)
        length_ms = slot.plan.length_ms if slot.plan is not None else 0.0
        return not coming or (now - slot.end) * 1000 >= length_ms - admission.EPS_MS

    def _enter(self, now: float, slot: Slot, phase: Phase) -> None:
        if slot.phase is Phase.P:
            slot.left_p(self._state.queues[slot.model].waiting.values())
        slot.enter(phase, now)

    def _nothing_left(self, now: float, slot: Slot, other: str) -> Reason | Literal["linger"]:
        if slot.phase is Phase.DFIN:
            return "drained"
        until = choice.worth_waiting(now, self._state, slot, other)
        return "linger" if until is not None and until > now else "idle"

    def _close(self, now: float, slot: Slot, reason: Reason) -> SlotOver:
        book = self._state.book
        book.closed(slot.model, slot.spent_ms[Phase.SP], slot.linger_ms + sum(slot.spent_ms.values()))
        over = report.slot_over(now, self._state, slot, reason)
        if slot.empty:
            book.alone()
        return over
