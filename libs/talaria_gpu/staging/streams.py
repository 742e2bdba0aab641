"""Copies in order, with completion events: CUDA streams on a GPU, threads that play them on a CPU (DESIGN 7).

On a CPU the copies are real and concurrent with computation, so what guards them is exercised; a bandwidth can be set,
and whatever is measured with one is to be called emulated.
"""

from __future__ import annotations

import ctypes
import queue
import threading
import time
from typing import Protocol

import torch

from talaria_common.errors import EngineError


class Event(Protocol):
    """The end of one copy."""

    def wait(self) -> None:
        """Block until the copy is over. Raises EngineError if it failed."""
        ...


class Stream(Protocol):
    """Copies one after the other, asynchronous to the caller."""

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: Event | None = None) -> Event:
        """Copy bytes once `after`, an event of another stream of the same kind, is over. Both uint8, of one size."""
        ...

    def close(self) -> None:
        """Finish what was asked for, then release the stream."""
        ...


class _HostEvent:
    def __init__(self) -> None:
        self._over = threading.Event()
        self._error: BaseException | None = None

    def set(self, error: BaseException | None) -> None:
        self._error = error
        self._over.set()

    def wait(self) -> None:
        self._over.wait()
        if self._error is not None:
            raise EngineError(f"a copy failed: {self._error}") from self._error


_Job = tuple[torch.Tensor, torch.Tensor, Event | None, _HostEvent]


class HostStream:
    """A thread that copies.

    Args:
        name: of the thread.
        bytes_per_s: emulated bandwidth; None: as fast as it goes.
    """

    def __init__(self, name: str, bytes_per_s: float | None = None) -> None:
        self._bytes_per_s = bytes_per_s
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: Event | None = None) -> Event:
        """See `Stream`."""
        event = _HostEvent()
        self._jobs.put((target, source, after, event))
        return event

    def close(self) -> None:
        """See `Stream`."""
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            target, source, after, event = job
            error: BaseException | None = None
            try:
                if after is not None:
                    after.wait()
                started = time.perf_counter()
                self.move(target, source)
                if self._bytes_per_s is not None:
                    left = target.numel() / self._bytes_per_s - (time.perf_counter() - started)
                    time.sleep(max(0.0, left))
            except Exception as e:  # noqa: BLE001 - whoever waits for the event gets it
                error = e
            event.set(error)

    def move(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """One copy. `memmove` lets other Python threads run, and needs no second team of OpenMP threads."""
        if target.numel() != source.numel() or not (target.is_contiguous() and source.is_contiguous()):
            raise ValueError("a copy needs two contiguous stretches of one size")
        ctypes.memmove(target.data_ptr(), source.data_ptr(), target.numel())


class CudaStream:
    """A CUDA stream of its own. Host memory should be page-locked, or copies from it are not asynchronous."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: Event | None = None) -> Event:
        """See `Stream`."""
        with torch.cuda.stream(self._stream):
            if isinstance(after, _CudaEvent):
                self._stream.wait_event(after.event)
            target.copy_(source, non_blocking=True)
            return _CudaEvent(self._stream.record_event())

    def close(self) -> None:
        """See `Stream`."""
        self._stream.synchronize()


class _CudaEvent:
    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def wait(self) -> None:
        try:
            self.event.synchronize()
        except RuntimeError as e:
            raise EngineError(f"a copy failed: {e}") from e


def open_stream(device: torch.device, name: str, bytes_per_s: float | None = None) -> Stream:
    """A stream of the device's kind. Bandwidths are emulated on CPUs only."""
    return CudaStream(device) if device.type == "cuda" else HostStream(name, bytes_per_s)


def computed(device: torch.device) -> Event | None:
    """An event for all that has been launched on the device so far; None where computation is synchronous."""
    if device.type != "cuda":
        return None
    return _CudaEvent(torch.cuda.current_stream(device).record_event())
