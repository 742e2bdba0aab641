"""The engine contract: what a model executor offers and owes (DESIGN 8).

An `Engine` executes; it decides nothing about whose turn it is. The slot driver (`engine.driver`) asks the pure
scheduler in `talaria_gpu.sched` which model is active and which waiting calls may prefill, and steps the engine. All
calls come from one thread. Token ids only: text is handled in `talaria_gpu.text`, in another process.

Two implementations: `engine.sglang` (real SGLang) and `engine.sim` (a device model on a clock).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol

import msgspec

from talaria_common.errors import EngineError

CacheSource = Literal["none", "device", "host"]


class Sampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How to pick tokens. Greedy when `temperature` is 0. `seed` makes sampling repeatable on one engine build."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logprobs: int | None = None
    """Number of alternatives to report per token; None: no log probabilities."""


class EngineCall(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One call, tokenised. `rid` is unique per (request, attempt) within the engine."""

    rid: str
    model: str
    input_ids: Sequence[int]
    """A list or an `array`; the engine process gets an array, of any unsigned type."""
    sampling: Sampling
    session: str = ""
    """Session key (hashed); "" when unknown."""
    salt: str = ""
    """Tenant salt: prefixes are shared only within one salt (a prefix timing leak across tenants otherwise)."""
    is_continuation: bool = False
    whole: bool = False
    """Nobody reads its tokens as they come: they may be reported together, soon after they were made."""
    priority: int = 0
    arrival: float = 0.0
    """Seconds, the instance's clock."""
    deadline: float = 0.0
    """Seconds; 0: none. Past it the call is aborted with finish reason "deadline"."""


class StepTokens(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """New tokens of one call from one step.

    `logprobs[i]` and `top[i]` ((token id, logprob) pairs) belong to `token_ids[i]`, when asked for.
    """

    rid: str
    token_ids: list[int]
    logprobs: list[float] = []
    top: list[list[tuple[int, float]]] = []
    cached_tokens: int = 0
    """Prompt tokens that were not prefilled; meaningful from the first token on."""
    cache_source: CacheSource = "none"
    prefilled_tokens: int = 0
    """Prompt tokens computed for this call so far, each counted once; cached + prefilled = prompt from the first token
    on (engines that count)."""
    recomputed_tokens: int = 0
    """Tokens computed again because the call was retracted; in neither of the two."""
    finished: Literal["", "stop", "length", "abort", "deadline", "error"] = ""
    """stop: EOS or a stop token (which is not in `token_ids`); error: see `message`."""
    message: str = ""


def join_steps(first: StepTokens, then: StepTokens) -> StepTokens | None:
    """Two steps of one call as one; None where they have to stay apart (log probabilities, or an end in the first)."""
    if first.finished or first.logprobs or then.logprobs:
        return None
    figures = then if then.token_ids else first  # an end without a token says nothing of the prompt
    return StepTokens(
        rid=then.rid,
        token_ids=first.token_ids + then.token_ids,
        cached_tokens=figures.cached_tokens,
        cache_source=figures.cache_source,
        prefilled_tokens=figures.prefilled_tokens,
        recomputed_tokens=figures.recomputed_tokens,
        finished=then.finished,
        message=then.message,
    )


class StepResult(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one step did. kind "idle": there was nothing to run."""

    kind: Literal["prefill", "decode", "idle"]
    tokens: list[StepTokens] = []
    prefilled_tokens: int = 0
    """Prompt tokens computed in this step for the first time, counted in the engine."""
    recomputed_tokens: int = 0
    """Tokens computed in this step that had been computed before their call was retracted."""
    batch: int = 0
    """Calls in the step's batch."""
    steps: int = 1
    """Decode iterations that this result stands for (the sim engine in virtual time takes many at once)."""
    wall_ms: float = 0.0
    restored_tokens: int = 0
    """Tokens whose KV came back from host for this step's calls."""
    restore_ms: float = 0.0
    """What that, or waiting for copies, took of `wall_ms`."""
    half: str = ""
    """The call whose prompt is prefilled in part after this step, and goes on in a later one; "" if there is none."""


class PrefixState(NamedTuple):
    """How much of a call's prompt need not be prefilled if it started now, in tokens."""

    device: int = 0
    host: int = 0
    """Beyond `device`: restorable from host."""


class SwitchTiming(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One SWITCH_TIMING record of one rank (appendix D): five phases, path class and bytes."""

    rank: int = 0
    source: str = ""
    target: str
    path: Literal["none", "d2d", "partial", "h2d"] = "h2d"
    phases_ms: tuple[float, float, float, float, float]
    """save and teardown, open weights, KV shell, runtime and graphs, publish."""
    total_ms: float
    weight_bytes: int
    d2d_bytes: int = 0
    h2d_bytes: int = 0
    retracted: int = 0
    """Calls that were decoding when the slot ended and will be prefilled again."""
    suspended: int = 0
    """Calls that were decoding and will go on where they were."""
    dirty_bytes: int = 0
    """Of `h2d_bytes`: staged, then overwritten by KV."""
    missing_bytes: int = 0
    """Of `h2d_bytes`: never staged."""
    d2d_ms: float = 0.0
    """From the start of the weights' copies until those within the device were over."""
    h2d_ms: float = 0.0
    """The same for those from host, which run beside them."""
    canary: bool = False
    """Whether the golden-token canary ran."""
    ranks: tuple[SwitchTiming, ...] = ()
    """With several ranks, each one's record: this is the logical switch then. See `logical_switch`."""


def logical_switch(ranks: Sequence[SwitchTiming]) -> SwitchTiming:
    """One record for a switch of several ranks: of each time the slowest rank's, of bytes the sum, calls as of rank 0.

    Every rank's record is kept in `ranks`. One rank's is returned as it is.
    """
    first = ranks[0]
    if len(ranks) == 1:
        return first
    slowest = max(ranks, key=lambda timing: timing.total_ms)
    a, b, c, d, e = (max(timing.phases_ms[i] for timing in ranks) for i in range(5))
    d2d, h2d = sum(timing.d2d_bytes for timing in ranks), sum(timing.h2d_bytes for timing in ranks)
    path = first.path if first.path == "none" else "d2d" if not h2d else "partial" if d2d else "h2d"
    return msgspec.structs.replace(
        first,
        path=path,
        phases_ms=(a, b, c, d, e),
        total_ms=slowest.total_ms,
        weight_bytes=sum(timing.weight_bytes for timing in ranks),
        d2d_bytes=d2d,
        h2d_bytes=h2d,
        dirty_bytes=sum(timing.dirty_bytes for timing in ranks),
        missing_bytes=sum(timing.missing_bytes for timing in ranks),
        d2d_ms=max(timing.d2d_ms for timing in ranks),
        h2d_ms=max(timing.h2d_ms for timing in ranks),
        ranks=tuple(ranks),
    )


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A model as the engine holds it."""

    name: str
    context_tokens: int
    kv_capacity_tokens: int
    weight_bytes: int
    kv_bytes_per_token: int
    max_running: int
    """Calls in one batch."""
    eos_token_ids: tuple[int, ...] = ()
    vocab_size: int = 0


class ModelLoad(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A model's load right now."""

    waiting: int
    running: int
    waiting_tokens: int
    kv_used_tokens: int
    """Device rows held by running calls and by cached prefixes."""
    kv_epoch: int
    cached_sessions: int = 0
    host_kv_tokens: int = 0
    """Tokens of prefixes in host memory."""
    restore_ms_per_token: float = 0.0
    """Measured, EWMA; 0 while nothing was."""
    kv_held_tokens: int = 0
    """Of `kv_used_tokens`: what cannot be evicted, for calls need it."""


class Staged(NamedTuple):
    """What lies staged on the device now (3.5), of one rank."""

    model: str = ""
    """"": nothing is being staged."""
    bytes: int = 0
    """Of its weights; what was staged and overwritten since does not count."""


class HostKvFigures(NamedTuple):
    """KV kept on the host (4.3), of one rank. Counts are since the engine was made; what ranks agree on is alike."""

    capacity_bytes: int = 0
    taken_bytes: int = 0
    blocks: int = 0
    d2h_bytes: int = 0
    h2d_bytes: int = 0
    saved: int = 0
    """Blocks, like what follows, unless it says otherwise."""
    restored: int = 0
    restored_tokens: int = 0
    evicted: int = 0
    refused: int = 0
    """Not saved: there was no room."""
    corrupt: int = 0
    """Restores cut short by a checksum that differed; the rest was computed."""
    disagreed: int = 0
    """Prefixes cut short because not all ranks had the same; the rest was computed."""
    failed: int = 0
    """Saved blocks, or restores, whose copy did not complete."""
    moved: int = 0
    """To make room."""


class SwitchFailedError(EngineError):
    """A switch failed and was rolled back: `model` could not be opened, `active` is what serves now (None: nothing)."""

    def __init__(self, model: str, active: str | None, reason: str) -> None:
        super().__init__(f"the switch to {model} failed: {reason}")
        self.model = model
        self.active = active


class Engine(Protocol):
    """Executor of several models over one device buffer. Not thread-safe: one caller."""

    def models(self) -> dict[str, ModelInfo]:
        """The open models by name."""
        ...

    @property
    def buffer_bytes(self) -> int:
        """Size of the device buffer."""
        ...

    @property
    def active(self) -> str | None:
        """The model whose weights are in the device buffer; None before the first switch."""
        ...

    def submit(self, call: EngineCall) -> None:
        """Queue a call with its model, active or not.

        Raises:
            ContextLengthError: it can never fit; nothing was queued.
            ModelNotFoundError: the model is not open.
        """
        ...

    def abort(self, rid: str) -> bool:
        """Drop a call, waiting, running or parked; frees its slot and KV by the end of the next step of its model.

        The engine sends no further token of it. False if it is unknown (finished already: no error).
        """
        ...

    def waiting(self, model: str) -> list[str]:
        """Rids whose prefill is not complete, in arrival order; retracted calls stand first.

        A call whose prompt takes several steps stands before them until its last chunk; `step` goes on with it whenever
        it admits anything, and pauses it with an empty `admit`.
        """
        ...

    def prefix_state(self, rid: str) -> PrefixState:
        """What a waiting call would find cached; zeros if the call is unknown. It locks nothing."""
        ...

    def step(self, admit: frozenset[str] | None) -> StepResult:
        """One batch of the active model: a prefill of waiting calls in `admit` that fit (None: any), else one decode.

        Never blocks longer than the batch runs.
        """
        ...

    def has_unfinished(self, model: str) -> bool:
        """Whether the model has calls waiting, running or parked."""
        ...

    def running(self, model: str) -> int:
        """Calls of the model that hold device KV now."""
        ...

    def switch(self, model: str) -> SwitchTiming:
        """Make `model` active, taking the outgoing model's calls and prefixes off the device.

        What still decodes is suspended, and goes on where it was when its model is active again; or, where the engine
        keeps no KV or has no room for it, retracted: it waits again, tokens kept. The outgoing model's kv_epoch rises
        unless the prefixes that the device loses can be restored. Device addresses are compared with those at opening;
        a difference raises EngineError, and the engine must not be used any more.

        Raises:
            SwitchFailedError: the weights could not be brought in; the engine serves on as the error says.
            EngineError: the engine must not be used any more.
        """
        ...

    def stage(self, model: str) -> None:
        """`model` is likely to be next: bring its weights close while the active model runs, as far as there is room.

        May be called again and again. A no-op for the active model, and where nothing is staged.
        """
        ...

    @property
    def staging_slack_bytes(self) -> int:
        """Bytes that a next model's weights could take now without evicting KV (3.5); 0 where nothing is staged."""
        ...

    @property
    def staged(self) -> Staged:
        """What a switch would find staged if it came now."""
        ...

    @property
    def host_kv(self) -> HostKvFigures | None:
        """Totals of the KV on the host; None: none is kept there."""
        ...

    def open_model(self, model: str) -> bool:
        """Open a configured model that is closed. Returns False while its files are being read: ask again.

        A call for it is refused until this has returned True; then it is one switch away.

        Raises:
            ModelNotFoundError: it is not configured.
            EngineError: this model cannot be opened; the others serve on.
        """
        ...

    def close_model(self, model: str) -> None:
        """Close an open model without unfinished calls; its memory is free when this returns.

        Raises:
            ModelNotFoundError: it is not open.
            BadRequestError: it has unfinished calls.
        """
        ...

    def load(self, model: str) -> ModelLoad:
        """Current load of one model."""
        ...

    def check_idle(self) -> None:
        """Assert, when nothing is unfinished, that no slot, row or lock has leaked.

        Raises:
            EngineError: names what leaked.
        """
        ...

    def next_event_in(self) -> float | None:
        """Seconds until `step` has something to do though it was idle (sim engine); None: nothing pending."""
        ...

    def close(self) -> None:
        """Release everything."""
        ...
