"""The calls that live here, and the only ways in which one ends.

What holds for every accepted (rid, attempt), whatever happens: frames with seq 0, 1, 2, … end in exactly one final or
error frame, and exactly one completion is published.
"""

from __future__ import annotations

from collections.abc import Callable

from talaria_common.errors import TalariaError
from talaria_common.wire import Frame
from talaria_common.wire.call import FinishReason
from talaria_gpu.engine.contract import EngineCall, StepResult, StepTokens
from talaria_gpu.engine.ipc import Abort, Submit
from talaria_gpu.text import Tokenizer
from talaria_instance import events
from talaria_instance.calls import Call
from talaria_instance.messages import CallKey, Tell
from talaria_instance.outbox import Outbox
from talaria_instance.reuse import Reuse
from talaria_instance.stream import NOTHING, Fed, OutputStream, error_frame


class Ledger:
    """Args: iid, epoch: of the instance; kv_epoch: of a model, now; out: where frames and completions go."""

    def __init__(self, iid: str, epoch: str, kv_epoch: Callable[[str], int], out: Outbox) -> None:
        self.calls: dict[CallKey, Call] = {}
        self.queued = 0
        """Calls before their first token."""
        self.reuse = Reuse()
        self._iid = iid
        self._epoch = epoch
        self._kv_epoch = kv_epoch
        self._out = out
        self._attempts: dict[str, Call] = {}  # by rid: of one call at most one attempt lives here
        self._in_engine: dict[str, Call] = {}

    def attempt_of(self, rid: str) -> Call | None:
        """The attempt of `rid` that lives here."""
        return self._attempts.get(rid)

    def in_engine(self, engine_rid: str) -> Call | None:
        """The call that the engine knows by this name, unless it has ended here."""
        return self._in_engine.get(engine_rid)

    def accept(self, call: Call) -> None:
        """From now on the call is owed an end."""
        self.calls[call.key] = self._attempts[call.key.rid] = call
        self.queued += 1

    def submit(self, call: Call, command: EngineCall, tokenizer: Tokenizer) -> None:
        """Hand the call to the engine."""
        assert call.prompt is not None
        call.stream = OutputStream(call.key, call.prompt, tokenizer)
        self._in_engine[call.key.engine_rid] = call
        self._out.do(Tell(Submit(call=command)))

    def feed(self, now: float, call: Call, step: StepTokens, result: StepResult) -> Fed:
        """Take a step's tokens; what they come to is still to be sent, by `send` or `finish`."""
        assert call.stream is not None
        first = bool(step.token_ids) and not call.first_token
        call.note(now, step, result)
        if first:
            self.queued -= 1
            self.reuse.learn(call)
        return call.stream.feed(step)

    def send(self, call: Call, fed: Fed) -> None:
        """A delta; kept for the final frame when nobody reads the answer as it grows."""
        assert call.stream is not None
        if call.head.stream:
            self._out.frame(call.head.api, call.stream.delta(fed, call.cache_source))
        else:
            call.stream.hold(fed)

    # --- a call ends: through exactly one of these. `tell`: the engine has it still, and is to drop it.

    def finish(self, now: float, call: Call, fed: Fed, finish: FinishReason, *, tell: bool) -> None:
        """With an answer."""
        assert call.stream is not None
        frame = call.stream.final(fed, finish, call.usage())
        self._leave(now, call, frame, finish, ok=True, tell=tell)

    def fail(self, now: float, call: Call, error: TalariaError, *, retryable: bool, tell: bool) -> None:
        """With an error; `retryable` counts only before the first token."""
        retryable = retryable and not call.sent
        frame = (
            call.stream.error(error, retryable=retryable)
            if call.stream is not None
            else error_frame(call.key, 0, error, retryable=retryable)
        )
        self._leave(now, call, frame, "error", code=error.code, tell=tell)

    def abort(self, now: float, call: Call) -> None:
        """Because nobody wants it any more. The frame is for an api that still listens."""
        if call.stream is not None:
            frame = call.stream.final(NOTHING, "abort", call.usage())
        else:
            rid, attempt = call.key
            frame = Frame(rid=rid, attempt=attempt, seq=0, kind="final", finish_reason="abort", usage=call.usage())
        self._leave(now, call, frame, "abort", tell=True)

    def _leave(
        self, now: float, call: Call, frame: Frame, finish: str, *, code: str = "", ok: bool = False, tell: bool
    ) -> None:
        del self.calls[call.key], self._attempts[call.key.rid]
        if self._in_engine.pop(call.key.engine_rid, None) is not None and tell:
            self._out.do(Tell(Abort(rid=call.key.engine_rid)))
        if not call.first_token:
            self.queued -= 1
        self._out.frame(call.head.api, frame)
        message = call.completion(now, self._iid, self._epoch, self._kv_epoch(call.head.model), ok=ok)
        self._out.completion(message)
        self._out.event(now, "completion", events.completion(message, finish, code))
