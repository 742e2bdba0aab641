"""The toy's own books: rounds and their plans, what is left of a slot, who ranks before whom.

Nothing here reads the scheduler's state. The arithmetic of one plan is `plan_round`'s (`test_plan`); what goes into it
is worked out again, from what the toy did.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from talaria_gpu.engine.contract import PrefixState
from talaria_gpu.sched.messages import Phase
from talaria_gpu.sched.plan import Demand, Limits, RoundPlan, SlotPlan, plan_round

if TYPE_CHECKING:
    from tests.gpu.sched.toy import Toy

DECODE_MS = 10
START = 1000.0
EPS = 1e-6
_NONE = PrefixState()


@dataclass
class Slot:
    """What the toy itself knows of the open slot. Durations ms, times s."""

    model: str
    opened: float
    number: int
    switch_ms: float = 0.0
    plan: SlotPlan | None = None
    """None: nobody else has had work."""
    end: float = 0.0
    others_since: float | None = None
    owed: str | None = None
    waited: set[str] = field(default_factory=set)
    """What waited when P began."""
    left_p: set[str] = field(default_factory=set)
    """What P has left."""
    in_vain: set[str] = field(default_factory=set)
    """What there was no room for, though the scheduler asked."""
    p_over: bool = False
    empty: bool = False
    idle: bool = True
    """Its clock stands: there is no work for anybody."""
    decoded: int = 0
    decoded_ms: float = 0.0
    invested: dict[str, float] = field(default_factory=dict)
    pending_ms: float = 0.0
    prefill_ms: float = 0.0
    longest_ms: float = 0.0
    longest_p_ms: float = 0.0
    sp_ms: float = 0.0
    since_prefill: int = 1
    ended: int = 0
    """Calls that came to their end in it."""

    def __post_init__(self) -> None:
        self.began = self.opened

    def restart(self, now: float, rid: str | None) -> None:
        """Work comes to an instance that had none: P begins anew."""
        self.opened, self.owed = now, rid
        self.decoded, self.decoded_ms, self.pending_ms = 0, 0.0, 0.0
        self.invested.clear()
        self.in_vain.clear()


class Books:
    """Of one toy."""

    def __init__(self, toy: Toy) -> None:
        self._toy = toy
        self._plan: RoundPlan | None = None
        self._served: set[str] = set()
        self._began = 0.0
        self._sp_ms: dict[str, float] = {}
        self._switch_ms: dict[str, float] = {}
        self._prefilled: set[str] = set()
        self._decoded: set[str] = set()
        self._batch: frozenset[str] = frozenset()
        """The batch under way."""
        self._phase: Phase | None = None

    # --- what happens

    def arrived(self, rid: str) -> None:
        """A call is about to be queued."""
        toy, slot = self._toy, self._toy.slot
        if slot is None:
            return
        if slot.idle:
            slot.restart(toy.now, None)
        slot.idle = False
        if toy.by_rid[rid].model != slot.model or toy.has_work(slot.model):
            return
        if slot.plan is None and not toy.others_wait():
            slot.restart(toy.now, rid)
        elif slot.plan is None and slot.owed is None and not slot.decoded:
            slot.owed = rid
        slot.empty = False

    def contest(self) -> None:
        """Before a decision: others begin to wait, and the slot is one of a round from now on; or none wait any more."""
        toy, slot = self._toy, self._toy.slot
        if slot is None:
            return
        if not toy.others_wait():
            slot.plan = slot.others_since = None
            self.alone()
            return
        if slot.plan is not None:
            return
        self.alone()
        slot.others_since = toy.now
        slot.plan = self._slot_plan(toy.now, slot.model)
        length_s = slot.plan.length_ms / 1000
        slot.end = max(toy.now, slot.opened + length_s)
        self._began = max(slot.opened - slot.switch_ms / 1000, toy.now - length_s)
        slot.empty = not toy.has_work(slot.model)
        self._open_p(slot)

    def alone(self) -> None:
        """There is no round."""
        self._plan = None
        self._served = set()

    def switched(self) -> None:
        """A slot has opened."""
        toy, slot = self._toy, self._toy.slot
        assert slot
        slot.switch_ms, slot.idle = toy.switch_ms, False
        known = self._switch_ms.get(slot.model)
        self._switch_ms[slot.model] = slot.switch_ms if known is None else known + 0.2 * (slot.switch_ms - known)
        slot.owed = self._owed(slot.model, toy.now)
        if toy.others_wait():
            slot.others_since = toy.now
            slot.plan = self._slot_plan(toy.now - toy.switch_ms / 1000, slot.model)
            slot.end = toy.now + slot.plan.length_ms / 1000
        else:
            self.alone()
        self._open_p(slot)

    def stepped(self, phase: Phase | None, admit: frozenset[str], kind: str, took: float, ready: Sequence[str]) -> None:
        """A step is over; the toy has not told the scheduler yet."""
        slot = self._toy.slot
        assert slot
        slot.longest_ms = max(slot.longest_ms, took)
        if kind == "prefill":
            self._prefilled.add(slot.model)
            slot.prefill_ms += took
            slot.pending_ms += took
            slot.longest_p_ms = max(slot.longest_p_ms, took if phase is Phase.P else 0.0)
            slot.sp_ms += took if phase is Phase.SP else 0.0
            slot.since_prefill = 0
            if ready:
                slot.invested |= dict.fromkeys(ready, slot.pending_ms / len(ready))
                slot.pending_ms = 0.0
        elif kind == "decode":
            self._decoded.add(slot.model)
            slot.decoded += 1
            slot.decoded_ms += took
            slot.since_prefill += 1
            slot.in_vain |= admit

    def put_back(self, rid: str) -> None:
        """A running call lost its rows."""
        assert self._toy.slot
        self._toy.slot.invested.pop(rid, None)

    def ended(self, rid: str) -> None:
        """A call is gone from the toy's books and the scheduler's."""
        toy, slot = self._toy, self._toy.slot
        if slot is None:
            return
        slot.idle = not toy.has_work(slot.model) and not toy.others_wait()
        if slot.idle:
            slot.plan = slot.others_since = None
            self.alone()
        if toy.by_rid[rid].model != slot.model:
            return
        slot.ended += 1
        slot.invested.pop(rid, None)
        if not toy.has_work(slot.model) or rid == toy.told_half:
            slot.pending_ms = 0.0

    # --- what is left

    def _room_ms(self, more_ms: float = 0.0) -> float:
        toy, slot = self._toy, self._toy.slot
        assert slot
        assert slot.plan is not None
        protected = max(0, slot.plan.decodes - slot.decoded) * (DECODE_MS if slot.model in self._decoded else 0)
        if not toy.keeps:
            unearned = sum(slot.invested.values()) + slot.pending_ms - slot.decoded_ms
            protected = max(protected, unearned + more_ms)
        return (slot.end - toy.now) * 1000 - more_ms - protected

    def _reserve_ms(self, phase: Phase) -> float:
        """What P keeps for the returns that the slot can expect."""
        slot = self._toy.slot
        assert slot
        if phase is not Phase.P or not self._toy.config.ablation.sp:
            return 0.0
        return min(self._sp_ms.get(slot.model, 0.0), max(0.0, self._room_ms()) / 2)

    def _fits(self, batch: Iterable[str], reserve_ms: float) -> bool:
        slot = self._toy.slot
        assert slot
        return self._room_ms(self._cost_ms(slot.model, batch)) - reserve_ms >= -EPS

    def _cost_ms(self, model: str, rids: Iterable[str]) -> float:
        toy = self._toy
        if model not in self._prefilled:
            return 0.0
        return sum(max(1, toy.length(rid) - sum(toy.told.get(rid, _NONE))) for rid in rids)

    def _has_room(self, batch: Iterable[str]) -> bool:
        """Whether the device has rows and places for all of them, each one's own decode included."""
        toy, slot = self._toy, self._toy.slot
        assert slot
        running, batch = toy.run[slot.model], list(batch)
        if len(running) + len(batch) <= 1:
            return True
        if toy.places and len(running) + len(batch) > toy.places:
            return False
        rows = sum(map(toy.length, running)) + sum(toy.length(rid) + toy.left[rid] for rid in batch)
        return not toy.rows or rows <= toy.rows

    # --- ranks

    def _overdue(self, rid: str, now: float) -> bool:
        arrival = START + self._toy.by_rid[rid].at_ms / 1000
        return (now - arrival) * 1000 >= self._toy.config.patience_ms

    def _rank(self, rid: str) -> float:
        toy = self._toy
        return math.inf if rid in toy.started or self._overdue(rid, toy.now) else toy.by_rid[rid].priority

    def _urgency(self, rid: str) -> tuple[float, float, float]:
        return self._urgency_at(rid, self._toy.now)

    def _urgency_at(self, rid: str, now: float) -> tuple[float, float, float]:
        toy, job = self._toy, self._toy.by_rid[rid]
        place = -toy.wait[job.model].index(rid)
        if rid in toy.started or self._overdue(rid, now):
            return math.inf, 0.0, place
        return job.priority, -math.inf if job.deadline_ms is None else -job.deadline_ms, place

    def _owed(self, model: str, now: float) -> str | None:
        """The most urgent that never ran; beside such as did and lost their KV, only if it is overdue."""
        toy = self._toy
        new = [rid for rid in toy.wait[model] if rid not in toy.started]
        first = max(new, key=lambda rid: self._urgency_at(rid, now), default=None)
        if first is None or len(new) == len(toy.wait[model]) or self._overdue(first, now):
            return first
        return None

    # --- rounds

    def _open_p(self, slot: Slot) -> None:
        slot.waited, slot.left_p, slot.p_over = set(self._toy.wait[slot.model]), set(), False
        slot.in_vain.clear()
        self._batch, self._phase = frozenset(), None

    def _slot_plan(self, now: float, model: str) -> SlotPlan:
        """The slot of this round, or of the next one; a model that joins a round gets what is left of it."""
        names = self._toy.models
        start = names.index(model)
        order = [names[(start + i) % len(names)] for i in range(len(names))]
        working = [name for name in order if name == model or self._toy.has_work(name)]
        if self._plan is None or model in self._served:
            self._began, self._served = now, set()
            self._plan = self._planned(now, working, 0.0)
        elif model not in self._plan.slots:
            rest = [name for name in working if name not in self._served]
            self._plan = self._planned(now, rest, (now - self._began) * 1000)
        self._served.add(model)
        return self._plan.slots[model]

    def _planned(self, now: float, models: Sequence[str], spent_ms: float) -> RoundPlan:
        toy, config = self._toy, self._toy.config
        limits = Limits(config.slot_ms, config.drain_ms, config.round_limit_ms, config.t_tpot_ms, not toy.keeps)
        return plan_round([self._demand(now, model) for model in models], limits, spent_ms)

    def _demand(self, now: float, model: str) -> Demand:
        toy = self._toy
        waiting = toy.wait[model]
        musts = {rid for rid in waiting if rid in toy.started} | {self._owed(model, now)} - {None}
        known = self._switch_ms
        mean = sum(known.values()) / len(known) if known else 0.0
        return Demand(
            model,
            DECODE_MS if model in self._decoded else 0.0,
            known.get(model, mean),
            self._cost_ms(model, (rid for rid in musts if rid is not None)),
            self._cost_ms(model, waiting) + self._sp_ms.get(model, 0.0),
        )

    def knows_switch(self, model: str, ms: float) -> None:
        """A switch estimate that was taught from without."""
        self._switch_ms[model] = ms
