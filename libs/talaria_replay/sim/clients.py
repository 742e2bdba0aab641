"""Simulated agents: the same closed loop as `talaria replay`, in virtual time.

A prompt is token ids, not text: the first `reusable_tokens` of the session's context (previous prompt and answer), then
ids drawn from the call's seed. A refused call is made again when the server said, as OpenAI's SDK does, after a minute
at most, until it has been refused for `Scenario.refused_s`.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Sequence

from talaria_common.errors import OverloadedError, TalariaError, UnavailableError
from talaria_common.wire import Frame
from talaria_replay.measure import CallRecord
from talaria_replay.sim.events import EventHeap
from talaria_replay.sim.laws import CallLaws
from talaria_replay.sim.mesh import Request, SimMesh, prompt_of
from talaria_replay.trace import Call

WAIT_MAX_S = 60.0
"""Nobody waits longer than that before a call is made again, whatever the server said."""


class Agent:
    """One session.

    Args:
        heap: of the simulation.
        mesh: whom it calls.
        calls: its calls, in order.
        seed: of the ids that it makes.
        gap_cap_s: longest gap.
        refused_s: a call that is refused for so long, counted from its first refusal, fails: there may be nobody who
            will ever admit it.
        laws: told of each call.
        done: called with its records when it has ended.
    """

    def __init__(
        self,
        heap: EventHeap,
        mesh: SimMesh,
        calls: Sequence[Call],
        *,
        seed: int,
        gap_cap_s: float,
        refused_s: float,
        laws: CallLaws,
        done: Callable[[list[CallRecord]], None],
    ) -> None:
        self._heap = heap
        self._clock = heap.clock
        self._mesh = mesh
        self._calls = calls
        self._seed = seed
        self._gap_cap_s = gap_cap_s
        self._refused_s = refused_s
        self._laws = laws
        self._done = done
        self._records: list[CallRecord] = []
        self._context: array[int] = array("I")
        self._prompt: array[int] = array("I")
        self._answer: array[int] = array("I")
        self._at = 0
        self._intended = self._sent = self._first = self._gap = 0.0
        self._retries = 0
        self._refused_at: float | None = None
        """When the call was refused first."""
        self._usage = (0, "none")

    def start(self) -> None:
        """Make the first call."""
        self._next()

    def _next(self) -> None:
        call = self._calls[self._at]
        self._laws.begin(call.session, call.call, self._clock.now())
        self._intended, self._retries, self._refused_at = self._clock.now(), 0, None
        seed = call.seed if call.seed is not None else f"{call.session}/{call.call}"
        rng = random.Random(f"{self._seed}/{seed}")  # noqa: S311 - repeatable on purpose
        keep = min(call.reusable_tokens, len(self._context), call.prompt_tokens)
        self._prompt = self._context[:keep]
        self._prompt.frombytes(rng.randbytes(4 * (call.prompt_tokens - keep)))
        self._send()

    def _send(self) -> None:
        call = self._calls[self._at]
        self._sent, self._first, self._answer = self._clock.now(), 0.0, array("I")
        self._usage = (0, "none")
        prompt = prompt_of(self._prompt, max(1, call.completion_tokens))
        self._mesh.call(Request(call.session, call.model, prompt, self._frame, self._end))

    def _frame(self, frame: Frame) -> None:
        self._laws.moved_at = self._clock.now()
        if frame.token_ids and not self._first:
            self._first = self._laws.moved_at
        self._answer.extend(frame.token_ids)
        if frame.usage is not None:
            self._usage = (frame.usage.cached_tokens, frame.usage.cache_source)

    def _end(self, instance: str, error: TalariaError | None) -> None:
        again = isinstance(error, OverloadedError | UnavailableError) and not self._first
        now = self._clock.now()
        if again and error is not None:
            self._refused_at = now if self._refused_at is None else self._refused_at
            if now - self._refused_at < self._refused_s:
                self._retries += 1
                self._heap.after(min(error.retry_after_s or 1.0, WAIT_MAX_S), self._send)
                return
        call = self._calls[self._at]
        self._laws.ended(call.session, call.call, now)
        cached, source = self._usage
        self._records.append(
            CallRecord(
                session=call.session,
                call=call.call,
                model=call.model,
                intended_s=self._intended,
                sent_s=self._sent,
                first_s=self._first,
                done_s=now,
                gap_s=self._gap,
                prompt_tokens=len(self._prompt),
                completion_tokens=len(self._answer),
                cached_tokens=cached,
                wanted_prompt_tokens=call.prompt_tokens,
                wanted_completion_tokens=max(1, call.completion_tokens),
                cache_source=source,
                instance=instance,
                retries=self._retries,
                error="" if error is None else error.message,
            )
        )
        self._context = self._prompt + self._answer
        self._at += 1
        if error is not None or self._at >= len(self._calls):
            self._done(self._records)
            return
        self._gap = min(self._calls[self._at].gap_s or 0.0, self._gap_cap_s)
        self._heap.after(self._gap, self._next)
