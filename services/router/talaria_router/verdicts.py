"""The refusals of the router, in words for the person who reads them (DESIGN 10)."""

from __future__ import annotations

from collections import Counter

from talaria_common.errors import DeadlineError, ModelNotFoundError, OverloadedError, UnavailableError
from talaria_common.wire import Verdict
from talaria_common.wire.error import info_of


def not_owner(partition: int) -> Verdict:
    """The partition has moved: ask again."""
    return Verdict(
        reason="not_owner",
        error=info_of(UnavailableError(f"partition {partition} is not this router's", retry_after_s=1)),
    )


def expired(why: str) -> Verdict:
    """Too late, or not the latest attempt."""
    return Verdict(reason="expired", error=info_of(DeadlineError(why)))


def unknown_model(model: str, known: list[str]) -> Verdict:
    """Not in the catalog."""
    there = f"; there are: {', '.join(known)}" if known else ""
    return Verdict(
        reason="unknown_model",
        error=info_of(ModelNotFoundError(f"the model {model!r} does not exist{there}", param="model")),
    )


def no_instance(model: str, reasons: Counter[str]) -> Verdict:
    """In the catalog, but nobody who serves it is fit to."""
    return Verdict(
        reason="no_instance",
        error=info_of(UnavailableError(f"no instance can serve {model!r} now ({_counted(reasons)})", retry_after_s=1)),
    )


def overloaded(model: str, reasons: Counter[str], retry_after_s: float) -> Verdict:
    """All who serve it are full."""
    message = f"all instances that serve {model!r} are full ({_counted(reasons)})"
    return Verdict(reason="overloaded", error=info_of(OverloadedError(message, retry_after_s=retry_after_s)))


def tenant_limit(tenant: str, limit: int, retry_after_s: float) -> Verdict:
    """The tenant has as many calls in flight as it may."""
    message = f"tenant {tenant!r} has {limit} calls in flight, which is its limit"
    return Verdict(reason="overloaded", error=info_of(OverloadedError(message, retry_after_s=retry_after_s)))


def queue_share(tenant: str, retry_after_s: float) -> Verdict:
    """The call waited on a place that another tenant has a right to."""
    message = f"the queue is full, and tenant {tenant!r} had more than its share of it"
    return Verdict(reason="overloaded", error=info_of(OverloadedError(message, retry_after_s=retry_after_s)))


def _counted(reasons: Counter[str]) -> str:
    return ", ".join(f"{n} {reason}" for reason, n in sorted(reasons.items())) or "none is known"
