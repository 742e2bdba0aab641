"""One call's output: token ids in, frames out. Detokenising, stop strings, log probabilities, sequence numbers."""

from __future__ import annotations

from typing import Literal, NamedTuple

from talaria_common.errors import TalariaError
from talaria_common.wire import Frame, TokenLogprob, Usage
from talaria_common.wire.call import CacheSource, FinishReason
from talaria_common.wire.error import info_of
from talaria_gpu.engine.contract import StepTokens
from talaria_gpu.text import StopStrings, Tokenizer
from talaria_instance.messages import CallKey, Prompt

_MIN_LOGPROB = -9999.0
"""OpenAI's stand-in for minus infinity, which JSON cannot say."""


class Fed(NamedTuple):
    """What a step's tokens came to: a piece of output, and whether a stop string ended it."""

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob]
    stopped: bool = False


NOTHING = Fed("", [], [])
"""No output, for an end without any."""


class OutputStream:
    """Args: key: the call; prompt: what it asked; tokenizer: its model's."""

    def __init__(self, key: CallKey, prompt: Prompt, tokenizer: Tokenizer) -> None:
        self._key = key
        self._prompt = prompt
        self._tokenizer = tokenizer
        self._detokenizer = tokenizer.detokenizer()
        self._stop = StopStrings(prompt.params.stop)
        self._seq = 0
        self._held: list[Fed] = []
        self.completion_tokens = 0

    @property
    def sent(self) -> bool:
        """Whether a frame with tokens has gone out: from then on the call cannot move elsewhere."""
        return self._seq > 0

    def feed(self, step: StepTokens) -> Fed:
        """Take a step's tokens. What comes after a stop string is dropped, tokens included."""
        if not self._prompt.params.stop:
            self.completion_tokens += len(step.token_ids)
            return Fed(self._detokenizer.feed(step.token_ids), step.token_ids, self._logprobs(step), stopped=False)
        text = ""
        for n, token in enumerate(step.token_ids, 1):
            released = self._stop.feed(self._detokenizer.feed((token,)))
            self.completion_tokens += 1
            text += released.text
            if released.matched is not None:
                return Fed(text, step.token_ids[:n], self._logprobs(step)[:n], stopped=True)
        return Fed(text, step.token_ids, self._logprobs(step), stopped=False)

    def tail(self) -> tuple[str, bool]:
        """Text held back until now, when the engine has ended the output, and whether a stop string is in it."""
        released = self._stop.feed(self._detokenizer.flush())
        if released.matched is not None:
            return released.text, True
        return released.text + self._stop.flush(), False

    def hold(self, fed: Fed) -> None:
        """Keep a piece for the final frame: nobody reads this answer as it grows."""
        self._held.append(fed)

    def _held_and(self, fed: Fed) -> Fed:
        if not self._held:
            return fed
        pieces = [*self._held, fed]
        self._held = []
        return Fed(
            "".join(p.text for p in pieces),
            [i for p in pieces for i in p.token_ids],
            [lp for p in pieces for lp in p.logprobs],
            fed.stopped,
        )

    def delta(self, fed: Fed, cache_source: CacheSource) -> Frame:
        """A frame with more to come."""
        rid, attempt = self._key
        seq = self._next()
        if seq:
            return Frame(
                rid=rid,
                attempt=attempt,
                seq=seq,
                kind="delta",
                text=fed.text,
                token_ids=fed.token_ids,
                logprobs=fed.logprobs,
            )
        return self._frame("delta", fed, seq, cache_source)

    def final(self, fed: Fed, finish: FinishReason, usage: Usage) -> Frame:
        """The last frame."""
        return self._frame("final", self._held_and(fed), self._next(), usage.cache_source, usage=usage, finish=finish)

    def error(self, error: TalariaError, *, retryable: bool) -> Frame:
        """The last frame of a call that failed."""
        return error_frame(self._key, self._next(), error, retryable=retryable)

    def _frame(
        self,
        kind: Literal["delta", "final"],
        fed: Fed,
        seq: int,
        cache_source: CacheSource,
        *,
        usage: Usage | None = None,
        finish: FinishReason | None = None,
    ) -> Frame:
        first = seq == 0
        return Frame(
            rid=self._key.rid,
            attempt=self._key.attempt,
            seq=seq,
            kind=kind,
            text=fed.text,
            token_ids=fed.token_ids,
            logprobs=fed.logprobs,
            finish_reason=finish,
            usage=usage,
            prompt_token_ids=list(self._prompt.input_ids) if first and self._prompt.params.return_token_ids else [],
            cache_source=cache_source if first else "none",
        )

    def _next(self) -> int:
        seq = self._seq
        self._seq += 1
        return seq

    def _logprobs(self, step: StepTokens) -> list[TokenLogprob]:
        if self._prompt.params.logprobs is None or not step.logprobs:
            return []
        tops = step.top or [[] for _ in step.token_ids]
        return [
            self._logprob(token, value, [self._logprob(t, v, []) for t, v in top])
            for token, value, top in zip(step.token_ids, step.logprobs, tops, strict=True)
        ]

    def _logprob(self, token: int, logprob: float, top: list[TokenLogprob]) -> TokenLogprob:
        raw = self._tokenizer.token_bytes(token)
        shown = max(logprob, _MIN_LOGPROB)
        return TokenLogprob(token=raw.decode("utf-8", "replace"), logprob=shown, bytes=list(raw), top=top)


def error_frame(key: CallKey, seq: int, error: TalariaError, *, retryable: bool) -> Frame:
    """An error frame of a call, also of one that never had a stream."""
    return Frame(rid=key.rid, attempt=key.attempt, seq=seq, kind="error", error=info_of(error), retryable=retryable)
