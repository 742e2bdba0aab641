"""A link between host and device in virtual time: streams share its bandwidth evenly, each copies in order.

So it is on a real machine: a copy stream (or thread) per purpose, and one PCIe link beneath. The link knows no clock:
`advance` brings it up to a time, and whoever waits for a copy asks for its `eta`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

_EPS_BYTES = 0.5


class Transfer:
    """One copy."""

    __slots__ = ("began", "left", "on_done", "size")

    def __init__(self, size: int, began: float, on_done: Callable[[float], None]) -> None:
        self.size = size
        self.left = float(size)
        self.began = began
        self.on_done = on_done
        """Told when it is over, seconds; may put further copies."""


class Link:
    """Args: bytes_per_s; now: seconds; streams: names of its streams."""

    def __init__(self, bytes_per_s: float, now: float, *streams: str) -> None:
        self.bytes_per_s = bytes_per_s
        self._now = now
        self._queues: dict[str, deque[Transfer]] = {name: deque() for name in streams}
        self.backlog: dict[str, Callable[[], float]] = {}
        """Bytes that a stream will be given as soon as it is done with what it has, by stream."""

    def put(self, stream: str, size: int, now: float, on_done: Callable[[float], None]) -> Transfer:
        """Start a copy behind those of its stream."""
        self.advance(now)
        transfer = Transfer(size, max(now, self._now), on_done)
        self._queues[stream].append(transfer)
        return transfer

    def cancel(self, stream: str, transfer: Transfer) -> None:
        """It will not complete."""
        self._queues[stream].remove(transfer)

    def advance(self, now: float) -> None:
        """Everything that is over by `now` is told so, in order."""
        while self._now < now:
            active = [queue for queue in self._queues.values() if queue]
            if not active:
                self._now = now
                return
            rate = self.bytes_per_s / len(active)
            first = min(active, key=lambda queue: queue[0].left)[0]
            end = self._now + first.left / rate
            moved = first.left if end <= now else (now - self._now) * rate
            self._now = min(end, now)
            over = []
            for queue in active:
                queue[0].left -= moved
                if queue[0].left <= _EPS_BYTES:
                    over.append(queue.popleft())
            for transfer in over:
                transfer.on_done(self._now)

    @property
    def busy(self) -> bool:
        """Whether any copy is under way."""
        return any(self._queues.values())

    def eta(self, stream: str, upto: Transfer | None = None) -> float:
        """When the stream is done with `upto` (None: with all it has), if nothing more comes; -inf: it has nothing."""
        mine = 0.0
        for transfer in self._queues[stream]:
            mine += transfer.left
            if transfer is upto:
                break
        if not self._queues[stream]:
            return -math.inf
        others = 0.0
        for name, queue in self._queues.items():
            if name != stream:
                others += sum(t.left for t in queue) + (self.backlog[name]() if name in self.backlog else 0.0)
        return self._now + (mine + min(mine, others)) / self.bytes_per_s

    def finish(self, stream: str) -> float:
        """Bring the link up to the end of all that the stream has; returns that time, or -inf if it has nothing."""
        last = -math.inf
        while self._queues[stream]:
            last = self.eta(stream, self._queues[stream][0])
            self.advance(last + 1e-9)  # a nanosecond for rounding
        return last
