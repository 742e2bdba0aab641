"""How long sessions stay away between calls, learnt per class (tenant, model): the reservation timeout that suits it.

Beyond the paper, which sweeps one fixed tau (5.4): tools of one agent answer in tenths of a second, those of another
take several. The learnt tau is the shortest by which RETURNED of the returns within `most_s` have come. A fixed tau
stays the default and the fallback: until ENOUGH gaps were seen, and where few ever return in time, so that long leases
would only hold capacity.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable

ENOUGH = 30
RETURNED = 0.9
FEW = 0.3
"""Below this share of returns among completions a class is not worth more than the fixed tau."""
FORGET = 512.0
"""Weight of old gaps: counts are halved when they reach it."""
EDGES_S = tuple(0.05 * 1.25**k for k in range(32))
"""Upper edges of the histogram, 50 ms to 50 s."""


class _Class:
    __slots__ = ("completed", "counts", "seen")

    def __init__(self) -> None:
        self.counts = [0.0] * (len(EDGES_S) + 1)
        self.seen = 0.0
        self.completed = 0.0

    def halve(self) -> None:
        self.counts = [c / 2 for c in self.counts]
        self.seen /= 2
        self.completed /= 2


class Gaps:
    """Gaps by class. `fixed_s`: the configured tau; `most_s`: the longest that may be learnt, or 0 to learn nothing."""

    def __init__(self, fixed_s: float, most_s: float) -> None:
        self._fixed_s = fixed_s
        self._most_s = most_s
        self._classes: dict[Hashable, _Class] = {}

    def completed(self, of: Hashable) -> None:
        """A call of the class ended: its session may return."""
        if self._most_s > 0:
            self._class(of).completed += 1

    def returned(self, of: Hashable, gap_s: float) -> None:
        """A session of the class came back after `gap_s`."""
        if self._most_s <= 0:
            return
        found = self._class(of)
        found.counts[bisect_left(EDGES_S, gap_s)] += 1
        found.seen += 1
        if found.completed > FORGET:
            found.halve()

    def tau_s(self, of: Hashable) -> float:
        """The reservation timeout for the class, at most the larger of `fixed_s` and `most_s`."""
        found = self._classes.get(of)
        if found is None or found.seen < ENOUGH:
            return self._fixed_s
        within = bisect_left(EDGES_S, self._most_s)
        timely = sum(found.counts[: within + 1])
        if timely < FEW * max(found.completed, found.seen):
            return self._fixed_s
        below = 0.0
        for edge, count in zip(EDGES_S, found.counts, strict=False):
            below += count
            if below >= RETURNED * timely:
                return min(edge, self._most_s)
        return self._fixed_s

    def learnt(self) -> dict[Hashable, float]:
        """Tau of each class that was heard of."""
        return {of: self.tau_s(of) for of in self._classes}

    def _class(self, of: Hashable) -> _Class:
        found = self._classes.get(of)
        if found is None:
            found = self._classes[of] = _Class()
        return found
