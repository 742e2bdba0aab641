"""Control verbs: health, open, close, drain, resume. A model can be opened if it is configured here.

open: ok if the model is open or is being opened from now on (the snapshot says `loading`, then `host`, or `failed`);
model_not_found if it is not configured, unavailable while the engine starts. close: ok if it is closed from now on;
unavailable while it has calls or is the active one; unsupported_parameter on a hot instance, which pins its model.
drain and resume: ok at once, also when repeated.
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
from talaria_common.wire.error import info_of
from talaria_gpu.engine.ipc import Close, Open
from talaria_instance.messages import Control


class Verdict(NamedTuple):
    """`drain`: True to drain, False to resume, None to leave it. `tell` is for the engine. `error` None: ok."""

    error: TalariaError | None = None
    drain: bool | None = None
    tell: Open | Close | None = None


class Standing(NamedTuple):
    """The instance as it stands: `models` are configured, `opened` are served by the engine, `busy` have calls."""

    status: str
    reason: str
    models: tuple[str, ...]
    opened: frozenset[str]
    busy: frozenset[str] = frozenset()
    """Active, or with calls."""
    pinned: bool = False
    """A hot instance."""


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
            wrong = _cannot(message.verb, model, it)
            if model is None or wrong is not None or (message.verb == "open" and model in it.opened):
                return Verdict(wrong)
            return Verdict(tell=Open(model=model) if message.verb == "open" else Close(model=model))
        case _:
            return Verdict(BadRequestError(f"unknown command {message.verb!r}"))


def _cannot(verb: str, model: str | None, it: Standing) -> TalariaError | None:
    """Why a model is not opened or closed."""
    if model is None:
        return BadRequestError(f"{verb} needs a model", param="model")
    if model not in it.models:
        return ModelNotFoundError(f"{model!r} is not configured on this instance", param="model")
    if verb == "close" and it.pinned:
        return UnsupportedError(f"{model!r} is pinned here by the configuration", param="model")
    if it.status not in {"ready", "draining"}:
        return UnavailableError(f"{model!r} is not open yet: {it.reason}")
    if verb == "close" and model in it.busy:
        return UnavailableError(f"{model!r} has calls here, or is the active model", param="model")
    return None


def reply(iid: str, epoch: str, status: str, verdict: Verdict) -> ControlReply:
    """The answer; `status` is the status after the command."""
    error = info_of(verdict.error) if verdict.error else None
    return ControlReply(ok=error is None, iid=iid, epoch=epoch, status=status, error=error)
