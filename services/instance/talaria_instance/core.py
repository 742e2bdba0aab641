"""The instance core: which calls live here and what is owed for each (DESIGN 4, steps 4 and 5). Sans-I/O.

What holds for every accepted (rid, attempt), whatever happens: frames with seq 0, 1, 2, … end in exactly one final or
error frame, and exactly one completion is published. Frames of one `handle` leave as one batch per api (GATEWAY 1).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from talaria_common import subjects
from talaria_common.errors import (
    DeadlineError,
    EngineError,
    InstanceLostError,
    ModelNotFoundError,
    OverloadedError,
    TalariaError,
    UnavailableError,
    from_info,
)
from talaria_common.settings import InstanceSettings
from talaria_common.wire import Completion, ForwardReply, Frame, TokenBatch
from talaria_common.wire.call import FinishReason
from talaria_gpu.engine.contract import StepResult, StepTokens
from talaria_gpu.engine.ipc import Abort, Fatal, Progress, Ready, Refused, SlotEnded, Status, Stepped, Submit, Switched
from talaria_gpu.text import Tokenizer
from talaria_instance import control, events, snapshot
from talaria_instance.calls import Call, engine_call, new_call
from talaria_instance.engine_state import EngineState
from talaria_instance.fences import Fences, Refusal
from talaria_instance.messages import (
    Announce,
    Answer,
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
from talaria_instance.placements import Placements
from talaria_instance.stream import NOTHING, Fed, OutputStream, error_frame

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
        self.calls: dict[CallKey, Call] = {}
        self._tokenizers = tokenizers
        self._skew_s = skew_s
        self._heartbeat_s = heartbeat_s
        self._attempts: dict[str, Call] = {}  # by rid: of one call at most one attempt lives here
        self._by_engine_rid: dict[str, Call] = {}
        self._queued = 0  # calls before their first token
        self._fences = Fences(self.iid, skew_s)
        self._placements = Placements()
        self._version = 0
        self._draining = ""  # why
        self._shutting_down = False
        self._told_status = ""
        self._out: list[Effect] = []
        self._completions: list[Completion] = []
        self._frames: dict[str, list[Frame]] = {}
        self._events: list[Publish] = []
        self._on: dict[type, Callable[[float, Any], None]] = {
            Forward: self._forward,
            Prepared: self._prepared,
            PrepareFailed: self._prepared,
            CancelCall: self._cancel,
            Control: self._control,
            EngineStarting: self._engine_starting,
            EngineSaid: self._engine_said,
            EngineExited: self._engine_exited,
            Tick: self._tick,
            Announce: self._announce,
            Shutdown: self._shutdown,
        }
        self._on_report: dict[type, Callable[[float, Any], None]] = {
            Stepped: self._tokens,
            Status: self._status,
            Ready: self._ready,
            Progress: self._progress,
            Refused: self._refused,
            Switched: self._switched,
            SlotEnded: self._slot_ended,
            Fatal: self._fatal,
        }

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

    @property
    def queued(self) -> int:
        """Calls before their first token."""
        return self._queued

    def start(self) -> list[Effect]:
        """The first effects: the engine is to be started."""
        return [StartEngine(self.engine.generation, 0.0)]

    def handle(self, now: float, message: Message) -> list[Effect]:
        """Take one message; returns what is to be done, in order."""
        self._on[type(message)](now, message)
        self._note_status(now)
        return self._flush()

    # --- a call comes

    def _forward(self, now: float, message: Forward) -> None:
        head = message.head
        place = head.placement
        if place.iid == self.iid:
            self._placements.saw(now, place.router, place.router_epoch, place.seq)
        refusal = self._fences.check(now, head) or self._full(head.model)
        if refusal is not None:
            error = refusal.error.info()
            reply = ForwardReply(accepted=False, epoch=self.epoch, error=error, retryable=refusal.retryable)
            self._out.append(Answer(message.handle, reply))
            self._event(now, "forward", events.forward(head, error, self._queued, message.trace))
            return
        if self._fences.new_api_epoch(head):
            for orphan in [c for c in self.calls.values() if c.head.api == head.api]:
                self._abort(now, orphan)  # its clients went with the api's earlier life
        older = self._attempts.get(place.fence.rid)
        if older is not None:
            self._abort(now, older)  # the api has given it up, or it would not have tried again
        call = new_call(now, head, message.body, message.trace, self._skew_s)
        self.calls[call.key] = self._attempts[call.key.rid] = call
        self._queued += 1
        self._out.append(Answer(message.handle, ForwardReply(accepted=True, epoch=self.epoch)))
        self._out.append(Prepare(call.key, head, message.body, message.trace))
        self._event(now, "forward", events.forward(head, None, self._queued, message.trace))

    def _full(self, model: str) -> Refusal | None:
        """Why the instance takes no call for `model` now."""
        if model not in self.settings.models:
            return Refusal(ModelNotFoundError(f"{self.iid} does not serve {model!r}", param="model"), retryable=True)
        if self.status != "ready":
            return Refusal(UnavailableError(f"{self.iid} is {self.status}: {self.reason}"), retryable=True)
        if self._queued >= self.settings.max_queued:
            error = OverloadedError(
                f"{self.iid} has {self._queued} calls waiting", retry_after_s=self._expected_wait_s(model)
            )
            return Refusal(error, retryable=True)
        return None

    def _expected_wait_s(self, model: str) -> float:
        """Time to prefill what waits, as far as it was measured."""
        status = self.engine.status
        per_token = status.prefill_ms_per_token.get(model, 0.0) if status else 0.0
        waiting = sum(c.prompt_tokens for c in self.calls.values() if not c.first_token)
        return max(RETRY_AFTER_MIN_S, waiting * per_token / 1000)

    def _prepared(self, now: float, message: Prepared | PrepareFailed) -> None:
        call = self.calls.get(message.key)
        if call is None:
            return  # cancelled, or lost with the engine, in the meantime
        if isinstance(message, PrepareFailed):
            self._fail(now, call, from_info(message.error), retryable=False)
            return
        tokenizer, info = self._tokenizers[call.head.model], self.engine.infos[call.head.model]
        call.prompt = message.prompt
        try:
            command = engine_call(call, info.context_tokens, tokenizer.eos_token_ids)
        except TalariaError as e:
            self._fail(now, call, e, retryable=False)
            return
        call.stream = OutputStream(call.key, call.prompt, tokenizer)
        self._by_engine_rid[call.key.engine_rid] = call
        self._out.append(Tell(Submit(call=command)))

    # --- the engine reports

    def _engine_starting(self, now: float, message: EngineStarting) -> None:
        if message.generation == self.engine.generation:
            self.engine.starting(now)

    def _engine_exited(self, now: float, message: EngineExited) -> None:
        if message.generation == self.engine.generation:
            self._engine_lost(now, message.reason)

    def _engine_said(self, now: float, message: EngineSaid) -> None:
        if message.generation != self.engine.generation:
            return  # the last words of an engine that was given up
        self.engine.heard(now)
        self._on_report[type(message.report)](now, message.report)

    def _tokens(self, now: float, report: Stepped) -> None:
        for step in report.result.tokens:
            call = self._by_engine_rid.get(step.rid)
            if call is not None:  # else it ended here already, and the engine has been told
                self._stepped(now, call, step, report.result)

    def _status(self, now: float, report: Status) -> None:
        before = self.engine.status.active if self.engine.status else None
        self.engine.status = report
        if report.active != before:
            self._snapshot(now)

    def _ready(self, now: float, report: Ready) -> None:
        self.engine.ready(now, report)

    def _progress(self, _now: float, report: Progress) -> None:
        self.engine.reason = report.message

    def _refused(self, now: float, report: Refused) -> None:
        call = self._by_engine_rid.get(report.rid)
        if call is not None:
            error = from_info(report.error)
            self._fail(now, call, error, retryable=isinstance(error, UnavailableError | OverloadedError), tell=False)

    def _switched(self, now: float, report: Switched) -> None:
        for timing in report.timings:
            self._event(now, "switch", events.switch(timing))

    def _slot_ended(self, now: float, report: SlotEnded) -> None:
        self._event(now, "round", events.round_(report))

    def _fatal(self, now: float, report: Fatal) -> None:
        self._out.append(KillEngine(self.engine.generation))
        self._engine_lost(now, report.message)

    def _stepped(self, now: float, call: Call, step: StepTokens, result: StepResult) -> None:
        assert call.stream is not None
        if step.token_ids and not call.first_token:
            self._queued -= 1
        call.note(now, step, result)
        fed = call.stream.feed(step)
        if fed.stopped:
            if not step.finished:
                self._out.append(Tell(Abort(rid=call.key.engine_rid)))
            self._finish(now, call, fed, "stop")
            return
        match step.finished:
            case "":
                if step.token_ids:
                    self._send(call, call.stream.delta(fed, call.usage()))
            case "stop" | "length":
                text, stopped = call.stream.tail()
                self._finish(now, call, fed._replace(text=fed.text + text), "stop" if stopped else step.finished)
            case "deadline":
                error = DeadlineError("the deadline passed while the call ran")
                self._fail(now, call, error, retryable=False, tell=False)
            case "abort":
                self._fail(now, call, EngineError("the engine dropped the call"), retryable=True, tell=False)
            case "error":
                failure = EngineError(step.message or "the engine failed on the call")
                self._fail(now, call, failure, retryable=True, tell=False)

    def _engine_lost(self, now: float, reason: str) -> None:
        delay = self.engine.failed(now, reason)
        for call in list(self.calls.values()):
            message = f"the engine of {self.iid} is gone: {reason}"
            self._fail(now, call, InstanceLostError(message), retryable=True, tell=False)
        if not self._shutting_down:
            self._out.append(StartEngine(self.engine.generation, delay))

    # --- the api or an operator speaks

    def _cancel(self, now: float, message: CancelCall) -> None:
        cancel = message.cancel
        call = self.calls.get(CallKey(cancel.rid, cancel.attempt))
        if call is None:
            self._fences.cancel_came_early(now, cancel)
            return
        self._abort(now, call)

    def _control(self, now: float, message: Control) -> None:
        standing = control.Standing(self.status, self.reason, self.settings.models, frozenset(self.engine.infos))
        verdict = control.decide(now, message, standing, self._skew_s)
        if verdict.drain is not None and not self._shutting_down:
            self._draining = "drained by an operator" if verdict.drain else ""
        reply = control.reply(self.iid, self.epoch, self.status, verdict)
        self._out.append(Answer(message.handle, reply))

    def _shutdown(self, now: float, message: Shutdown) -> None:
        self._shutting_down = True
        self._draining = "shutting down"
        if message.now:
            for call in list(self.calls.values()):
                error = UnavailableError if not call.sent else InstanceLostError
                self._fail(now, call, error(f"{self.iid} shuts down"), retryable=True)

    def _announce(self, now: float, _message: Announce) -> None:
        self._snapshot(now)

    def _tick(self, now: float, _message: Tick) -> None:
        silence = self.engine.silent_for(now, self._heartbeat_s)
        if silence is not None:
            self._out.append(KillEngine(self.engine.generation))
            self._engine_lost(now, f"it was silent for {silence:.1f} s")
        for call in [c for c in self.calls.values() if now > c.deadline]:
            self._fail(now, call, DeadlineError("the deadline passed while the call ran"), retryable=False)
        self._snapshot(now)
        alive: dict[str, list[str]] = {}
        for call in self.calls.values():
            alive.setdefault(call.head.api, []).append(call.key.rid)
        for api, rids in alive.items():
            batch = TokenBatch(iid=self.iid, epoch=self.epoch, frames=self._frames.pop(api, []), alive=rids)
            self._out.append(Publish(subjects.tokens(api), batch))

    # --- a call ends: through exactly one of these

    def _finish(self, now: float, call: Call, fed: Fed, finish: FinishReason) -> None:
        assert call.stream is not None
        self._send(call, call.stream.final(fed, finish, call.usage()))
        self._leave(now, call, ok=True, finish=finish)

    def _fail(self, now: float, call: Call, error: TalariaError, *, retryable: bool, tell: bool = True) -> None:
        """End with an error frame; `retryable` counts only before the first token, `tell` is for the engine."""
        retryable = retryable and not call.sent
        frame = (
            call.stream.error(error, retryable=retryable)
            if call.stream is not None
            else error_frame(call.key, 0, error, retryable=retryable)
        )
        self._send(call, frame)
        self._drop_from_engine(call, tell=tell)
        self._leave(now, call, ok=False, finish="error", code=error.code)

    def _abort(self, now: float, call: Call) -> None:
        """End because nobody wants it any more. The frame is for an api that still listens."""
        if call.stream is not None:
            self._send(call, call.stream.final(NOTHING, "abort", call.usage()))
        else:
            frame = Frame(
                rid=call.key.rid,
                attempt=call.key.attempt,
                seq=0,
                kind="final",
                finish_reason="abort",
                usage=call.usage(),
            )
            self._send(call, frame)
        self._drop_from_engine(call)
        self._leave(now, call, ok=False, finish="abort")

    def _drop_from_engine(self, call: Call, *, tell: bool = True) -> None:
        if tell and call.key.engine_rid in self._by_engine_rid:
            self._out.append(Tell(Abort(rid=call.key.engine_rid)))

    def _leave(self, now: float, call: Call, *, ok: bool, finish: str, code: str = "") -> None:
        del self.calls[call.key], self._attempts[call.key.rid]
        self._by_engine_rid.pop(call.key.engine_rid, None)
        if not call.first_token:
            self._queued -= 1
        message = call.completion(now, self.iid, self.epoch, self.engine.kv_epoch(call.head.model), ok=ok)
        self._completions.append(message)
        self._event(now, "completion", events.completion(message, finish, code))

    # --- what goes out

    def _send(self, call: Call, frame: Frame) -> None:
        self._frames.setdefault(call.head.api, []).append(frame)

    def _event(self, now: float, kind: str, data: dict[str, object]) -> None:
        self._events.append(events.make(now, kind, self.iid, data))

    def _snapshot(self, now: float) -> None:
        self._version += 1
        who = snapshot.Identity(self.epoch, self._version, self.status, self.reason)
        counted = snapshot.Counted([call.load() for call in self.calls.values()], self._placements.seen(now))
        message = snapshot.build(now, who, self.settings, self.engine, counted)
        self._out.append(Publish(subjects.snapshot(self.iid), message))

    def _note_status(self, now: float) -> None:
        """A change of status is news: a snapshot at once and a health event."""
        if self.status == self._told_status:
            return
        self._told_status = self.status
        self._snapshot(now)
        data = {"status": self.status, "reason": self.reason, "engine_restarts": self.engine.restarts}
        self._event(now, "health", {"epoch": self.epoch, **data})

    def _flush(self) -> list[Effect]:
        """Completions before frames: a client that answers its final frame at once must find its lease installed."""
        out = self._out
        out += [Publish(subjects.completion(self.iid), message) for message in self._completions]
        for api, frames in self._frames.items():
            batch = TokenBatch(iid=self.iid, epoch=self.epoch, frames=frames)
            out.append(Publish(subjects.tokens(api), batch))
        out += self._events
        self._out, self._completions, self._frames, self._events = [], [], {}, []
        return out
