"""A toy executor in virtual time that runs the round scheduler's orders and checks the rules at every turn.

It keeps its own books: what it checks the scheduler's choices against is worked out here, from the jobs' facts.
One prompt token takes 1 ms to prefill, one decode step 10 ms.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field

from talaria_gpu.engine.contract import PrefixState, StepResult, StepTokens
from talaria_gpu.sched.config import SlotConfig
from talaria_gpu.sched.messages import (
    AbortCall,
    Arrived,
    Call,
    Left,
    Phase,
    RunStep,
    RunSwitch,
    SlotOver,
    Stepped,
    Switched,
    Turn,
)
from talaria_gpu.sched.slots import SlotScheduler

DECODE_MS = 10
START = 1000.0
_EPS = 1e-6


@dataclass
class Job:
    """A call of the toy: when it comes, what it costs."""

    rid: str
    model: str
    at_ms: int
    prompt: int = 20
    tokens: int = 3
    cached: int = 0
    """Prompt tokens that the device holds while the slot is open in which the call came."""
    back: bool = False
    """A continuation."""
    priority: int = 0
    deadline_ms: int | None = None
    leave_ms: int | None = None

    def call(self) -> Call:
        deadline = 0.0 if self.deadline_ms is None else START + self.deadline_ms / 1000
        at = START + self.at_ms / 1000
        return Call(self.rid, self.model, at, deadline, self.priority, self.back, self.prompt, self.tokens, self.rid[0])


@dataclass
class Slot:
    """What the toy itself knows of the open slot."""

    model: str
    opened: float
    number: int
    others_since: float | None = None
    p_began: float = 0.0
    """Since others wait: what waited then is P's."""
    waited: set[str] = field(default_factory=set)
    """What waited at that moment."""
    left_p: set[str] = field(default_factory=set)
    """What P had to leave."""
    decoded: int = 0
    decoded_ms: float = 0.0
    prefill_ms: float = 0.0
    longest_ms: float = 0.0
    owed_ms: float = 0.0
    since_prefill: int = 1
    ended: int = 0
    """Calls that came to their end in it."""


@dataclass
class Toy:
    """`chunk` > 0: a prefill step computes so many tokens at most, and a switch loses a half done prompt."""

    models: tuple[str, ...]
    config: SlotConfig
    jobs: list[Job]
    switch_ms: int = 30
    chunk: int = 0
    active: str | None = None
    oracle: bool = False
    """Compare every batch with all that the rules allow, by enumeration."""
    now: float = START
    done: dict[str, str] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    """Rids in the order of their first token."""
    first_ms: dict[str, float] = field(default_factory=dict)
    """Of the first token, ms after START."""
    switches: list[str] = field(default_factory=list)
    opened: list[tuple[float, str]] = field(default_factory=list)
    """(ms, model) of each slot's beginning."""
    overs: list[SlotOver] = field(default_factory=list)
    sps: list[frozenset[str]] = field(default_factory=list)
    steps: int = 0

    def __post_init__(self) -> None:
        self.core = SlotScheduler(self.models, self.config, self.active, self.now)
        self.todo = sorted(self.jobs, key=lambda j: j.at_ms)
        self.by_rid = {j.rid: j for j in self.jobs}
        self.leaving = sorted((j for j in self.jobs if j.leave_ms is not None), key=lambda j: j.leave_ms or 0)
        self.wait: dict[str, list[str]] = {m: [] for m in self.models}
        self.run: dict[str, list[str]] = {m: [] for m in self.models}
        self.left: dict[str, int] = {}
        self.todo_tokens: dict[str, int] = {}
        """Prompt and generated tokens still to be prefilled."""
        self.arrived_in: dict[str, int] = {}
        """Rid -> number of the slot that was open for its model when it came; its prefix is cached only there."""
        self.started: set[str] = set()
        self.batch: frozenset[str] = frozenset()
        """The batch under way."""
        self.place: dict[str, int] = {}
        """Rid -> its place among all arrivals."""
        self.slot = Slot(self.active, self.now, 0) if self.active else None
        self.passed_over: dict[str, list[str]] = {}
        """Model with work and no slot -> the models that got slots meanwhile."""

    # --- time

    def work(self) -> None:
        """Run until every job is over; checks the rules on the way."""
        while len(self.done) < len(self.jobs):
            self.steps += 1
            assert self.steps < 100_000, f"no end in sight; done: {self.done}"
            self._events()
            if not self._turn() and len(self.done) < len(self.jobs):
                self.now = self._next_event()

    def _events(self) -> None:
        while self.todo and START + self.todo[0].at_ms / 1000 <= self.now + 1e-9:
            job = self.todo.pop(0)
            self.wait[job.model].append(job.rid)
            self.left[job.rid] = job.tokens
            self.place[job.rid] = len(self.place)
            self.arrived_in[job.rid] = self.slot.number if self.slot and self.slot.model == job.model else -1
            self.todo_tokens[job.rid] = job.prompt - self._cached(job.rid)
            assert self.core.handle(self.now, Arrived(job.call())) == []
        while self.leaving and START + (self.leaving[0].leave_ms or 0) / 1000 <= self.now + 1e-9:
            job = self.leaving.pop(0)
            if job.rid in self.left and job.rid not in self.done:
                self._drop(job.rid, "abort")
                assert self.core.handle(self.now, Left(job.rid)) == []
        self._others()

    def _next_event(self) -> float:
        times = [START + j.at_ms / 1000 for j in self.todo[:1]]
        times += [START + (j.leave_ms or 0) / 1000 for j in self.leaving[:1]]
        until = self.core.linger_until(self.now)
        if until > self.now:
            times.append(until)
        assert times, f"resting with unfinished calls: {set(self.by_rid) - set(self.done)}"
        return max(self.now, min(times))

    def _has_work(self, model: str) -> bool:
        return bool(self.wait[model] or self.run[model])

    def _cached(self, rid: str) -> int:
        here = self.slot is not None and self.arrived_in[rid] == self.slot.number
        return min(self.by_rid[rid].cached, self.by_rid[rid].prompt - 1) if here else 0

    def _others(self) -> None:
        """Note who waits for a slot, and when that began."""
        waiting = [m for m in self.models if m != self.core.active and self._has_work(m)]
        for model in self.models:
            if model in waiting:
                self.passed_over.setdefault(model, [])
            else:
                self.passed_over.pop(model, None)
        if self.slot and not waiting:
            self.slot.others_since = None

    # --- turns

    def _turn(self) -> bool:
        self._contest()
        asked = {rid: PrefixState(self._cached(rid)) for rid in self.core.asks()}
        effects = self.core.handle(self.now, Turn(asked))
        assert sum(isinstance(e, RunStep | RunSwitch) for e in effects) <= 1
        acted = False
        for effect in effects:
            match effect:
                case AbortCall(rid=rid, reason=reason):
                    deadline = self.by_rid[rid].deadline_ms
                    assert deadline is not None
                    assert self.now >= START + deadline / 1000 - _EPS
                    self._drop(rid, reason)
                    self._others()
                case SlotOver():
                    self._over(effect)
                case RunSwitch(model=model):
                    self._switch(model)
                    acted = True
                case RunStep(model=model, admit=admit):
                    assert model == self.core.active
                    self._check_admission(admit)
                    self._step(model, admit)
                    acted = True
        return acted

    def _contest(self) -> None:
        """Others begin to wait: from now on the slot is one of a round."""
        slot = self.slot
        if slot and slot.others_since is None and any(self._has_work(m) for m in self.models if m != slot.model):
            slot.others_since = slot.p_began = self.now
            slot.waited = set(self.wait[slot.model])

    def _check_admission(self, admit: frozenset[str] | None) -> None:
        slot, phase = self.slot, self.core.phase
        assert slot
        if self.core.plan is None:
            return  # alone
        assert admit is not None, "with others waiting, every batch is chosen"
        if phase is Phase.DFIN:
            assert admit == frozenset(), "Dfin admits nothing"
        elif phase is Phase.SP and admit:
            for rid in admit:
                self._check_sp(rid)
        elif phase is Phase.P:
            assert admit <= slot.waited | self.started, "P takes what waited when the slot opened"
        elif admit:
            raise AssertionError(f"{phase} admits {admit}")
        if phase in {Phase.P, Phase.SP} and not (admit and admit <= self.batch):  # a batch is chosen once
            self._check_order(phase, admit)
        self.batch = admit or frozenset()

    def _check_order(self, phase: Phase, admit: frozenset[str]) -> None:
        """Nobody is let in before a more urgent one that may enter, too: neither of a lower priority nor of a later
        deadline, if that one would have fitted alone. Those that ran before and the one that is owed a token go first.
        """
        slot = self.slot
        assert slot
        pool = self._eligible() if phase is Phase.SP else {r for r in self.wait[slot.model] if r in slot.waited}
        chosen = [r for r in admit if r not in self.started and r != self.core._state.slot.owed]
        for out in pool - admit - self.started:
            for rid in chosen:
                assert self._urgency(rid)[0] >= self._urgency(out)[0], f"{rid} before {out}"
        best = max(pool - self.started, key=self._urgency, default=None)
        if chosen and best is not None and best not in admit and not self.chunk:
            must = frozenset(admit) - set(chosen)
            assert not self._fits(must | {best}), f"{best} was passed by"

    def _urgency(self, rid: str) -> tuple[float, float, float]:
        job = self.by_rid[rid]
        overdue = (self.now - START) * 1000 - job.at_ms >= self.config.patience_ms
        deadline = math.inf if job.deadline_ms is None or overdue else job.deadline_ms
        return (math.inf if overdue else job.priority, -deadline, -self.place[rid])

    def _check_sp(self, rid: str) -> None:
        slot, job = self.slot, self.by_rid[rid]
        assert slot
        assert self.config.ablation.sp
        if rid in self.started:
            return
        assert job.back, "new sessions never enter through SP"
        assert rid not in slot.waited or rid in slot.left_p
        assert self._cached(rid) > 0 or rid in slot.waited

    def _drop(self, rid: str, reason: str) -> None:
        model = self.by_rid[rid].model
        self._end(model)
        for where in (self.wait[model], self.run[model]):
            if rid in where:
                where.remove(rid)
        self.done[rid] = reason

    def _over(self, over: SlotOver) -> None:
        slot = self.slot
        assert slot
        assert over.model == slot.model == self.core.active
        assert slot.others_since is not None, "a slot ended though nobody waited"
        assert over.retracted == len(self.run[over.model])
        if over.reason != "budget":
            assert not over.retracted
        else:
            assert slot.decoded >= over.protected, "protected decode was cut short"
            if not self.config.suspends and not slot.ended:
                assert slot.decoded_ms + 1e-3 >= slot.prefill_ms, "prefill was thrown away unearned"
        if "ttft" not in over.infeasible:
            assert over.round_planned_ms <= self.config.round_limit_ms + 1e-3
        assert over.wall_ms == over.active_ms + over.switch_ms
        assert over.active_ms <= (self.now - slot.opened) * 1000 + 1e-3
        assert over.sp_admitted <= over.admitted
        assert over.sp_deferred <= over.deferred
        assert over.prefills + over.decodes or over.linger_ms or slot.ended, "a slot did nothing"
        if over.reason == "budget" and not self.chunk:
            self._check_length(over)
        self.overs.append(over)

    def _check_length(self, over: SlotOver) -> None:
        """A slot in a round is as long as planned, but for what it owes, what it must earn, and two steps."""
        slot = self.slot
        assert slot
        assert slot.others_since is not None
        lasted = (self.now - max(slot.opened, slot.others_since)) * 1000
        limit = over.planned_ms + max(over.protected * DECODE_MS, slot.prefill_ms) + slot.owed_ms + 2 * slot.longest_ms
        assert lasted <= limit + _EPS, f"{lasted} ms of at most {limit}"

    def _switch(self, model: str) -> None:
        outgoing = self.core.active
        assert model != outgoing
        assert self._has_work(model)
        if outgoing:
            self.wait[outgoing][:0] = self.run[outgoing]
            for rid in self.wait[outgoing]:
                job = self.by_rid[rid]
                self.todo_tokens[rid] = job.prompt + job.tokens - self.left[rid]
            self.run[outgoing] = []
        for other, seen in self.passed_over.items():
            if other != model:
                seen.append(model)
                assert len(seen) == len(set(seen)), f"{other} waits while {seen} had slots"
        self.now += self.switch_ms / 1000
        self.switches.append(model)
        self.opened.append(((self.now - START) * 1000, model))
        self.core.handle(self.now, Switched(model, self.switch_ms))
        self.slot = Slot(model, self.now, len(self.switches), waited=set(self.wait[model]))
        self._others()
        self._contest()

    # --- the executor

    def _step(self, model: str, admit: frozenset[str] | None) -> None:
        slot = self.slot
        assert slot
        batch = [r for r in self.wait[model] if admit is None or r in admit]
        if self.oracle and self.core.plan is not None:
            self._compare(frozenset(batch))
        tokens: list[StepTokens] = []
        kind, fresh = "idle", 0
        if batch:
            kind, ready = "prefill", []
            for rid in batch:
                take = min(self.todo_tokens[rid], self.chunk - fresh if self.chunk else self.todo_tokens[rid])
                self.todo_tokens[rid] -= take
                fresh += take
                if self.todo_tokens[rid] == 0:
                    ready.append(rid)
                if self.chunk and fresh >= self.chunk:
                    break
            took = fresh
            self.wait[model] = [r for r in self.wait[model] if r not in ready]
            self.run[model] += ready
            self.started |= set(ready)
            self.now += took / 1000
            tokens = self._emit(ready)
            slot.prefill_ms += took
            slot.owed_ms = slot.owed_ms or took
            slot.since_prefill = 0
        elif self.run[model]:
            took, kind = DECODE_MS, "decode"
            self.now += took / 1000
            tokens = self._emit(self.run[model])
            slot.decoded += 1
            slot.decoded_ms += took
            slot.since_prefill += 1
        else:
            took = 0
        slot.longest_ms = max(slot.longest_ms, took)
        result = StepResult(kind=kind, tokens=tokens, prefilled_tokens=fresh, wall_ms=took)  # type: ignore[arg-type]
        assert self.core.handle(self.now, Stepped(model, result, list(self.wait[model]))) == []
        for t in tokens:
            if t.finished:
                self.run[model].remove(t.rid)
                self.done[t.rid] = t.finished
                self._end(model)
        self._others()

    def _end(self, model: str) -> None:
        if self.slot and self.slot.model == model:
            self.slot.ended += 1

    def _emit(self, rids: list[str]) -> list[StepTokens]:
        out = []
        for rid in rids:
            if rid not in self.order:
                self.order.append(rid)
                self.first_ms[rid] = (self.now - START) * 1000
            self.left[rid] -= 1
            out.append(StepTokens(rid=rid, token_ids=[0], finished="" if self.left[rid] else "length"))
        return out

    # --- the rules by enumeration

    def _compare(self, batch: frozenset[str]) -> None:
        """The batch is one that the rules allow, and there is none only if they allow none."""
        phase, slot = self.core.phase, self.slot
        assert slot
        if phase is Phase.P:
            pool = {r for r in self.wait[slot.model] if r in slot.waited or r in self.started}
            assert batch in self._allowed_in_p(pool), f"P: {batch} of {pool}"
            slot.left_p |= pool - batch
        elif phase is Phase.SP:
            assert slot.since_prefill or not self.run[slot.model], "SP only at a decode boundary"
            assert batch in self._maximal(self._eligible()) - {frozenset()}
            self.sps.append(batch)
        elif phase in {Phase.D1, Phase.D} and (slot.since_prefill or not self.run[slot.model]):
            assert self._maximal(self._eligible()) == {frozenset()}, "an SP was passed by"

    def _eligible(self) -> set[str]:
        slot = self.slot
        assert slot
        if not self.config.ablation.sp:
            return set()
        return {
            rid
            for rid in self.wait[slot.model]
            if rid in self.started
            or (self.by_rid[rid].back and self._cached(rid) > 0 and (rid not in slot.waited or rid in slot.left_p))
        }

    def _maximal(self, pool: set[str]) -> set[frozenset[str]]:
        """All batches of `pool` that fit and to which nothing could be added."""
        fitting = {s for s in _subsets(pool) if not s or self._fits(s)}
        return {s for s in fitting if not any(s < t for t in fitting)}

    def _allowed_in_p(self, pool: set[str]) -> set[frozenset[str]]:
        """All that ran before come back whatever it costs, or else one that is owed a token; more only as it fits."""
        must = frozenset(pool & self.started)
        return {s for s in _subsets(pool) if s == must or (must <= s and (self._fits(s) or len(s) == 1))}

    def _fits(self, batch: frozenset[str]) -> bool:
        slot, core = self.slot, self.core
        assert slot
        assert core.plan is not None
        plan = core.plan.slots[slot.model]
        assert core._state.slot
        end = core._state.slot.end
        cost = core.estimates.prefill_ms(slot.model, sum(max(1, self._todo(r)) for r in batch))
        decode_ms = core.estimates.decode_ms(slot.model)
        protected = max(0, plan.decodes - core._state.slot.decoded) * decode_ms
        if not (self.config.suspends and self.config.ablation.hkvr):
            protected = max(protected, core._state.slot.lost_ms + cost)
        return (end - self.now) * 1000 - cost - protected >= -_EPS

    def _todo(self, rid: str) -> int:
        job = self.by_rid[rid]
        return job.prompt + job.tokens - self.left[rid] - self._cached(rid)


def _subsets(pool: set[str]) -> list[frozenset[str]]:
    return [frozenset(c) for n in range(len(pool) + 1) for c in itertools.combinations(sorted(pool), n)]
