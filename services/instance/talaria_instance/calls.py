"""A call that this instance has accepted and not ended."""

from __future__ import annotations

from dataclasses import dataclass

from talaria_common.clock import from_ms, to_ms
from talaria_common.errors import ContextLengthError
from talaria_common.ids import hash_id
from talaria_common.wire import Completion, ForwardHead, Usage
from talaria_common.wire.call import CacheSource
from talaria_gpu.engine.contract import EngineCall, Sampling, StepResult, StepTokens
from talaria_instance.messages import CallKey, Prompt
from talaria_instance.snapshot import CallLoad
from talaria_instance.stream import OutputStream

BYTES_PER_TOKEN = 4
"""A guess at prompt tokens while a body is being tokenised; English text and code."""


@dataclass(slots=True)
class Call:
    """Times are seconds of the instance's clock."""

    key: CallKey
    head: ForwardHead
    arrived: float
    deadline: float
    """The placement's, clock skew forgiven."""
    body_bytes: int
    prompt: Prompt | None = None
    stream: OutputStream | None = None
    """From when the engine was told of it."""
    max_new_tokens: int = 0
    first_token: float = 0.0
    prefill_ms: float = 0.0
    cached_tokens: int = 0
    cache_source: CacheSource = "none"

    @property
    def sent(self) -> bool:
        """Whether a token has gone out."""
        return self.stream is not None and self.stream.sent

    @property
    def prompt_tokens(self) -> int:
        """Exact once tokenised."""
        return len(self.prompt.input_ids) if self.prompt else self.body_bytes // BYTES_PER_TOKEN

    @property
    def completion_tokens(self) -> int:
        """Tokens of the answer so far."""
        return self.stream.completion_tokens if self.stream else 0

    def note(self, now: float, step: StepTokens, result: StepResult) -> None:
        """Take the figures of a step's tokens."""
        if step.token_ids and not self.first_token:
            self.first_token = now
            self.prefill_ms = result.wall_ms if result.kind == "prefill" else 0.0
            self.cached_tokens, self.cache_source = step.cached_tokens, step.cache_source

    def usage(self) -> Usage:
        """Token counts so far."""
        return Usage(
            prompt_tokens=self.prompt_tokens if self.prompt else 0,
            completion_tokens=self.completion_tokens,
            cached_tokens=self.cached_tokens,
            cache_source=self.cache_source,
        )

    def load(self, fresh_tokens: int) -> CallLoad:
        """For the snapshot; `fresh_tokens`: of the prompt, as expected to be computed."""
        left = max(0, self.max_new_tokens - self.completion_tokens)
        rows = self.prompt_tokens + self.completion_tokens
        return CallLoad(self.head.model, bool(self.first_token), fresh_tokens, left, self.deadline, rows)

    def completion(self, now: float, iid: str, epoch: str, kv_epoch: int, *, ok: bool) -> Completion:
        """The completion hook's message.

        The last token has no KV: it was never put in. The handle is opaque; it names what the session left behind.
        """
        head, place = self.head, self.head.placement
        kv_tokens = max(0, self.prompt_tokens + self.completion_tokens - 1) if ok and self.first_token else 0
        ttft = self.first_token - self.arrived if self.first_token else 0.0
        return Completion(
            iid=iid,
            epoch=epoch,
            rid=self.key.rid,
            attempt=self.key.attempt,
            router=place.router,
            router_epoch=place.router_epoch,
            seq=place.seq,
            partition=place.fence.partition,
            tenant=head.tenant,
            session=head.session,
            model=head.model,
            session_final=head.session_final,
            ok=ok,
            prompt_tokens=self.prompt_tokens if self.prompt else 0,
            completion_tokens=self.completion_tokens,
            cached_tokens=self.cached_tokens,
            cache_source=self.cache_source,
            prompt_bytes=self.prompt.text_bytes if self.prompt else 0,
            kv_tokens=kv_tokens,
            prefix_handle=hash_id(epoch, head.session, head.model, str(kv_epoch), str(kv_tokens)) if kv_tokens else "",
            kv_epoch=kv_epoch,
            queue_ms=max(0.0, ttft * 1000 - self.prefill_ms),
            prefill_ms=self.prefill_ms,
            ttft_ms=ttft * 1000,
            total_ms=(now - self.arrived) * 1000,
            at_ms=to_ms(now),
        )


def new_call(now: float, head: ForwardHead, body: bytes, skew_s: float) -> Call:
    """A call at its acceptance."""
    place = head.placement
    key = CallKey(place.fence.rid, place.fence.attempt)
    return Call(key, head, now, from_ms(place.deadline_ms) + skew_s, len(body))


def engine_call(call: Call, context_tokens: int, eos: tuple[int, ...]) -> EngineCall:
    """What the engine is to run; sets `call.max_new_tokens`.

    Raises:
        ContextLengthError: prompt and requested output do not fit `context_tokens`.
    """
    assert call.prompt is not None
    params, size = call.prompt.params, len(call.prompt.input_ids)
    room = context_tokens - size
    wanted = room if params.max_tokens is None else params.max_tokens
    if room < 1 or wanted > room:
        asked = "" if params.max_tokens is None else f" and {wanted} in the completion"
        field = "messages" if call.head.endpoint == "chat" else "prompt"
        raise ContextLengthError(
            f"the maximum context length is {context_tokens} tokens, but there are {size} in the prompt{asked}",
            param=field if room < 1 else params.max_tokens_field,
        )
    call.max_new_tokens = wanted
    return EngineCall(
        rid=call.key.engine_rid,
        model=call.head.model,
        input_ids=call.prompt.input_ids,
        sampling=Sampling(
            max_new_tokens=wanted,
            temperature=params.temperature,
            top_p=params.top_p,
            seed=params.seed,
            stop_token_ids=() if params.ignore_eos else eos,
            ignore_eos=params.ignore_eos,
            frequency_penalty=params.frequency_penalty,
            presence_penalty=params.presence_penalty,
            logprobs=params.logprobs,
        ),
        session=call.head.session,
        salt=call.head.tenant,
        is_continuation=call.head.is_continuation,
        whole=not call.head.stream and not params.stop and params.logprobs is None,
        priority=call.head.priority,
        arrival=call.arrived,
        deadline=call.deadline,
    )
