"""Writes the next model's chunks while calls run, and gives pages back when they need them (4.4).

One thread per staging feeds the copy stream, a few chunks at a time. A chunk is clean only once its copy's event is
over, so nothing staged is read before. Pages come back through `reclaim`, which the KV allocator calls on the engine's
thread: it waits for chunks being written there, which is one or two chunks' time on the link.
"""

from __future__ import annotations

import threading
import time
from collections import deque

import torch

from talaria_common.errors import EngineError
from talaria_gpu.staging.chunks import ChunkMap, State
from talaria_gpu.staging.plan import StagePlan, SwitchPlan
from talaria_gpu.streams import Event, Stream

DEPTH = 2
"""Chunks in flight: the link does not idle between two of them."""


class Stager:
    """One staging of one model, from its start to the switch.

    Args:
        model: whose weights.
        plan: where to.
        stream: copies host to device.
        buffer: the device buffer, uint8.
        image: the model's host image, uint8; must stay until `join` has returned.
        ready: what was launched on the device before the pages were leased; the first chunk waits for it.
    """

    def __init__(
        self,
        model: str,
        plan: StagePlan,
        stream: Stream,
        *,
        buffer: torch.Tensor,
        image: torch.Tensor,
        ready: Event | None = None,
    ) -> None:
        self.model = model
        self.chunks = ChunkMap(plan)
        self.error: str | None = None
        """Why it gave up; what is clean stays so."""
        self.waited_ms = 0.0
        """Time that calls had to wait for pages."""
        self._buffer, self._image, self._stream, self._ready = buffer, image, stream, ready
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name=f"stage-{model}", daemon=True)

    def start(self) -> None:
        """Begin to write; the plan's pages must have been leased."""
        self._thread.start()

    def reclaim(self, page: int) -> None:
        """Calls are about to take pages below `page`. Returns when nothing is being written there any more."""
        started = time.perf_counter()
        with self._changed:
            self.chunks.bar(page)
            self._changed.wait_for(lambda: not self.chunks.is_writing_below(page))
            self.chunks.reclaim(page)
        self.waited_ms += (time.perf_counter() - started) * 1e3

    def stop(self) -> None:
        """Begin no more chunks; what is in flight may still land."""
        with self._changed:
            self.chunks.stop()

    def join(self) -> None:
        """Wait until all is written that can be: after `stop`, what is in flight. The chunks do not change then."""
        self._thread.join()

    def bytes_in(self, state: State) -> int:
        """See `ChunkMap`."""
        with self._changed:
            return self.chunks.bytes_in(state)

    def switch_plan(self, chunk_bytes: int) -> SwitchPlan:
        """The copies of a switch to this model; after `join`."""
        if self._thread.is_alive():
            raise EngineError("a switch was planned while weights are still being staged")
        return self.chunks.switch_plan(chunk_bytes)

    def _run(self) -> None:
        flying: deque[tuple[int, Event]] = deque()
        while True:
            with self._changed:
                index = self.chunks.begin() if self.error is None and len(flying) < DEPTH else None
            if index is not None:
                event = self._launch(index)
                if event is not None:
                    flying.append((index, event))
            elif flying:
                self._land(*flying.popleft())
            else:
                return

    def _launch(self, index: int) -> Event | None:
        source, target, size, _ = self.chunks.plan.chunks[index]
        place, image = self._buffer[source : source + size], self._image[target : target + size]
        try:
            event = self._stream.copy(place, image, self._ready)
        except Exception as e:  # noqa: BLE001 - whoever waits for the chunk's pages must hear of it, whatever it is
            self._over(index, str(e))
            return None
        self._ready = None  # later copies of the stream come after the first
        return event

    def _land(self, index: int, event: Event) -> None:
        failure: str | None = None
        try:
            event.result()
        except Exception as e:  # noqa: BLE001 - as above
            failure = str(e)
        self._over(index, failure)

    def _over(self, index: int, failure: str | None) -> None:
        with self._changed:
            if failure is None:
                self.chunks.written(index)
            else:
                self.chunks.failed(index)
                self.error = failure
            self._changed.notify_all()
