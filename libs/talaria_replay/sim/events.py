"""Virtual time: a clock that is set, and an event heap that sets it."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable


class VirtualClock:
    """A `talaria_common.clock.Clock` that jumps to the time of each event, exactly."""

    def __init__(self, start: float) -> None:
        self._now = start

    def now(self) -> float:
        """Seconds."""
        return self._now

    def set(self, at: float) -> None:
        """Go to `at`. Raises ValueError when that is back in time."""
        if at < self._now:
            raise ValueError(f"time does not go back from {self._now} to {at}")
        self._now = at


class Timer:
    """A handle of a scheduled action."""

    __slots__ = ("action",)

    def __init__(self, action: Callable[[], object]) -> None:
        self.action: Callable[[], object] | None = action

    def cancel(self) -> None:
        """It will not happen."""
        self.action = None


class EventHeap:
    """Actions by time; those of one time run in the order in which they were scheduled."""

    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock
        self.count = 0
        """Actions run."""
        self._heap: list[tuple[float, int, Timer]] = []
        self._serial = 0

    def at(self, when: float, action: Callable[[], object]) -> Timer:
        """Run `action` at `when`, seconds; a time that has passed means now."""
        self._serial += 1
        timer = Timer(action)
        heapq.heappush(self._heap, (max(when, self.clock.now()), self._serial, timer))
        return timer

    def after(self, delay_s: float, action: Callable[[], object]) -> Timer:
        """Run `action` so much later."""
        return self.at(self.clock.now() + delay_s, action)

    @property
    def head(self) -> float:
        """When the next action is due, cancelled ones included; inf: there is none."""
        return self._heap[0][0] if self._heap else math.inf

    def run(self, done: Callable[[], bool]) -> None:
        """Until `done()`, or nothing is left."""
        heap = self._heap
        while heap and not done():
            when, _, timer = heapq.heappop(heap)
            if timer.action is None:
                continue
            self.clock.set(when)
            self.count += 1
            timer.action()
