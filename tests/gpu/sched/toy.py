"""A toy executor in virtual time that runs the scheduler's orders and keeps a diary for the properties."""

from __future__ import annotations

from dataclasses import dataclass, field

from talaria_gpu.engine.contract import StepResult, StepTokens
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
from talaria_gpu.sched.slots import SlotConfig, SlotScheduler

DECODE_MS = 10
START = 1000.0


@dataclass
class Job:
    """A call of the toy: when it comes, what it costs."""

    rid: str
    model: str
    at_ms: int
    prefill_ms: int = 20
    tokens: int = 3
    priority: int = 0
    deadline_ms: int | None = None
    leave_ms: int | None = None

    def call(self) -> Call:
        deadline = 0.0 if self.deadline_ms is None else START + self.deadline_ms / 1000
        return Call(self.rid, self.model, START + self.at_ms / 1000, deadline, self.priority)


@dataclass
class Slot:
    model: str
    opened: float
    others_since: float | None = None
    longest_step_s: float = 0.0
    prefill_ms: float = 0.0
    dfin_at: float | None = None


@dataclass
class Toy:
    """`chunk_ms` > 0: a prefill takes several steps, and a switch loses the half done one."""

    models: tuple[str, ...]
    config: SlotConfig
    jobs: list[Job]
    switch_ms: int = 30
    chunk_ms: int = 0
    active: str | None = None
    now: float = START
    done: dict[str, str] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    """Rids in the order of their first token."""
    switches: list[str] = field(default_factory=list)
    overs: list[SlotOver] = field(default_factory=list)
    phases: list[Phase] = field(default_factory=list)
    steps: int = 0

    def __post_init__(self) -> None:
        self.core = SlotScheduler(self.models, self.config, self.active, self.now)
        self.todo = sorted(self.jobs, key=lambda j: j.at_ms)
        self.by_rid = {j.rid: j for j in self.jobs}
        self.leaving = sorted((j for j in self.jobs if j.leave_ms is not None), key=lambda j: j.leave_ms or 0)
        self.wait: dict[str, list[str]] = {m: [] for m in self.models}
        self.run: dict[str, list[str]] = {m: [] for m in self.models}
        self.left: dict[str, int] = {}
        self.prefill_left: dict[str, int] = {}
        self.slot = Slot(self.active, self.now) if self.active else None
        self.passed_over: dict[str, list[str]] = {}
        """Model with work and no slot -> the models that got slots meanwhile."""

    def work(self) -> None:
        """Run until every job is over; checks the properties on the way."""
        while len(self.done) < len(self.jobs):
            self.steps += 1
            assert self.steps < 200_000, f"no end in sight; done: {self.done}"
            self._events()
            if not self._turn() and len(self.done) < len(self.jobs):
                self.now = self._next_event()

    def _events(self) -> None:
        while self.todo and START + self.todo[0].at_ms / 1000 <= self.now:
            job = self.todo.pop(0)
            self.wait[job.model].append(job.rid)
            self.left[job.rid] = job.tokens
            self.prefill_left[job.rid] = job.prefill_ms
            assert self.core.handle(self.now, Arrived(job.call())) == []
        while self.leaving and START + (self.leaving[0].leave_ms or 0) / 1000 <= self.now:
            job = self.leaving.pop(0)
            if job.rid in self.left and job.rid not in self.done:
                self._drop(job.rid, "abort")
                assert self.core.handle(self.now, Left(job.rid)) == []
        self._others()

    def _next_event(self) -> float:
        times = [START + j.at_ms / 1000 for j in self.todo[:1]]
        times += [START + (j.leave_ms or 0) / 1000 for j in self.leaving[:1]]
        assert times, f"resting with unfinished calls: {set(self.by_rid) - set(self.done)}"
        return max(self.now, min(times))

    def _has_work(self, model: str) -> bool:
        return bool(self.wait[model] or self.run[model])

    def _others(self) -> None:
        waiting = [m for m in self.models if m != self.core.active and self._has_work(m)]
        for model in self.models:
            if model in waiting:
                self.passed_over.setdefault(model, [])
            else:
                self.passed_over.pop(model, None)
        if self.slot:
            if not waiting:
                self.slot.others_since = None
            elif self.slot.others_since is None:
                self.slot.others_since = self.now

    def _turn(self) -> bool:
        before = self.core.phase
        effects = self.core.handle(self.now, Turn())
        assert sum(isinstance(e, RunStep | RunSwitch) for e in effects) <= 1
        acted = False
        for effect in effects:
            match effect:
                case AbortCall(rid=rid, reason=reason):
                    deadline = self.by_rid[rid].deadline_ms
                    assert deadline is not None
                    assert self.now >= START + deadline / 1000
                    self._drop(rid, reason)
                    self._others()
                case SlotOver():
                    self._over(effect)
                case RunSwitch(model=model):
                    self._switch(model)
                    acted = True
                case RunStep(model=model, admit=admit):
                    assert model == self.core.active
                    if self.core.phase is Phase.DFIN:
                        assert admit == frozenset()
                        if before is not Phase.DFIN:
                            assert self.slot
                            self.slot.dfin_at = self.now
                    self._step(model, admit)
                    acted = True
        return acted

    def _drop(self, rid: str, reason: str) -> None:
        model = self.by_rid[rid].model
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
        if over.reason == "idle":
            assert not self._has_work(over.model)
        assert over.active_ms <= (self.now - slot.opened) * 1000 + 1e-3
        if not self.chunk_ms:
            lasted = self.now - max(slot.opened, slot.others_since)
            limit = (self.config.slot_ms + max(self.config.drain_ms, slot.prefill_ms)) / 1000 + 2 * slot.longest_step_s
            assert lasted <= limit + 1e-6, f"{lasted} s of at most {limit}"
        self.overs.append(over)

    def _switch(self, model: str) -> None:
        outgoing = self.core.active
        assert model != outgoing
        assert len(self.models) > 1 or outgoing is None
        assert self._has_work(model)
        if outgoing:
            self.wait[outgoing][:0] = self.run[outgoing]
            for rid in self.wait[outgoing]:
                self.prefill_left[rid] = self.by_rid[rid].prefill_ms
            self.run[outgoing] = []
        for other, seen in self.passed_over.items():
            if other != model:
                seen.append(model)
                assert len(seen) == len(set(seen)), f"{other} waits while {seen} had slots"
        self.now += self.switch_ms / 1000
        self.switches.append(model)
        self.core.handle(self.now, Switched(model, self.switch_ms))
        self.slot = Slot(model, self.now)
        self._others()

    def _step(self, model: str, admit: frozenset[str] | None) -> None:
        batch = [r for r in self.wait[model] if admit is None or r in admit]
        tokens: list[StepTokens] = []
        if batch and self.chunk_ms:
            head = batch[0]
            took = min(self.chunk_ms, self.prefill_left[head])
            self.prefill_left[head] -= took
            kind = "prefill"
            if self.prefill_left[head] == 0:
                self.wait[model].remove(head)
                self.run[model].append(head)
                tokens = self._emit([head])
        elif batch:
            took, kind = sum(self.by_rid[r].prefill_ms for r in batch), "prefill"
            self.wait[model] = [r for r in self.wait[model] if r not in batch]
            self.run[model] += batch
            tokens = self._emit(batch)
        elif self.run[model]:
            took, kind = DECODE_MS, "decode"
            tokens = self._emit(self.run[model])
        else:
            took, kind = 0, "idle"
        self.now += took / 1000
        assert self.slot
        self.slot.longest_step_s = max(self.slot.longest_step_s, took / 1000)
        self.slot.prefill_ms += took if kind == "prefill" else 0
        result = StepResult(kind=kind, tokens=tokens, wall_ms=took)  # type: ignore[arg-type]
        assert self.core.handle(self.now, Stepped(model, result, list(self.wait[model]))) == []
        for t in tokens:
            if t.finished:
                self.run[model].remove(t.rid)
                self.done[t.rid] = t.finished
        if self.core.phase:
            self.phases.append(self.core.phase)
        self._others()

    def _emit(self, rids: list[str]) -> list[StepTokens]:
        out = []
        for rid in rids:
            if rid not in self.order:
                self.order.append(rid)
            self.left[rid] -= 1
            out.append(StepTokens(rid=rid, token_ids=[0], finished="" if self.left[rid] else "length"))
        return out
