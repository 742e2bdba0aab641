"""A toy executor in virtual time that runs the round scheduler's orders and has the rules checked at every turn.

One prompt token takes 1 ms to prefill, one decode step 10 ms. What the scheduler's choices are checked against is
worked out in `books` and `rules`, from the jobs' facts.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from talaria_gpu.engine.contract import PrefixState, StepResult, StepTokens
from talaria_gpu.sched.config import SlotConfig
from talaria_gpu.sched.demand import Capacity
from talaria_gpu.sched.messages import (
    AbortCall,
    Arrived,
    Call,
    Left,
    RunStep,
    RunSwitch,
    SlotOver,
    Stepped,
    Switched,
    Turn,
)
from talaria_gpu.sched.slots import SlotScheduler
from tests.gpu.sched.books import DECODE_MS, START, Slot
from tests.gpu.sched.rules import Rules


@dataclass
class Job:
    """A call of the toy: when it comes, what it costs."""

    rid: str
    model: str
    at_ms: int
    prompt: int = 20
    tokens: int = 3
    cached: int = 0
    """Prompt tokens that the device holds while the slot is open in which the call came; later the host, if it may."""
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
class Toy:
    """`chunk` > 0: a prefill step computes so many tokens at most, and a switch loses a half done prompt.

    Running calls outlive a switch if the configuration says so. `rows` and `places` bound what runs, 0: nothing does. A
    call that finds no rows for its next token is put back, the youngest first. `cautious`: the executor lets a call in
    only if there are rows for all that running ones may still say, which the scheduler does not foresee.
    """

    models: tuple[str, ...]
    config: SlotConfig
    jobs: list[Job]
    switch_ms: int = 30
    chunk: int = 0
    active: str | None = None
    oracle: bool = False
    """Compare every batch with all that the rules allow, by enumeration."""
    rows: int = 0
    places: int = 0
    cautious: bool = False
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
    in_vain: int = 0
    """Times that the executor had no room for a batch."""
    put_back: int = 0
    """Times that a call lost its rows in a slot."""
    steps: int = 0

    def __post_init__(self) -> None:
        capacity = {model: Capacity(self.rows, self.places) for model in self.models}
        self.core = SlotScheduler(self.models, self.config, self.active, self.now, capacity)
        self.keeps = self.config.suspends and self.config.ablation.hkvr
        self.todo = sorted(self.jobs, key=lambda j: j.at_ms)
        self.by_rid = {j.rid: j for j in self.jobs}
        self.leaving = sorted((j for j in self.jobs if j.leave_ms is not None), key=lambda j: j.leave_ms or 0)
        self.wait: dict[str, list[str]] = {m: [] for m in self.models}
        self.run: dict[str, list[str]] = {m: [] for m in self.models}
        self.left: dict[str, int] = {}
        self.half: dict[str, int] = {}
        """Rid -> tokens still to be prefilled of a half done prompt."""
        self.told_half = ""
        """The one that the last step told of."""
        self.arrived_in: dict[str, int] = {}
        """Rid -> number of the slot that was open for its model when it came."""
        self.told: dict[str, PrefixState] = {}
        self.started: set[str] = set()
        self.place: dict[str, int] = {}
        """Rid -> its place among all arrivals."""
        self.slot = Slot(self.active, self.now, 0) if self.active else None
        self.rules = Rules(self)
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
            here = self.slot is not None and self.slot.model == job.model
            self.arrived_in[job.rid] = self.slot.number if self.slot and here else -1
            self.place[job.rid] = len(self.place)
            self.rules.arrived(job.rid)
            self.wait[job.model].append(job.rid)
            self.left[job.rid] = job.tokens
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

    def has_work(self, model: str) -> bool:
        return bool(self.wait[model] or self.run[model])

    def others_wait(self) -> bool:
        return any(self.has_work(m) for m in self.models if self.slot is None or m != self.slot.model)

    def generated(self, rid: str) -> int:
        return self.by_rid[rid].tokens - self.left[rid]

    def prefix(self, rid: str) -> PrefixState:
        """What of the call is cached now."""
        tokens = min(self.by_rid[rid].cached, self.by_rid[rid].prompt - 1)
        if self.slot is not None and self.arrived_in[rid] == self.slot.number:
            return PrefixState(tokens)
        return PrefixState(0, tokens if self.config.ablation.hkvr else 0)

    def _others(self) -> None:
        """Note who waits for a slot, and when that began."""
        waiting = [m for m in self.models if m != self.core.active and self.has_work(m)]
        for model in self.models:
            if model in waiting:
                self.passed_over.setdefault(model, [])
            else:
                self.passed_over.pop(model, None)

    # --- turns

    def _turn(self) -> bool:
        asked = {rid: self.prefix(rid) for rid in self.core.asks()}
        self.told |= asked
        effects = self.core.handle(self.now, Turn(asked))
        assert sum(isinstance(e, RunStep | RunSwitch) for e in effects) <= 1
        acted = False
        for effect in effects:
            if isinstance(effect, AbortCall):
                deadline = self.by_rid[effect.rid].deadline_ms
                assert deadline is not None
                assert self.now >= START + deadline / 1000 - 1e-6
                self._drop(effect.rid, effect.reason)
        self._others()
        self.rules.contest()
        for effect in effects:
            match effect:
                case SlotOver():
                    self.rules.over(effect)
                    self.overs.append(effect)
                case RunSwitch(model=model):
                    self._switch(model)
                    acted = True
                case RunStep(model=model, admit=admit):
                    assert model == self.core.active
                    self.rules.admission(self.core.phase, admit)
                    self._step(model, admit)
                    acted = True
        return acted

    def _drop(self, rid: str, reason: str) -> None:
        model = self.by_rid[rid].model
        for where in (self.wait[model], self.run[model]):
            if rid in where:
                where.remove(rid)
        self.half.pop(rid, None)
        self.done[rid] = reason
        self.rules.ended(rid)

    def _switch(self, model: str) -> None:
        outgoing = self.core.active
        assert model != outgoing
        assert self.has_work(model)
        kept = lost = 0
        if outgoing:
            running = self.run[outgoing]
            kept, lost = (len(running), 0) if self.keeps else (0, len(running))
            if not self.keeps:
                self.wait[outgoing][:0] = running
                self.run[outgoing] = []
        self.half.clear()
        for other, seen in self.passed_over.items():
            if other != model:
                seen.append(model)
                assert len(seen) == len(set(seen)), f"{other} waits while {seen} had slots"
        self.now += self.switch_ms / 1000
        self.switches.append(model)
        self.opened.append(((self.now - START) * 1000, model))
        left = list(self.wait[outgoing]) if outgoing else []
        self.core.handle(self.now, Switched(model, self.switch_ms, left, kept, lost))
        self.slot = Slot(model, self.now, len(self.switches))
        self.rules.switched()
        self._others()

    # --- the executor

    def _step(self, model: str, admit: frozenset[str] | None) -> None:
        phase = self.core.phase
        batch = self._taken(model, [r for r in self.wait[model] if admit is None or r in admit])
        tokens: list[StepTokens] = []
        kind, fresh, took, ready = "idle", 0, 0, list[str]()
        if batch:
            kind = "prefill"
            for rid in batch:
                todo = self.half.get(rid, self._fresh(rid))
                take = min(todo, self.chunk - fresh if self.chunk else todo)
                fresh += take
                if take == todo:
                    self.half.pop(rid, None)
                    ready.append(rid)
                else:
                    self.half[rid] = todo - take
                if self.chunk and fresh >= self.chunk:
                    break
            took = fresh
            self.wait[model] = [r for r in self.wait[model] if r not in ready]
            self.run[model] += ready
            self.now += took / 1000
            tokens = self._emit(ready)
        elif self.run[model]:
            self._find_rows(model)
            took, kind = DECODE_MS, "decode"
            self.now += took / 1000
            tokens = self._emit(self.run[model])
            self.in_vain += bool(admit)
        self.rules.stepped(phase, admit or frozenset(), kind, took, ready)
        self.started |= set(ready)
        self.told_half = next(reversed(self.half), "")
        result = StepResult(  # type: ignore[arg-type]
            kind=kind, tokens=tokens, prefilled_tokens=fresh, wall_ms=took, half=self.told_half
        )
        assert self.core.handle(self.now, Stepped(model, result, list(self.wait[model]))) == []
        for t in tokens:
            if t.finished:
                self.run[model].remove(t.rid)
                self.done[t.rid] = t.finished
                self.rules.ended(t.rid)
        self._others()

    def _taken(self, model: str, asked: list[str]) -> list[str]:
        """What of a batch there is room for, in order; nobody gets by one for whom there is none."""
        taken: list[str] = []
        for rid in asked:
            running = [*self.run[model], *taken]
            if running and self.places and len(running) >= self.places:
                break
            need = self.length(rid) + self.left[rid]
            used = sum(self.length(r) + (self.left[r] if self.cautious else 0) for r in running)
            if running and self.rows and used + need > self.rows:
                break
            taken.append(rid)
        return taken

    def _find_rows(self, model: str) -> None:
        """One more row for each that runs."""
        run = self.run[model]
        while self.rows and len(run) > 1 and sum(self.length(r) + 1 for r in run) > self.rows:
            self.wait[model].insert(0, run.pop())
            self.put_back += 1
            self.rules.put_back(self.wait[model][0])

    def length(self, rid: str) -> int:
        """Rows that a call takes when it runs."""
        return self.by_rid[rid].prompt + self.generated(rid)

    def _fresh(self, rid: str) -> int:
        return max(1, self.length(rid) - sum(self.prefix(rid)))

    def _emit(self, rids: list[str]) -> list[StepTokens]:
        out = []
        for rid in rids:
            if rid not in self.order:
                self.order.append(rid)
                self.first_ms[rid] = (self.now - START) * 1000
            self.left[rid] -= 1
            out.append(StepTokens(rid=rid, token_ids=[0], finished="" if self.left[rid] else "length"))
        return out
