"""A call on its way: forward, cancel, token frames and the completion hook (DESIGN 4, steps 3 to 5)."""

from __future__ import annotations

from typing import Literal

from talaria_common.wire.base import Float, Int, Name, Wire
from talaria_common.wire.error import ErrorInfo
from talaria_common.wire.route import Placement

Endpoint = Literal["chat", "completions"]
CacheSource = Literal["none", "device", "host"]
FinishReason = Literal["stop", "length", "abort"]


class ForwardHead(Wire, frozen=True, kw_only=True):
    """Travels in the bus header `Talaria-Forward`; the payload is the HTTP body, byte for byte."""

    placement: Placement
    endpoint: Endpoint
    api: Name
    api_epoch: str
    tenant: str
    session: str
    model: str
    session_final: bool = False
    priority: Int = 0
    stream: bool = True
    """False: nobody reads deltas, so the final frame carries everything."""
    is_continuation: bool = False
    """The router has seen this session on this model before."""


class ForwardReply(Wire, frozen=True, kw_only=True):
    """accepted, or rejected with the reason. A `retryable` rejection is placed elsewhere by the api."""

    accepted: bool
    epoch: str = ""
    """The instance's epoch: frames of another epoch are not of this acceptance."""
    error: ErrorInfo | None = None
    retryable: bool = False


class Cancel(Wire, frozen=True, kw_only=True):
    """Stop (rid, attempt) at the next decode boundary and free its slot and KV. Unknown ids are ignored."""

    rid: str
    attempt: Int
    reason: Literal["client_gone", "deadline", "superseded", "slow_client"] = "client_gone"


class TokenLogprob(Wire, frozen=True, kw_only=True):
    """One token with its log probability, OpenAI's shape."""

    token: str
    logprob: float
    bytes: list[int]
    top: list[TokenLogprob] = []


class Usage(Wire, frozen=True, kw_only=True):
    """Token counts of a finished call."""

    prompt_tokens: Int
    completion_tokens: Int
    cached_tokens: Int = 0
    cache_source: CacheSource = "none"


class Frame(Wire, frozen=True, kw_only=True):
    """One step of one call. `seq` counts from 0 within (rid, attempt); a gap ends the stream with an error.

    kind "delta": `text` (may be empty while a character is incomplete) of `token_ids`.
    kind "final": finish_reason and usage; may carry last text. Nothing follows.
    kind "error": `error`; `retryable` if no token was sent and another instance may serve it. Nothing follows.
    """

    rid: str
    attempt: int
    seq: int
    kind: Literal["delta", "final", "error"]
    text: str = ""
    token_ids: list[int] = []
    logprobs: list[TokenLogprob] = []
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    error: ErrorInfo | None = None
    retryable: bool = False
    prompt_token_ids: list[int] = []
    """In the first frame of a call that asked for `return_token_ids`."""
    cache_source: CacheSource = "none"
    """In the first delta: for the header X-Talaria-Cache."""


class TokenBatch(Wire, frozen=True, kw_only=True):
    """Everything one instance has for one api at one moment.

    `alive`, each heartbeat: the rids of this api that live here. A call that the api believes here and that is not in
    it, is lost. No batch within three heartbeats: the instance is taken for dead.
    """

    iid: str
    epoch: str
    frames: list[Frame] = []
    alive: list[str] | None = None


class Completion(Wire, frozen=True, kw_only=True):
    """The completion hook: published once per accepted (rid, attempt) that ends, however it ends."""

    iid: str
    epoch: str
    rid: str
    attempt: Int
    router: str
    router_epoch: str = ""
    seq: Int
    """The placement's number, so that the overlay drops exactly this call."""
    partition: Int
    tenant: str
    session: str
    model: str
    session_final: bool = False
    ok: bool
    """False: aborted or failed; no lease follows."""
    prompt_tokens: Int = 0
    completion_tokens: Int = 0
    cached_tokens: Int = 0
    cache_source: CacheSource = "none"
    prompt_bytes: Int = 0
    kv_tokens: Int = 0
    """Tokens of the session's prefix that are reusable now, on device or host."""
    prefix_handle: str = ""
    """Opaque; valid while the model's `kv_epoch` in the snapshot is the one it was made under."""
    kv_epoch: Int = 0
    queue_ms: Float = 0.0
    prefill_ms: Float = 0.0
    ttft_ms: Float = 0.0
    total_ms: Float = 0.0
    at_ms: Int
