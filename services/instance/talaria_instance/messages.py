"""What the instance core is told, and what it asks its shell to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from talaria_common.wire import Cancel, ControlRequest, ForwardHead
from talaria_common.wire.error import ErrorInfo
from talaria_gpu.engine.ipc import Command, Report

Handle = Any
"""Whom to answer; the core only hands it back."""


class CallKey(NamedTuple):
    """One attempt of one call."""

    rid: str
    attempt: int

    @property
    def engine_rid(self) -> str:
        """Its name in the engine, which knows no attempts."""
        return f"{self.rid}.{self.attempt}"


@dataclass(frozen=True, slots=True)
class Params:
    """What the body asks for beside the prompt. `max_tokens` None: the rest of the context."""

    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    """Alternatives per token; None: no log probabilities."""
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    ignore_eos: bool = False
    return_token_ids: bool = False
    max_tokens_field: str = "max_tokens"
    """Under which name it was given, for errors."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A body after tokenising. `text_bytes` is UTF-8 bytes of prompt text."""

    input_ids: Sequence[int]
    params: Params
    text_bytes: int


# --- told


@dataclass(frozen=True, slots=True)
class Forward:
    """A call arrived."""

    handle: Handle
    head: ForwardHead
    body: bytes
    trace: str = ""
    """W3C traceparent, for logs."""


@dataclass(frozen=True, slots=True)
class CancelCall:
    """An api gave up on a call."""

    cancel: Cancel


@dataclass(frozen=True, slots=True)
class ApiGone:
    """Nobody listens under this api's name any more."""

    api: str


@dataclass(frozen=True, slots=True)
class Control:
    """health, open, close, drain or resume."""

    handle: Handle
    verb: str
    request: ControlRequest


@dataclass(frozen=True, slots=True)
class Prepared:
    """A body was tokenised, as `Prepare` asked."""

    key: CallKey
    prompt: Prompt


@dataclass(frozen=True, slots=True)
class PrepareFailed:
    """A body could not be tokenised."""

    key: CallKey
    error: ErrorInfo


@dataclass(frozen=True, slots=True)
class EngineStarting:
    """The engine process of this generation was started."""

    generation: int


@dataclass(frozen=True, slots=True)
class EngineSaid:
    """The engine process reported, once or more often since we last looked. Of an older generation: ignored.

    `Ready` comes here when the models' tokenizers are loaded, and nothing of that engine before it but `Progress`.
    """

    generation: int
    reports: Sequence[Report]


@dataclass(frozen=True, slots=True)
class EngineExited:
    """The engine process is gone."""

    generation: int
    reason: str


@dataclass(frozen=True, slots=True)
class Tick:
    """A heartbeat. `engine_cpu_s`: CPU time that the engine process has used so far; None where it is not known."""

    engine_cpu_s: float | None = None


@dataclass(frozen=True, slots=True)
class Announce:
    """Publish a snapshot now (the bus is there again)."""


@dataclass(frozen=True, slots=True)
class Shutdown:
    """Take no new calls; those that run may finish. `now` is true when their time is over."""

    now: bool = False


Message = (
    Forward
    | CancelCall
    | ApiGone
    | Control
    | Prepared
    | PrepareFailed
    | EngineStarting
    | EngineSaid
    | EngineExited
    | Tick
    | Announce
    | Shutdown
)


# --- asked for


@dataclass(frozen=True, slots=True)
class Answer:
    """Reply to a request."""

    handle: Handle
    message: msgspec.Struct


@dataclass(frozen=True, slots=True)
class Publish:
    """Send a message on the bus; in the order given."""

    subject: str
    message: msgspec.Struct


@dataclass(frozen=True, slots=True)
class Prepare:
    """Tokenise a body; come back with `Prepared` or `PrepareFailed`."""

    key: CallKey
    head: ForwardHead
    body: bytes


@dataclass(frozen=True, slots=True)
class Tell:
    """Send a command to the engine process."""

    command: Command


@dataclass(frozen=True, slots=True)
class StartEngine:
    """Start the engine process after `delay_s`, then say `EngineStarting`."""

    generation: int
    delay_s: float


@dataclass(frozen=True, slots=True)
class KillEngine:
    """SIGKILL the engine process of this generation."""

    generation: int


Effect = Answer | Publish | Prepare | Tell | StartEngine | KillEngine
