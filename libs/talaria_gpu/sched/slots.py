"""The slot scheduler: which model is active, what may prefill now, when a slot ends (3.4, DESIGN 6).

Rules of this version:

- Models take slots in a fixed rotation; one without work is passed over. So a model with work waits for at most one
  slot of each other model.
- In P, SP and the phases between them every waiting call of the active model may prefill. After `slot_ms`, if another
  model has work, the slot enters Dfin: it admits nothing and drains; what still runs at its end is retracted by the
  switch. Dfin lasts for `drain_ms`, or for as long as the slot has prefilled if that is longer: what a slot prefills is
  lost with the retraction, so on a slow device shorter slots would do little but prefill the same calls again. (Eq. 4
  protects decode in the same spirit; budgets for P are not in this version.)
- A slot ends early when its model has no work and another has. It never ends while no other model has work.
- A slot owes its first waiting call a token: it does not enter Dfin before, or a prompt whose prefill takes longer than
  a slot would be retracted in each of them and never be answered.

So, while others wait, a slot lasts for `max(slot_ms, until the first call's first token) + max(drain_ms, time spent in
prefill)` and at most the two steps that cross these two ends.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from talaria_gpu.engine.contract import StepResult
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
from talaria_gpu.sched.queue import ModelQueue

_NOTHING: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class SlotConfig:
    """Budgets of a slot."""

    slot_ms: float
    drain_ms: float
    patience_ms: float = 10_000.0
    """A call that has waited for this long goes before every priority of its model."""


@dataclass(slots=True)
class _Slot:
    """The open slot. `opened` moves when work comes after an idle time: that time was nobody's loss."""

    opened: float
    busy_since: float | None
    switch_ms: float = 0.0
    busy_ms: float = 0.0
    phase: Phase = Phase.P
    drain_from: float = 0.0
    owed: str | None = None
    stuck: bool = False
    """The last step found nothing to run."""
    unsettled: bool = False
    """A call was dropped, and the engine may release its KV only in its next step."""
    prefill_ms: float = 0.0
    prefills: int = 0
    decodes: int = 0
    admitted: int = 0

    def stop_clock(self, now: float) -> None:
        if self.busy_since is not None:
            self.busy_ms += (now - self.busy_since) * 1000
            self.busy_since = None

    def stepped(self, kind: str, wall_ms: float, steps: int) -> None:
        """Name the phase by what the step did."""
        if kind == "prefill":
            self.prefills += 1
            self.prefill_ms += wall_ms
            if self.phase in {Phase.D1, Phase.D}:
                self.phase = Phase.SP
        elif kind == "decode":
            self.decodes += steps
            if self.phase is Phase.P:
                self.phase = Phase.D1
            elif self.phase is Phase.SP:
                self.phase = Phase.D


class SlotScheduler:
    """The core. `handle` is its only way to change; times are seconds of one clock."""

    def __init__(self, models: Sequence[str], config: SlotConfig, active: str | None = None, now: float = 0.0) -> None:
        """Schedule `models`, in that rotation.

        Args:
            models: all models of the instance.
            config: budgets.
            active: the model that is in the device buffer already, if one is.
            now: the time.
        """
        self._order = {name: position for position, name in enumerate(models)}
        self._names = tuple(models)
        self._config = config
        self._queues = {name: ModelQueue() for name in models}
        self._model_of: dict[str, str] = {}
        self._deadlines: list[tuple[float, str]] = []
        self._active = active
        self._slot = None if active is None else _Slot(opened=now, busy_since=None)

    # --- what it knows

    @property
    def active(self) -> str | None:
        """The model in the device buffer."""
        return self._active

    @property
    def phase(self) -> Phase | None:
        """The open slot's phase."""
        return self._slot.phase if self._slot else None

    def model_of(self, rid: str) -> str | None:
        """The model of an unfinished call; None: it is finished or was never here."""
        return self._model_of.get(rid)

    @property
    def resting(self) -> bool:
        """No call is unfinished and the engine has nothing to release: `Turn` would ask for nothing."""
        return not self._model_of and not (self._slot and self._slot.unsettled)

    def next_deadline(self) -> float | None:
        """The earliest deadline of an unfinished call, seconds."""
        while self._deadlines and self._deadlines[0][1] not in self._model_of:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def slot_remaining_ms(self, now: float) -> float:
        """Until the slot admits nothing more; the whole slot while no other model has work, 0 in Dfin."""
        slot = self._slot
        if slot is None or slot.phase is Phase.DFIN:
            return 0.0
        if self._next_other() is None:
            return self._config.slot_ms
        return max(0.0, self._config.slot_ms - (now - slot.opened) * 1000)

    def boundary_ms(self, now: float) -> float:
        """Until time alone changes what it asks for: a macro-step (sim engine) must be over by then. inf: never."""
        slot = self._slot
        if slot is None or self._next_other() is None:
            return math.inf
        if slot.phase is Phase.DFIN:
            return max(0.0, max(self._config.drain_ms, slot.prefill_ms) - (now - slot.drain_from) * 1000)
        return max(0.0, self._config.slot_ms - (now - slot.opened) * 1000)

    # --- what it is told

    def handle(self, now: float, message: Message) -> list[Effect]:
        """Take `message` at time `now`; returns what to do, in order."""
        match message:
            case Turn():
                return [*self._expire(now), *self._decide(now)]
            case Tick():
                return self._expire(now)
            case Stepped(model=model, result=result, waiting=waiting):
                self._stepped(model, result, waiting)
                for tokens in result.tokens:
                    if self._slot and tokens.rid == self._slot.owed and tokens.token_ids:
                        self._slot.owed = None
                    if tokens.finished:
                        self._forget(now, tokens.rid)
            case Arrived(call=call):
                self._arrived(now, call)
            case Left(rid=rid):
                self._forget(now, rid, dropped=True)
            case Switched(model=model, switch_ms=switch_ms):
                self._switched(now, model, switch_ms)
        return []

    def _arrived(self, now: float, call: Call) -> None:
        queue, slot = self._queues[call.model], self._slot
        if call.model == self._active and slot and not queue:
            if slot.phase is not Phase.DFIN and self._next_other() is None:
                slot.opened, slot.phase, slot.owed, slot.prefill_ms = now, Phase.P, call.rid, 0.0
            slot.busy_since = now
            slot.stuck = False
        queue.add(call)
        self._model_of[call.rid] = call.model
        if call.deadline:
            if len(self._deadlines) > 2 * len(self._model_of) + 64:  # most are of calls that finished in time
                self._deadlines = [entry for entry in self._deadlines if entry[1] in self._model_of]
                heapq.heapify(self._deadlines)
            heapq.heappush(self._deadlines, (call.deadline, call.rid))

    def _stepped(self, model: str, result: StepResult, waiting: Sequence[str]) -> None:
        queue, slot = self._queues[model], self._slot
        started = 0
        # A decode starts nothing; it changes the queue only when it retracts, and then the number changes.
        if result.kind != "decode" or len(waiting) != len(queue.waiting):
            started = queue.sync(waiting)
        if slot is None or model != self._active:
            return
        slot.stuck, slot.unsettled = result.kind == "idle", False
        slot.admitted += started
        slot.stepped(result.kind, result.wall_ms, result.steps)

    def _switched(self, now: float, model: str, switch_ms: float) -> None:
        if self._active is not None:
            self._queues[self._active].retract_all()
        queue = self._queues[model]
        self._active = model
        self._slot = _Slot(
            opened=now,
            busy_since=now if queue else None,
            switch_ms=switch_ms,
            owed=queue.first(queue.admissible(now, self._config.patience_ms)),
        )

    def _forget(self, now: float, rid: str, *, dropped: bool = False) -> None:
        model = self._model_of.pop(rid, None)
        if model is None:
            return
        queue, slot = self._queues[model], self._slot
        queue.remove(rid)
        if slot and model == self._active:
            if slot.owed == rid:
                slot.owed = None
            slot.unsettled = slot.unsettled or dropped
            if not queue:
                slot.stop_clock(now)

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

    def _next_other(self) -> str | None:
        """The next model in the rotation, after the active one, that has work."""
        start = -1 if self._active is None else self._order[self._active]
        for i in range(1, len(self._names) + 1):
            name = self._names[(start + i) % len(self._names)]
            if name != self._active and self._queues[name]:
                return name
        return None

    def _decide(self, now: float) -> list[Effect]:
        other = self._next_other()
        if self._active is None or self._slot is None:
            return [RunSwitch(other)] if other else []
        slot, queue = self._slot, self._queues[self._active]
        if other is None:
            if slot.phase is Phase.DFIN:  # who waited has left: there is no reason to end the slot any more
                slot.phase = Phase.D
            return [RunStep(self._active, self._admit(now))] if queue or slot.unsettled else []
        reason = self._end_reason(now, slot, queue)
        if reason is not None and slot.unsettled:
            return [RunStep(self._active, _NOTHING)]  # so that no dropped call is carried over the switch
        if reason is not None:
            return [self._close(now, slot, reason), RunSwitch(other)]
        return [RunStep(self._active, self._admit(now))]

    def _end_reason(self, now: float, slot: _Slot, queue: ModelQueue) -> Literal["drained", "budget", "idle"] | None:
        """Why the slot ends now that another model has work; enters Dfin when its time has come."""
        if not queue:
            return "drained" if slot.phase is Phase.DFIN else "idle"
        over = (now - slot.opened) * 1000 >= self._config.slot_ms
        if slot.phase is not Phase.DFIN and over and (slot.owed is None or slot.stuck):
            slot.phase, slot.drain_from = Phase.DFIN, now
        if slot.phase is not Phase.DFIN:
            return None
        if not queue.running:
            return "drained"
        if slot.stuck or (now - slot.drain_from) * 1000 >= max(self._config.drain_ms, slot.prefill_ms):
            return "budget"
        return None

    def _admit(self, now: float) -> frozenset[str] | None:
        """The seam for SP: what may prefill in this phase."""
        slot = self._slot
        if self._active is None or slot is None or slot.phase is Phase.DFIN:
            return _NOTHING
        return self._queues[self._active].admissible(now, self._config.patience_ms)

    def _close(self, now: float, slot: _Slot, reason: Literal["drained", "budget", "idle"]) -> SlotOver:
        slot.stop_clock(now)
        queue = self._queues[self._active or ""]
        return SlotOver(
            model=self._active or "",
            active_ms=slot.busy_ms,
            switch_ms=slot.switch_ms,
            prefills=slot.prefills,
            decodes=slot.decodes,
            admitted=slot.admitted,
            deferred=queue.never_started(),
            retracted=len(queue.running),
            reason=reason,
        )
