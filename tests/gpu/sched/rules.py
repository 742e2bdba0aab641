"""The scheduler's rules, worked out again from what the toy did: rounds, rooms, ranks, and who may be let in.

Nothing here reads the scheduler's state: only its phase, what it asked for, and what it reports. The arithmetic of one
plan is `plan_round`'s (`test_plan`); what goes into it, and what is left of a slot, is kept here.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from talaria_gpu.engine.contract import PrefixState
from talaria_gpu.sched.messages import Phase, SlotOver
from talaria_gpu.sched.plan import Demand, Limits, RoundPlan, SlotPlan, plan_round

if TYPE_CHECKING:
    from tests.gpu.sched.toy import Toy

DECODE_MS = 10
START = 1000.0
_EPS = 1e-6
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

    def restart(self, now: float, rid: str) -> None:
        """Work comes to an instance that had none: P begins anew."""
        self.opened, self.owed = now, rid
        self.decoded, self.decoded_ms, self.pending_ms = 0, 0.0, 0.0
        self.invested.clear()
        self.in_vain.clear()


class Rules:
    """Watches a toy."""

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
        if slot is None or toy.by_rid[rid].model != slot.model or toy.has_work(slot.model):
            return
        if slot.plan is None and not toy.others_wait():
            slot.restart(toy.now, rid)
        slot.idle = slot.empty = False

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
        if slot.idle:
            slot.opened, slot.idle = toy.now, False
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
        if slot is None or toy.by_rid[rid].model != slot.model:
            return
        slot.ended += 1
        slot.invested.pop(rid, None)
        if not toy.has_work(slot.model):
            slot.pending_ms = 0.0
            slot.idle = slot.idle or not toy.others_wait()

    # --- what is checked

    def admission(self, phase: Phase | None, admit: frozenset[str] | None) -> None:
        """What a step may let in."""
        toy, slot = self._toy, self._toy.slot
        assert slot
        if slot.plan is None:
            self._check_alone(admit)
            return
        assert admit is not None, "with others waiting, every batch is chosen"
        leaves_p = phase is not Phase.P and not slot.p_over
        if leaves_p:
            slot.p_over = True
            slot.left_p = {rid for rid in toy.wait[slot.model] if rid in slot.waited}
        if phase is Phase.DFIN:
            assert admit == frozenset(), "Dfin admits nothing"
        elif phase is Phase.SP and admit:
            for rid in admit:
                self._check_sp(rid)
        elif phase is Phase.P:
            assert admit <= slot.waited | toy.started, "P takes what waited when the slot opened"
        elif admit:
            raise AssertionError(f"{phase} admits {admit}")
        under_way = bool(admit) and admit <= self._batch
        if phase in {Phase.P, Phase.SP} and not under_way:  # a batch is chosen once
            self._check_order(phase, admit)
        if toy.oracle and not under_way:
            self._compare(phase, admit, leaves_p=leaves_p)
        self._batch, self._phase = admit, phase

    def over(self, over: SlotOver) -> None:
        """A slot's end and its report."""
        toy, slot = self._toy, self._toy.slot
        assert slot
        assert over.model == slot.model == toy.core.active
        assert slot.plan is not None, "a slot ended though nobody waited"
        assert over.running == len(toy.run[over.model])
        if over.reason != "budget":
            assert not over.running
        else:
            assert slot.decoded >= slot.plan.decodes, "protected decode was cut short"
            if not toy.keeps and not slot.ended and not toy.put_back:
                assert slot.decoded_ms + 1e-3 >= slot.prefill_ms, "prefill was thrown away unearned"
        assert over.protected == slot.plan.decodes
        assert abs(over.planned_ms - slot.plan.length_ms) <= 1e-3
        assert self._plan is not None
        assert abs(over.round_planned_ms - self._plan.round_ms) <= 1e-3
        assert over.infeasible == self._plan.infeasible
        if "ttft" not in over.infeasible:
            assert over.round_planned_ms <= toy.config.round_limit_ms + 1e-3
        assert over.wall_ms == over.active_ms + over.switch_ms
        assert over.active_ms <= (toy.now - slot.began) * 1000 + 1e-3
        assert over.sp_admitted <= over.admitted
        assert over.sp_carried <= over.sp_admitted
        assert over.sp_deferred <= over.deferred == sum(over.deferred_why.values()) == len(toy.wait[slot.model])
        assert over.prefills + over.decodes or over.linger_ms or slot.ended, "a slot did nothing"
        if over.reason == "budget" and not toy.chunk:
            self._check_length(slot)
        known = self._sp_ms.get(slot.model)
        self._sp_ms[slot.model] = slot.sp_ms if known is None else known + 0.2 * (slot.sp_ms - known)
        if slot.empty:
            self.alone()

    def _check_length(self, slot: Slot) -> None:
        """A slot in a round is as long as planned, but for what it owes, what it must earn, and two steps.

        It may double while a prefix that it owes is on its way from the host, as that of a continuation may be.
        """
        toy = self._toy
        assert slot.plan is not None
        assert slot.others_since is not None
        lasted = (toy.now - max(slot.opened, slot.others_since)) * 1000
        coming = any(toy.told.get(rid, _NONE).host for rid in slot.in_vain)
        planned = slot.plan.length_ms * (2 if coming else 1)
        limit = planned + max(slot.plan.decodes * DECODE_MS, slot.prefill_ms) + slot.longest_p_ms + 2 * slot.longest_ms
        assert lasted <= limit + _EPS, f"{lasted} ms of at most {limit}"

    def _check_alone(self, admit: frozenset[str] | None) -> None:
        """Nobody goes before one of a higher rank, nor before one of its own with a nearer deadline.

        Deadlines within the same quarter of a second count as one.
        """
        toy, slot = self._toy, self._toy.slot
        assert slot
        line = toy.wait[slot.model]
        first = [rid for rid in line if admit is None or rid in admit]  # as the executor takes them
        assert first or not line
        out = [rid for rid in line if rid not in first]
        for i, rid in enumerate(first):
            for then in [*first[i + 1 :], *out]:
                assert self._grade(rid) >= self._grade(then), f"{rid} before {then}"

    def _grade(self, rid: str) -> tuple[float, float]:
        rank, deadline_ms = self._rank(rid), self._toy.by_rid[rid].deadline_ms
        if rank == math.inf or deadline_ms is None:
            return rank, 0.0 if rank == math.inf else -math.inf
        return rank, -((START + deadline_ms / 1000) // 0.25)

    def _check_order(self, phase: Phase, admit: frozenset[str]) -> None:
        """Nobody is let in before a more urgent one that may enter, too: neither of a lower priority nor of a later
        deadline, if that one would have fitted alone. Those that ran before and the one that is owed a token go first,
        and while an overdue one that is owed waits for room, nobody else does.
        """
        toy, slot = self._toy, self._toy.slot
        assert slot
        waiting = set(toy.wait[slot.model])
        pool = self._eligible() if phase is Phase.SP else {r for r in waiting if r in slot.waited}
        chosen = [rid for rid in admit if rid not in toy.started and rid != slot.owed]
        for out in pool - admit - toy.started:
            for rid in chosen:
                assert self._rank(rid) >= self._rank(out), f"{rid} before {out}"
        best = max(pool - toy.started, key=self._urgency, default=None)
        if chosen and best is not None and best not in admit | slot.in_vain and not toy.chunk:
            batch = admit - set(chosen) | {best}
            assert not (self._fits(batch, self._reserve_ms(phase)) and self._has_room(batch)), f"{best} was passed by"
        owed = slot.owed
        if chosen and owed in waiting and owed not in admit:
            assert not self._overdue(owed, toy.now), f"{chosen} took the room that {owed} waits for"

    def _check_sp(self, rid: str) -> None:
        toy, slot = self._toy, self._toy.slot
        assert slot
        assert toy.config.ablation.sp
        if rid in toy.started:
            return
        assert toy.by_rid[rid].back, "new sessions never enter through SP"
        assert rid not in slot.waited or rid in slot.left_p
        assert sum(toy.told.get(rid, _NONE)) > 0, "there is a prefix to come back to"

    # --- the rules by enumeration

    def _compare(self, phase: Phase | None, admit: frozenset[str], *, leaves_p: bool) -> None:
        """The batch is one that the rules allow, and there is none only if they allow none."""
        toy, slot = self._toy, self._toy.slot
        assert slot
        waiting = set(toy.wait[slot.model])
        must = waiting & (toy.started | {slot.owed})
        of_p = {rid for rid in waiting if rid in slot.waited or rid in toy.started}
        if phase is Phase.P or leaves_p:
            allowed = self._allowed(of_p, must, self._reserve_ms(Phase.P))
            if phase is Phase.P:
                assert admit in allowed, f"P: {admit} of {of_p}, not of {allowed}"
                late = self._rank(slot.owed) == math.inf if slot.owed in waiting else False
                assert admit or (late and toy.run[slot.model]), "P went on with nothing to let in"
            else:
                missed = {batch for batch in allowed if not batch <= slot.in_vain}
                assert not missed, f"P was left though it could have let in one of {missed}"
        if phase is Phase.SP:
            assert slot.since_prefill or not toy.run[slot.model], "SP only at a decode boundary"
            assert admit in self._allowed(self._eligible(), set(), 0.0) - {frozenset()}
            toy.sps.append(admit)
        elif phase in {Phase.D1, Phase.D} and (slot.since_prefill or not toy.run[slot.model]):
            assert self._allowed(self._eligible(), set(), 0.0) == {frozenset()}, "an SP was passed by"
        elif phase is Phase.DFIN and self._phase is not Phase.DFIN:
            assert self._room_ms() <= _EPS, "Dfin came though there was time"

    def _eligible(self) -> set[str]:
        toy, slot = self._toy, self._toy.slot
        assert slot
        if not toy.config.ablation.sp:
            return set()
        waiting = set(toy.wait[slot.model])
        bar = self._rank(slot.owed) if slot.owed in waiting else -math.inf
        return {
            rid
            for rid in waiting
            if rid in toy.started
            or (
                toy.by_rid[rid].back
                and sum(toy.told.get(rid, _NONE)) > 0
                and (rid not in slot.waited or rid in slot.left_p)
                and (rid == slot.owed or (bar < math.inf and self._rank(rid) >= bar))
            )
        }

    def _allowed(self, pool: set[str], must: set[str], reserve_ms: float) -> set[frozenset[str]]:
        """All batches of `pool` that hold what must come and fit, and to which nothing could be added.

        One that must come and finds no room shuts the others out if it is overdue or ran before; else it is left out.
        Whoever is left out lets nobody of a lower rank by, and nobody at all if it finds no room and is overdue.
        """
        slot = self._toy.slot
        assert slot
        base: set[str] = set()
        left: set[str] = set()
        for rid in sorted(must, key=self._urgency, reverse=True):
            late = self._rank(rid) == math.inf
            if self._has_room(base | {rid}) and (late or rid not in slot.in_vain):
                base.add(rid)
            elif late:
                return {frozenset(base)}
            else:
                left.add(rid)
        rest = pool - must
        allowed = set()
        for more in _subsets(rest):
            batch = base | more
            if more and not (self._fits(batch, reserve_ms) and self._has_room(batch)):
                continue
            out = left | (rest - more)
            if all(not self._passes(rid, base | more, out) for rid in more) and all(
                self._passes(rid, batch, out - {rid})
                or not self._fits(batch | {rid}, reserve_ms)
                or not self._has_room(batch | {rid})
                for rid in rest - more
            ):
                allowed.add(frozenset(batch))
        return allowed

    def _passes(self, rid: str, batch: set[str] | frozenset[str], out: set[str]) -> bool:
        """Whether a call in this batch goes by one that is left out and lets it not."""
        for other in out:
            if self._rank(other) > self._rank(rid):
                return True
            if self._rank(other) == math.inf and self._urgency(other) > self._urgency(rid):
                before = {r for r in batch if self._urgency(r) > self._urgency(other)}
                if not self._has_room(before | {other}):
                    return True
        return False

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
        return self._room_ms(self._cost_ms(slot.model, batch)) - reserve_ms >= -_EPS

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


def _subsets(pool: set[str]) -> list[frozenset[str]]:
    return [frozenset(c) for n in range(len(pool) + 1) for c in itertools.combinations(sorted(pool), n)]
