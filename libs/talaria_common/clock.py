"""Time, injected everywhere so that cores can be driven by tests and by the simulator.

One unit in all of Talaria: float seconds since the Unix epoch, UTC, that never go backwards. On the wire the same
instant travels as integer milliseconds (`*_ms`), see `to_ms` and `from_ms`.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A source of the current time."""

    def now(self) -> float:
        """Seconds since the Unix epoch (UTC), monotone within the process."""
        ...


class SystemClock:
    """The machine's UTC time, carried forward by the monotonic clock.

    A step of the wall clock (NTP, an operator) must not make deadlines jump while calls run, so the wall clock is
    read at construction and on `resync` only, and a resync never moves `now` backwards.
    """

    def __init__(self) -> None:
        self._offset = time.time() - time.monotonic()
        self._last = 0.0

    def now(self) -> float:
        """Seconds since the Unix epoch (UTC), monotone within the process."""
        self._last = max(self._last, time.monotonic() + self._offset)
        return self._last

    def resync(self) -> float:
        """Follow the wall clock again; returns how far it had moved against us, in seconds."""
        moved = time.time() - time.monotonic() - self._offset
        self._offset += moved
        return moved


class ManualClock:
    """A clock that stands still until told: for tests and for the simulator."""

    def __init__(self, start: float = 1_700_000_000.0) -> None:
        self._now = start

    def now(self) -> float:
        """The time last set."""
        return self._now

    def advance(self, seconds: float) -> float:
        """Move forward by `seconds` (>= 0) and return the new time."""
        if seconds < 0:
            raise ValueError(f"time does not go backwards: advance({seconds})")
        self._now += seconds
        return self._now


def to_ms(seconds: float) -> int:
    """Wire form of an instant or a duration: integer milliseconds."""
    return round(seconds * 1000)


def from_ms(ms: int) -> float:
    """Float seconds of a wire instant or duration."""
    return ms / 1000
