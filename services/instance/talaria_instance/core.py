"""The instance core: takes calls, and sees to it that each gets what it is owed (DESIGN 4, steps 4 and 5). Sans-I/O."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from talaria_common import subjects
from talaria_common.errors import (
    DeadlineError,
    InstanceLostError,
    ModelNotFoundError,
    OverloadedError,
    TalariaError,
    UnavailableError,
)
from talaria_common.settings import InstanceSettings
from talaria_common.wire import ForwardReply
from talaria_common.wire.error import from_info, info_of
from talaria_gpu.engine.ipc import Closed, Open
from talaria_gpu.text import Tokenizer
from talaria_instance import control, events, snapshot
from talaria_instance.calls import Call, engine_call, new_call
from talaria_instance.engine_state import EngineState
from talaria_instance.fences import Fences, Refusal
from talaria_instance.ledger import Ledger
from talaria_instance.messages import (
    Announce,
    Answer,
    ApiGone,
    CallKey,
    CancelCall,
    Control,
    Effect,
    EngineExited,
    EngineSaid,
    EngineStarting,
    Forward,
    KillEngine,
    Message,
    Prepare,
    Prepared,
    PrepareFailed,
    Publish,
    Shutdown,
    StartEngine,
    Tell,
    Tick,
)
from talaria_instance.outbox import Outbox
from talaria_instance.placements import Placements
from talaria_instance.reports import Reports

RETRY_AFTER_MIN_S = 1.0


class InstanceCore:
    """One instance's state.

    Args:
        settings: this instance's.
        epoch: of this process's life.
        tokenizers: by model, filled by the shell before it passes on an engine's `Ready`; read only.
        skew_s: clock difference between hosts that deadlines forgive.
        heartbeat_s: time between `Tick`s.
    """

    def __init__(
        self,
        settings: InstanceSettings,
        epoch: str,
        tokenizers: Mapping[str, Tokenizer],
        *,
        skew_s: float,
        heartbeat_s: float,
    ) -> None:
        self.settings = settings
        self.iid = settings.id
        self.epoch = epoch
        self.engine = EngineState(settings.models, start_s=settings.engine_start_s, hang_s=settings.engine_hang_s)
        self._tokenizers = tokenizers
        self._skew_s = skew_s
        self._heartbeat_s = heartbeat_s
        self._out = Outbox(self.iid, epoch)
        self._ledger = Ledger(self.iid, epoch, self.engine.kv_epoch, self._out)
        self._reports = Reports(
            self.engine, self._ledger, self._out, switched=self._snapshot, lost=self._engine_given_up
        )
        self._fences = Fences(self.iid, skew_s)
        self._placements = Placements()
        self._version = 0
        self._draining = ""  # why
        self._shutting_down = False
        self._told_status = ""
        self._on: dict[type, Callable[[float, Any], None]] = {
            Forward: self._forward,
            Prepared: self._prepared,
            PrepareFailed: self._prepared,
            CancelCall: self._cancel,
            ApiGone: self._api_gone,
            Control: self._control,
            EngineStarting: self._engine_starting,
            EngineSaid: self._engine_said,
            EngineExited: self._engine_exited,
            Tick: self._tick,
            Announce: self._announce,
            Shutdown: self._shutdown,
        }

    @property
    def calls(self) -> Mapping[CallKey, Call]:
        """The calls accepted and not ended."""
        return self._ledger.calls

    @property
    def queued(self) -> int:
        """Calls before their first token."""
        return self._ledger.queued

    @property
    def status(self) -> snapshot.Status:
        """As the snapshot says it."""
        if self.engine.phase != "ready":
            return self.engine.phase
        return "draining" if self._draining else "ready"

    @property
    def reason(self) -> str:
        """Why the instance is not ready; "" when it is."""
        return self.engine.reason or self._draining

    def start(self) -> list[Effect]:
        """The first effects: the engine is to be started."""
        return [StartEngine(self.engine.generation, 0.0)]

    def handle(self, now: float, message: Message) -> list[Effect]:
        """Take one message; returns what is to be done, in order."""
        self._on[type(message)](now, message)
        self._note_status(now)
        return self._out.flush()

    # --- a call comes

    def _forward(self, now: float, message: Forward) -> None:
        head, ledger = message.head, self._ledger
        place = head.placement
        if place.iid == self.iid:
            self._placements.saw(now, place.router, place.router_epoch, place.seq)
        refusal = self._fences.check(now, head) or self._full(head.model)
        if refusal is not None:
            error = info_of(refusal.error)
            reply = ForwardReply(accepted=False, epoch=self.epoch, error=error, retryable=refusal.retryable)
            self._out.do(Answer(message.handle, reply))
            self._out.event(now, "forward", events.forward(head, error, self.queued, message.trace))
            return
        older = ledger.attempt_of(place.fence.rid)
        if older is not None:
            ledger.abort(now, older)  # the api has given it up, or it would not have tried again
        call = new_call(now, head, message.body, self._skew_s)
        ledger.accept(call)
        self._out.do(Answer(message.handle, ForwardReply(accepted=True, epoch=self.epoch)))
        self._out.do(Prepare(call.key, head, message.body))
        self._out.event(now, "forward", events.forward(head, None, self.queued, message.trace))

    def _api_gone(self, now: float, message: ApiGone) -> None:
        for orphan in [c for c in self._ledger.calls.values() if c.head.api == message.api]:
            self._ledger.abort(now, orphan)

    def _full(self, model: str) -> Refusal | None:
        """Why the instance takes no call for `model` now."""
        if model not in self.settings.models:
            return Refusal(ModelNotFoundError(f"{self.iid} does not serve {model!r}", param="model"), retryable=True)
        if self.status != "ready":
            return Refusal(UnavailableError(f"{self.iid} is {self.status}: {self.reason}"), retryable=True)
        if model not in self.engine.infos:
            return Refusal(UnavailableError(f"{model!r} is not open on {self.iid}", param="model"), retryable=True)
        if self.queued >= self.settings.max_queued:
            message = f"{self.iid} has {self.queued} calls waiting"
            return Refusal(OverloadedError(message, retry_after_s=self._expected_wait_s()), retryable=True)
        return None

    def _expected_wait_s(self) -> float:
        """Time to prefill what waits, as far as it was measured."""
        speeds = self.engine.status.prefill_ms_per_token if self.engine.status else {}
        waiting = (c for c in self.calls.values() if not c.first_token)
        return max(RETRY_AFTER_MIN_S, sum(c.prompt_tokens * speeds.get(c.head.model, 0.0) for c in waiting) / 1000)

    def _prepared(self, now: float, message: Prepared | PrepareFailed) -> None:
        call = self.calls.get(message.key)
        if call is None:
            return  # cancelled, or lost with the engine, in the meantime
        if isinstance(message, PrepareFailed):
            self._ledger.fail(now, call, from_info(message.error), retryable=False, tell=False)
            return
        tokenizer, info = self._tokenizers[call.head.model], self.engine.infos.get(call.head.model)
        if info is None:  # it was closed because it could not be switched to
            gone = UnavailableError(f"{call.head.model!r} is not open on {self.iid} any more", param="model")
            self._ledger.fail(now, call, gone, retryable=True, tell=False)
            return
        call.prompt = message.prompt
        try:
            command = engine_call(call, info.context_tokens, tokenizer.eos_token_ids)
        except TalariaError as e:
            self._ledger.fail(now, call, e, retryable=False, tell=False)
            return
        self._ledger.submit(call, command, tokenizer)

    def _cancel(self, now: float, message: CancelCall) -> None:
        call = self.calls.get(CallKey(message.cancel.rid, message.cancel.attempt))
        if call is None:
            self._fences.cancel_came_early(now, message.cancel)
        else:
            self._ledger.abort(now, call)

    # --- the engine lives and dies

    def _engine_starting(self, now: float, message: EngineStarting) -> None:
        if message.generation == self.engine.generation:
            self.engine.starting(now)

    def _engine_said(self, now: float, message: EngineSaid) -> None:
        if message.generation == self.engine.generation:  # else: the last words of one that was given up
            self._reports.read(now, message.reports)

    def _engine_exited(self, now: float, message: EngineExited) -> None:
        if message.generation == self.engine.generation:
            self._engine_lost(now, message.reason)

    def _engine_given_up(self, now: float, reason: str) -> None:
        self._out.do(KillEngine(self.engine.generation))
        self._engine_lost(now, reason)

    def _engine_lost(self, now: float, reason: str) -> None:
        delay = self.engine.failed(now, reason)
        for call in list(self.calls.values()):
            error = InstanceLostError(f"the engine of {self.iid} is gone: {reason}")
            self._ledger.fail(now, call, error, retryable=True, tell=False)
        if not self._shutting_down:
            self._out.do(StartEngine(self.engine.generation, delay))

    # --- time and operators

    def _tick(self, now: float, message: Tick) -> None:
        silence = self.engine.hung_for(now, self._heartbeat_s, message.engine_cpu_s)
        if silence is not None:
            self._engine_given_up(now, f"it was silent for {silence:.1f} s")
        for call in [c for c in self.calls.values() if now > c.deadline]:
            late = DeadlineError("the deadline passed while the call ran")
            self._ledger.fail(now, call, late, retryable=False, tell=True)
        for call in self.calls.values():
            self._out.alive(call.head.api, call.key.rid)
        self._snapshot(now)

    def _announce(self, now: float, _message: Announce) -> None:
        self._snapshot(now)

    def _control(self, now: float, message: Control) -> None:
        busy = {call.head.model for call in self.calls.values()}
        if self.engine.status and self.engine.status.active:
            busy.add(self.engine.status.active)
        standing = control.Standing(
            self.status,
            self.reason,
            self.settings.models,
            opened=frozenset(self.engine.infos),
            busy=frozenset(busy),
            pinned=self.settings.pool == "hot",
        )
        verdict = control.decide(now, message, standing, self._skew_s)
        if verdict.tell is not None:
            if isinstance(verdict.tell, Open):
                self.engine.opening.add(verdict.tell.model)
            else:
                self.engine.closed(Closed(model=verdict.tell.model))  # takes no new call from now on
            self._out.do(Tell(verdict.tell))
        if verdict.drain is not None and not self._shutting_down:
            self._draining = "drained by an operator" if verdict.drain else ""
        self._out.do(Answer(message.handle, control.reply(self.iid, self.epoch, self.status, verdict)))

    def _shutdown(self, now: float, message: Shutdown) -> None:
        self._shutting_down = True
        self._draining = "shutting down"
        if message.now:
            for call in list(self.calls.values()):
                error = UnavailableError if not call.sent else InstanceLostError
                self._ledger.fail(now, call, error(f"{self.iid} shuts down"), retryable=True, tell=True)

    # --- what it says of itself

    def _snapshot(self, now: float) -> None:
        self._version += 1
        who = snapshot.Identity(self.epoch, self._version, self.status, self.reason)
        fresh_tokens = self._ledger.reuse.fresh_tokens
        loads = [call.load(fresh_tokens(call)) for call in self.calls.values()]
        counted = snapshot.Counted(loads, self._placements.seen(now))
        message = snapshot.build(now, who, self.settings, self.engine, counted)
        self._out.do(Publish(subjects.snapshot(self.iid), message))

    def _note_status(self, now: float) -> None:
        """A change of status is news: a snapshot at once and a health event."""
        if self.status == self._told_status:
            return
        self._told_status = self.status
        self._snapshot(now)
        data = {"status": self.status, "reason": self.reason, "engine_restarts": self.engine.restarts}
        self._out.event(now, "health", {"epoch": self.epoch, **data})
