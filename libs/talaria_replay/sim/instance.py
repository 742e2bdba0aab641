"""One simulated instance: the production instance core, slot driver and scheduler around a sim engine on a profile."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import msgspec

from talaria_common.settings import InstanceSettings
from talaria_common.wire import ControlRequest, ForwardHead
from talaria_gpu.engine.contract import StepResult, StepTokens, join_steps
from talaria_gpu.engine.driver import SlotDriver
from talaria_gpu.engine.ipc import (
    Abort,
    Close,
    Command,
    Open,
    Ready,
    Report,
    SlotEnded,
    Stepped,
    Stop,
    Submit,
    Switched,
)
from talaria_gpu.engine.sim import SimEngine
from talaria_gpu.sched.config import SlotConfig
from talaria_gpu.text import Detokenizer
from talaria_gpu.text.byte_tokenizer import ByteTokenizer
from talaria_instance.core import InstanceCore
from talaria_instance.messages import (
    Answer,
    CallKey,
    CancelCall,
    Control,
    Effect,
    EngineSaid,
    EngineStarting,
    Forward,
    KillEngine,
    Message,
    Prepare,
    Prepared,
    Prompt,
    Publish,
    StartEngine,
    Tell,
    Tick,
)
from talaria_replay.sim.device import GIB, ProfiledDevice
from talaria_replay.sim.events import EventHeap, Timer
from talaria_replay.sim.laws import InstanceLaws, LawError
from talaria_replay.sim.tally import SlotTally

SKEW_S = 2.0
IDLE_CHECK_S = 60.0
"""Idle engines look for leaks so rarely: looking costs more than an idle instance's whole simulation."""


class SimInstance:
    """Feeds the core and the driver in virtual time.

    Args:
        heap: of the simulation.
        settings: the instance's.
        device: its hardware.
        config: slot budgets.
        prompt: the prompt of a call, as the simulated body is not text.
        tokenize_s: time to tokenise so many bytes.
        out: takes the core's answers and publications.
        heartbeat_s: between ticks.
        slots: told of each slot and switch.
        opened: the window's start, seconds.
    """

    def __init__(
        self,
        heap: EventHeap,
        settings: InstanceSettings,
        device: ProfiledDevice,
        config: SlotConfig,
        *,
        prompt: Callable[[str], Prompt],
        tokenize_s: Callable[[int], float],
        out: Callable[[str, Answer | Publish], None],
        heartbeat_s: float,
        slots: SlotTally,
        opened: float,
    ) -> None:
        self.iid = settings.id
        self.gpus = device.hw.gpus
        self._slots = slots
        self._opened = opened
        self._heap = heap
        self._clock = heap.clock
        self._prompt = prompt
        self._tokenize_s = tokenize_s
        self._out = out
        self._heartbeat_s = heartbeat_s
        self.engine = SimEngine(settings, heap.clock, device, macro=True)
        self.driver = SlotDriver(
            self.engine, config, heap.clock, models=settings.models, stuck_s=math.inf, idle_check_s=IDLE_CHECK_S
        )
        tokenizer = _Unread()
        self.core = InstanceCore(
            settings, "0", dict.fromkeys(settings.models, tokenizer), skew_s=SKEW_S, heartbeat_s=heartbeat_s
        )
        self.laws = InstanceLaws(self.iid, self.engine, heap.clock.now())
        self._generation = 0
        self._held: dict[str, tuple[str, StepTokens] | None] = {}
        """Calls past their first token, with their model and what they have had since, untold."""
        self._wake: Timer | None = None

    def start(self, offset_s: float) -> None:
        """The engine is there at once; heartbeats begin after `offset_s`."""
        self._carry(self.core.start())
        self._tell_core(EngineStarting(self._generation))
        infos = list(self.engine.models().values())
        self._said(Ready(models=infos, buffer_bytes=self.engine.buffer_bytes, pid=0))
        self._heap.after(offset_s, self._beat)

    def forward(self, handle: object, head: ForwardHead, body_bytes: int) -> None:
        """A call arrives."""
        self._tell_core(Forward(handle, head, bytes(body_bytes)))

    def cancel(self, message: CancelCall) -> None:
        """An api gives a call up."""
        self._tell_core(message)

    def control(self, handle: object, verb: str, model: str) -> None:
        """The router opens or closes a model."""
        self._tell_core(Control(handle, verb, ControlRequest(model=model)))

    def _beat(self) -> None:
        self._said(*self._flush(), self.driver.status())
        self._tell_core(Tick())
        self._heap.after(self._heartbeat_s, self._beat)

    # --- the core

    def _tell_core(self, message: Message) -> None:
        self._carry(self.core.handle(self._clock.now(), message))

    def _said(self, *reports: Report) -> None:
        self._tell_core(EngineSaid(self._generation, reports))

    def _carry(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Answer() | Publish():
                    self._out(self.iid, effect)
                case Prepare(key=key, body=body):
                    self._heap.after(self._tokenize_s(len(body)), lambda k=key: self._prepared(k))  # type: ignore[misc]
                case Tell(command=command):
                    self._command(command)
                case StartEngine(generation=generation):
                    self._generation = generation
                case KillEngine():
                    raise LawError(f"{self.iid}: the core gave its engine up: {self.core.reason}")

    def _command(self, command: Command) -> None:
        match command:
            case Submit(call=call):
                self._reports(self.driver.submit(call))
            case Abort(rid=rid):
                self._reports(self.driver.abort(rid))
            case Open(model=model):
                self.engine.interrupt()
                self._reports(self.driver.open(model))
            case Close(model=model):
                self._reports(self.driver.close_model(model))
            case Stop():
                return  # there is no other process here
        self.laws.look(self._clock.now())
        self._pump()

    def _prepared(self, key: CallKey) -> None:
        self._tell_core(Prepared(key, self._prompt(key.rid)))

    # --- the engine

    def _pump(self) -> None:
        """Wake the driver when it next has something to do."""
        if self._wake is not None:
            self._wake.cancel()
            self._wake = None
        wait = self.driver.next_wakeup()
        if wait is not None:
            self._wake = self._heap.after(wait, self._turn)

    def _turn(self) -> None:
        self._wake = None
        now = self._clock.now()
        while True:
            boundary_s, self.engine.most_steps = self.driver.boundary_ms / 1000, self.driver.boundary_steps
            self.engine.horizon = now + boundary_s
            reports = self.driver.turn(now)
            self.laws.after_turn(now)
            self._reports(reports)
            if self.driver.next_wakeup() != 0 or self._heap.head <= now:
                break  # else nobody else has anything to do before the next turn
        self._pump()

    def _reports(self, reports: list[Report]) -> None:
        told: list[Report] = []
        for report in reports:
            if isinstance(report, Stepped):
                steps = [t for step in report.result.tokens if (t := self._step(report.model, step)) is not None]
                if steps:
                    told.append(
                        Stepped(model=report.model, result=msgspec.structs.replace(report.result, tokens=steps))
                    )
                continue
            told += self._flush()
            at = self._clock.now()
            if isinstance(report, SlotEnded):
                self._slots.slot(self.iid, at - self._opened, report, self.laws.hbm_bytes / self.gpus / GIB)
                self.laws.slot(at, report)
            elif isinstance(report, Switched):
                for timing in report.timings:
                    self.laws.switch(at, timing)
                    self._slots.switch(self.iid, at - self._opened, timing)
            told.append(report)
        if told:
            self._said(*told)

    def _step(self, model: str, step: StepTokens) -> StepTokens | None:
        """What is told of it: an agent waits for its first token and for its last, and those between are held back."""
        rid = step.rid
        if rid not in self._held:
            if step.token_ids and not step.finished:
                self._held[rid] = None
            return step
        before = self._held[rid]
        joined = step if before is None else join_steps(before[1], step)
        assert joined is not None  # agents ask for no log probabilities
        if step.finished:
            del self._held[rid]
            return joined
        self._held[rid] = model, joined
        return None

    def _flush(self) -> list[Report]:
        """All that is held: a snapshot may follow, and says how far each call has come."""
        held = [entry for entry in self._held.values() if entry is not None]
        self._held = dict.fromkeys(self._held)
        return [Stepped(model=model, result=StepResult(kind="idle", tokens=[step])) for model, step in held]


class _Unread(ByteTokenizer):
    """An agent's answers are token ids: their text is not made."""

    def detokenizer(self) -> Detokenizer:
        return _Silence()


class _Silence:
    """For each piece of output, a letter."""

    def feed(self, ids: Sequence[int]) -> str:
        return "x" if ids else ""

    def flush(self) -> str:
        return ""
