"""Control verbs: health, open, close, drain, resume. Models are pinned by configuration for now.

open: ok if the model is configured here and the engine serves it; else model_not_found, or unavailable while it starts.
close: refused (unsupported_parameter); a configured model stays. drain and resume: ok at once, also when repeated.
"""

from __future__ import annotations

from typing import NamedTuple

from talaria_common.clock import from_ms
from talaria_common.errors import (
    BadRequestError,
    DeadlineError,
    ModelNotFoundError,
    TalariaError,
    UnavailableError,
    UnsupportedError,
)
from talaria_common.wire import ControlReply
from talaria_instance.messages import Control


class Verdict(NamedTuple):
    """`drain`: True to drain, False to resume, None to leave it. `error` None: ok."""

    error: TalariaError | None = None
    drain: bool | None = None


class Standing(NamedTuple):
    """The instance as it stands: `models` are configured, `opened` are served by the engine."""

    status: str
    reason: str
    models: tuple[str, ...]
    opened: frozenset[str]


def decide(now: float, message: Control, it: Standing, skew_s: float) -> Verdict:
    """What to make of a command."""
    deadline_ms, model = message.request.deadline_ms, message.request.model
    if deadline_ms and now > from_ms(deadline_ms) + skew_s:
        return Verdict(DeadlineError(f"the command {message.verb} came after its deadline"))
    match message.verb:
        case "health":
            return Verdict() if it.status == "ready" else Verdict(UnavailableError(f"{it.status}: {it.reason}"))
        case "drain" | "resume":
            return Verdict(drain=message.verb == "drain")
        case "open" | "close":
            return Verdict(_open_or_close(message.verb, model, it))
        case _:
            return Verdict(BadRequestError(f"unknown command {message.verb!r}"))


def _open_or_close(verb: str, model: str | None, it: Standing) -> TalariaError | None:
    if model is None:
        return BadRequestError(f"{verb} needs a model", param="model")
    if model not in it.models:
        return ModelNotFoundError(f"{model!r} is not configured on this instance", param="model")
    if verb == "close":
        return UnsupportedError(f"{model!r} is pinned here by the configuration", param="model")
    return None if model in it.opened else UnavailableError(f"{model!r} is not open yet: {it.reason}")


def reply(iid: str, epoch: str, status: str, verdict: Verdict) -> ControlReply:
    """The answer; `status` is the status after the command."""
    error = verdict.error.info() if verdict.error else None
    return ControlReply(ok=error is None, iid=iid, epoch=epoch, status=status, error=error)
