"""When a part that died is started again."""

from __future__ import annotations

from dataclasses import dataclass

FIRST_S = 0.5
LONGEST_S = 10.0
STEADY_S = 30.0
"""A life this long that had been ready wipes the slate clean."""
TRIES = 4
"""Deaths in a row without ever having been ready, after which starting it again is no use."""


@dataclass(slots=True)
class Backoff:
    """The deaths of one part. Doubling pauses; gives up only on what has never worked."""

    deaths: int = 0
    ever_ready: bool = False

    def died(self, lived_s: float, was_ready: bool) -> float | None:
        """Seconds to wait before the next start, or None: give up.

        Args:
            lived_s: how long the process ran.
            was_ready: whether it was ready at any time in that life.
        """
        if was_ready:
            self.ever_ready = True
            if lived_s >= STEADY_S:
                self.deaths = 0
        self.deaths += 1
        if not self.ever_ready and self.deaths >= TRIES:
            return None
        return min(LONGEST_S, FIRST_S * 2.0 ** (self.deaths - 1))
