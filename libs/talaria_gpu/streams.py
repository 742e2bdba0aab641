"""Copies beside the computation, in order, each with an end to wait for (DESIGN 7).

On a CPU a thread plays the stream, so that whatever guards copies is exercised by real concurrency. A bandwidth may be
given there; then a copy takes at least as long as it would at that bandwidth, and what is measured is emulated.
On CUDA plain copies go to a stream of their own; what has a part on the CPU, too (checksums), to a thread with one.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Protocol

import torch

from talaria_common.errors import EngineError


class Event(Protocol):
    """The end of one copy."""

    def result(self) -> None:
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


class Transfer:
    """Work of a `CopyThread`. `error` and `ms` mean something once it is done."""

    def __init__(self, run: Callable[[], None], size: int, after: Event | torch.cuda.Event | None) -> None:
        self.bytes = size
        self.error: BaseException | None = None
        self.ms = 0.0
        self._run = run
        self._after = after
        self._done = threading.Event()

    @property
    def done(self) -> bool:
        """Whether its last byte has arrived, or it failed."""
        return self._done.is_set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until it is done; False after `timeout_s`."""
        return self._done.wait(timeout_s)

    def result(self) -> None:
        """See `Event`."""
        self._done.wait()
        if self.error is not None:
            raise EngineError(f"a copy failed: {self.error}") from self.error


class CopyThread:
    """A thread that carries out copies in the order in which they were given.

    Args:
        name: of the thread.
        device: whose memory they touch; on CUDA the thread has a stream of its own.
        bytes_per_s: emulated bandwidth; None: as fast as the machine.
    """

    def __init__(self, name: str, device: torch.device, bytes_per_s: float | None = None) -> None:
        self._device = device
        self._bytes_per_s = bytes_per_s
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._queue: SimpleQueue[Transfer | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def submit(self, run: Callable[[], None], size: int, after: Event | None = None) -> Transfer:
        """Queue work that copies `size` bytes, to begin once `after` is over.

        On CUDA it also comes after what the caller's stream has been given so far.
        """
        if not self._thread.is_alive():
            raise EngineError("the copy thread is gone")
        launched: torch.cuda.Event | None = None
        if self._stream is not None and after is None:
            launched = torch.cuda.Event()
            launched.record(torch.cuda.current_stream(self._device))
        transfer = Transfer(run, size, after or launched)
        self._queue.put(transfer)
        return transfer

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: Event | None = None) -> Transfer:
        """See `Stream`."""
        return self.submit(lambda: self.move(target, source), target.numel(), after)

    def move(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """One copy. `memmove` lets other Python threads run, and needs no second team of OpenMP threads."""
        if target.numel() != source.numel() or not (target.is_contiguous() and source.is_contiguous()):
            raise ValueError("a copy needs two contiguous stretches of one size")
        ctypes.memmove(target.data_ptr(), source.data_ptr(), target.numel())

    def close(self) -> None:
        """Finish what was queued, then end the thread."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()

    def _serve(self) -> None:
        while (transfer := self._queue.get()) is not None:
            started = time.perf_counter()
            try:
                started = self._carry_out(transfer)
                if self._bytes_per_s is not None:
                    time.sleep(max(0.0, started + transfer.bytes / self._bytes_per_s - time.perf_counter()))
            except BaseException as e:  # noqa: BLE001 - whoever waits must hear of it, whatever it is
                transfer.error = e
            transfer.ms = (time.perf_counter() - started) * 1e3
            transfer._done.set()  # noqa: SLF001 - its own class's other half

    def _carry_out(self, transfer: Transfer) -> float:
        """Returns when it began, which is when what it had to wait for was over."""
        stream, after = self._stream, transfer._after  # noqa: SLF001 - see above
        with torch.inference_mode(), torch.cuda.stream(stream) if stream else contextlib.nullcontext():
            if isinstance(after, torch.cuda.Event):
                assert stream is not None
                stream.wait_event(after)
            elif after is not None:
                after.result()
            started = time.perf_counter()
            try:
                transfer._run()  # noqa: SLF001 - see above
            finally:
                if stream is not None:  # also past a failure: what was launched before it writes on
                    stream.synchronize()
        return started


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

    def result(self) -> None:
        try:
            self.event.synchronize()
        except RuntimeError as e:
            raise EngineError(f"a copy failed: {e}") from e


def open_stream(device: torch.device, name: str, bytes_per_s: float | None = None) -> Stream:
    """A stream for plain copies, of the device's kind. Bandwidths are emulated on CPUs only."""
    return CudaStream(device) if device.type == "cuda" else CopyThread(name, device, bytes_per_s)


def computed(device: torch.device) -> Event | None:
    """An event for all that has been launched on the device so far; None where computation is synchronous."""
    if device.type != "cuda":
        return None
    return _CudaEvent(torch.cuda.current_stream(device).record_event())
