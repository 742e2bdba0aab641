"""Nearest-rank percentiles, as the paper defines them (5.1), and sampling from published quantiles."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence


def nearest_rank(values: Sequence[float], percent: float) -> float:
    """The observation at rank ceil(percent * N / 100), from 1. Raises ValueError on no values."""
    if not values:
        raise ValueError("no observations")
    ordered = sorted(values)
    return ordered[max(0, math.ceil(percent * len(ordered) / 100) - 1)]


class QuantileTable:
    """An inverse distribution function through known quantiles, log-linear in between.

    What is known of a real trace is often a handful of its percentiles; this samples from just those, without
    pretending to a parametric family. Values below 1 are taken as 1 on the logarithmic scale.

    Args:
        points: (percent, value), percents rising from 0 to 100, values not falling.
    """

    def __init__(self, points: Sequence[tuple[float, float]]) -> None:
        percents = [p for p, _ in points]
        values = [v for _, v in points]
        if percents[0] != 0 or percents[-1] != 100 or percents != sorted(percents) or values != sorted(values):
            raise ValueError(f"percents must rise from 0 to 100 and values must not fall: {points}")
        self._percents = percents
        self._logs = [math.log(max(v, 1e-3)) for v in values]

    def at(self, u: float) -> float:
        """The value at probability `u` in [0, 1)."""
        percent = u * 100
        i = min(bisect_right(self._percents, percent), len(self._percents) - 1)
        low, high = self._percents[i - 1], self._percents[i]
        share = (percent - low) / (high - low) if high > low else 0.0
        return math.exp(self._logs[i - 1] + share * (self._logs[i] - self._logs[i - 1]))
