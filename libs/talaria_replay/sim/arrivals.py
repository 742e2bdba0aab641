"""When sessions start: the paper does not say, so it is a choice of the scenario, and results are shown for several."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Annotated

import msgspec

from talaria_replay.ranges import Amount, Positive


class Bursts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every `every_s`, for `length_s`, sessions come `factor` times as often (1 or more)."""

    every_s: Positive
    length_s: Amount
    factor: Annotated[float, msgspec.Meta(ge=1)]


def offsets(*, stagger_s: float, sessions_per_s: float | None, bursts: Bursts | None, seed: int) -> Iterator[float]:
    """Seconds from the window's start at which sessions start, without end.

    Args:
        stagger_s: between two starts, when there is no rate.
        sessions_per_s: of a Poisson process; None: none.
        bursts: in which it is faster.
        seed: of the process.
    """
    if sessions_per_s is None:
        at = 0.0
        while True:
            yield at
            at += stagger_s
    rng = random.Random(f"arrivals/{seed}")  # noqa: S311 - repeatable on purpose
    peak = sessions_per_s * (bursts.factor if bursts else 1.0)
    at = 0.0
    while True:
        at += rng.expovariate(peak)
        slow = bursts is not None and at % bursts.every_s >= bursts.length_s
        if not slow or rng.random() * peak < sessions_per_s:
            yield at
