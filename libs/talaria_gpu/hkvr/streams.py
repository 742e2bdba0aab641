"""Copies beside the computation: one thread per direction, on CUDA with a stream of its own (DESIGN 7).

On a CPU the thread plays the stream, so that whatever guards copies is exercised by real concurrency. A bandwidth may
be given; then a copy takes at least as long as it would at that bandwidth, and what is measured is emulated.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

import torch

from talaria_common.errors import EngineError


class Transfer:
    """One copy under way. `error` and `ms` mean something once it is done."""

    def __init__(self, run: Callable[[], None], size: int, after: torch.cuda.Event | None) -> None:
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


class CopyStream:
    """Runs copies one after another, in the order in which they were given.

    Args:
        name: of the thread.
        device: whose memory they touch.
        gbps: emulated bandwidth in 10^9 bytes per second; None: as fast as the machine.
    """

    def __init__(self, name: str, device: torch.device, gbps: float | None = None) -> None:
        self._device = device
        self._gbps = gbps
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._queue: SimpleQueue[Transfer | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def submit(self, run: Callable[[], None], size: int) -> Transfer:
        """Queue a copy of `size` bytes. It starts after what the caller's stream has been given so far."""
        if not self._thread.is_alive():
            raise EngineError("the copy thread is gone")
        after = None
        if self._stream is not None:
            after = torch.cuda.Event()
            after.record(torch.cuda.current_stream(self._device))
        transfer = Transfer(run, size, after)
        self._queue.put(transfer)
        return transfer

    def close(self) -> None:
        """Finish what was queued, then end the thread."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()

    def _serve(self) -> None:
        while (transfer := self._queue.get()) is not None:
            started = time.perf_counter()
            try:
                self._carry_out(transfer)
            except BaseException as e:  # noqa: BLE001 - whoever waits must hear of it, whatever it is
                transfer.error = e
            if self._gbps:
                time.sleep(max(0.0, started + transfer.bytes / (self._gbps * 1e9) - time.perf_counter()))
            transfer.ms = (time.perf_counter() - started) * 1e3
            transfer._done.set()  # noqa: SLF001 - its own class's other half

    def _carry_out(self, transfer: Transfer) -> None:
        stream = self._stream
        with torch.inference_mode(), torch.cuda.stream(stream) if stream else contextlib.nullcontext():
            if stream is not None and transfer._after is not None:  # noqa: SLF001 - see above
                stream.wait_event(transfer._after)  # noqa: SLF001 - see above
            transfer._run()  # noqa: SLF001 - see above
            if stream is not None:
                stream.synchronize()
