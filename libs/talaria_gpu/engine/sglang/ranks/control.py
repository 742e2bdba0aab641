"""What goes over the socket between rank 0 and another: orders one way, what came of them the other way."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from talaria_common.errors import TalariaError
from talaria_gpu.engine.contract import StepResult


@dataclass(frozen=True, slots=True)
class Join:
    """The first order: become a rank."""

    rank: int
    size: int
    directory: str
    """Where the ranks meet."""
    engine: dict[str, Any]
    """The arguments of `SglangEngine`, all but `progress` and `ranks`."""


class Order(NamedTuple):
    """Call a method of the engine."""

    method: str
    arguments: tuple[Any, ...]
    answered: bool = True
    """Whether an outcome is sent."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of an order."""

    value: Any = None
    refusal: str = ""
    """Class of the error with which the engine refused; "" if it did not. Ranks refuse alike."""
    failure: str = ""
    """Why the rank ends; "" if it does not."""
    notes: dict[str, Any] = field(default_factory=dict)


def digest(method: str, value: Any) -> Any:
    """What of a result all ranks must have alike: for a step all that calls are told, for the rest nothing."""
    if method == "step" and isinstance(value, StepResult):
        told = tuple((t.rid, tuple(t.token_ids), t.finished, t.cached_tokens, t.prefilled_tokens) for t in value.tokens)
        return value.kind, value.batch, told
    return None


def refusal_of(error: TalariaError) -> str:
    """A refusal as it is compared between ranks."""
    return type(error).__name__
