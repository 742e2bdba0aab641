"""The bounded host store of weight images; what does not fit waits on disk. Both ways go in the background."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Literal

import torch

from talaria_common.errors import EngineError
from talaria_gpu.weights import memory
from talaria_gpu.weights.files import ImageFile

Place = Literal["host", "loading", "disk"]


@dataclass(slots=True, eq=False)
class _Entry:
    size: int
    image: torch.Tensor | None
    used: int
    file: ImageFile | None = None
    loading: Future[torch.Tensor] | None = None
    writing: Future[ImageFile] | None = None
    pins: int = 0
    broken: bool = False
    """The last read failed."""
    unwritable: bool = False
    """The last write failed."""
    dropped: bool = False


@dataclass(slots=True)
class StoreStats:
    """Since the store was made."""

    loads: int = 0
    evictions: int = 0
    loaded_bytes: int = 0
    failures: list[str] = field(default_factory=list)


class WeightStore:
    """Images by model name. Not thread-safe: one caller; a thread of the store's reads and writes the files.

    Evicted under pressure: the image that was used longest ago, never a pinned one. It is written to disk first, once;
    only then does it leave the host.

    Args:
        capacity_bytes: most bytes of images on the host; None: no bound, and nothing goes to disk.
        directory: for image files; see `ImageFile`.
        pin: page-lock images, for a GPU.
    """

    def __init__(self, capacity_bytes: int | None, directory: Path | None = None, *, pin: bool = False) -> None:
        self._capacity, self._directory, self._pin = capacity_bytes, directory, pin
        self._entries: dict[str, _Entry] = {}
        self._serial = count()
        self._disk = ThreadPoolExecutor(1, thread_name_prefix="weights")
        self.stats = StoreStats()

    @property
    def host_bytes(self) -> int:
        """Bytes of images that are, or are being read, on the host."""
        return sum(e.size for e in self._entries.values() if e.image is not None or e.loading is not None)

    def make(self, name: str, size: int) -> torch.Tensor:
        """Room for a new image of `size` bytes, to be filled and then `put`; waits for what has to go to disk for it.

        Raises:
            EngineError: it does not fit beside what is pinned, or there is no more memory.
        """
        self._make_room(name, size, patient=True)
        return memory.allocate(size, pin=self._pin)

    def put(self, name: str, image: torch.Tensor) -> None:
        """Keep an image that `make` gave."""
        self._entries[name] = _Entry(size=image.numel(), image=image, used=next(self._serial))

    def place(self, name: str) -> Place:
        """Where the model's image is."""
        entry = self._entries[name]
        self._settle(entry)
        return "host" if entry.image is not None else "loading" if entry.loading is not None else "disk"

    def prefetch(self, name: str) -> bool:
        """Have the image read in the background if it is on disk; whether it is on the host now.

        It waits for nothing: while another image is being written to make room, ask again. A read or a write that
        failed is not tried again here; `acquire` does, and raises.
        """
        entry = self._entries[name]
        self._settle(entry)
        if entry.image is None and entry.loading is None and not entry.broken:
            try:
                self._start(name, entry, patient=False)
            except EngineError:  # everything else is pinned: there will be room after a switch
                return False
        return entry.image is not None

    def acquire(self, name: str) -> torch.Tensor:
        """The image, pinned; waits for the disk if it has to, for the images that make room for it, too.

        Raises:
            EngineError: it cannot be read, or there is no room for it.
        """
        entry = self._entries[name]
        self._settle(entry)
        if entry.image is None:
            if entry.loading is None:
                self._start(name, entry, patient=True)
            self._finish(entry)
        if entry.image is None:
            raise EngineError(f"{name}: {self.stats.failures[-1]}")
        entry.used = next(self._serial)
        entry.pins += 1
        return entry.image

    def release(self, name: str) -> None:
        """Undo one `acquire`; no error if the model was dropped meanwhile."""
        entry = self._entries.get(name)
        if entry is not None:
            entry.pins -= 1

    def drop(self, name: str) -> None:
        """Forget the model's image, on the host and on disk."""
        entry = self._entries.pop(name, None)
        if entry is None:
            return
        entry.dropped = True
        # What has not begun need not: it stands behind other models' gigabytes, and this is the engine's thread.
        if entry.writing is not None and entry.writing.cancel():
            entry.writing = None
        if entry.loading is not None and entry.loading.cancel():
            entry.loading = None
        self._finish(entry)
        self._written(entry)
        self._free(entry)
        if entry.file is not None:
            entry.file.close()

    def close(self) -> None:
        """Drop everything."""
        for name in list(self._entries):
            self.drop(name)
        self._disk.shutdown()

    # --- space

    def _make_room(self, name: str, size: int, *, patient: bool) -> bool:
        """Whether there is room; with `patient` there is, else an image may still be on its way to disk.

        `patient` also waits for what is being read, if its place is the only one that can be had.
        """
        if self._capacity is None:
            return True
        failed: list[_Entry] = []
        failure: EngineError | None = None
        while self.host_bytes + size > self._capacity:
            idle = [e for e in self._entries.values() if e.image is not None and not e.pins and e not in failed]
            idle = [e for e in idle if patient or not e.unwritable]
            reading = [e for e in self._entries.values() if e.loading is not None]
            if not idle and reading and patient:
                self._finish(reading[0])
                continue
            if not idle and failure is not None:
                raise failure
            if not idle:
                raise EngineError(
                    f"the host image of {name} ({size} B) does not fit: {self.host_bytes} B of {self._capacity} B are "
                    "in use by models that are active, next or being read. Set host_weights_mib to at least "
                    f"{-(-(self.host_bytes + size) // (1 << 20))}"
                )
            entry = min(idle, key=lambda e: (e.unwritable and e.file is None, e.used))
            try:
                if not self._evict(entry, patient=patient):
                    return False
            except EngineError as e:  # the disk is full, say: others may have their files already
                failure = e
                failed.append(entry)
        return True

    def _evict(self, entry: _Entry, *, patient: bool) -> bool:
        """Whether the image has left the host: that needs a file of it."""
        if entry.file is None:
            if entry.writing is None:
                image, directory = entry.image, self._directory
                entry.writing = self._disk.submit(lambda: ImageFile(image, directory, lambda: not entry.dropped))
            if not patient and not entry.writing.done():
                return False
            failure = self._written(entry)
            if failure is not None:
                raise EngineError(f"an image could not be written to disk to make room: {failure}") from failure
        self._free(entry)
        self.stats.evictions += 1
        return True

    def _free(self, entry: _Entry) -> None:
        if entry.image is not None:
            memory.release(entry.image, pin=self._pin)
            entry.image = None

    # --- the disk

    def _start(self, name: str, entry: _Entry, *, patient: bool) -> None:
        file, size, pin = entry.file, entry.size, self._pin
        if file is None:
            raise EngineError(f"{name} has no image anywhere")
        if not self._make_room(name, size, patient=patient):
            return

        def read() -> torch.Tensor:
            image = memory.allocate(size, pin=pin)
            try:
                file.read(image)
            except BaseException:
                memory.release(image, pin=pin)
                raise
            return image

        entry.loading = self._disk.submit(read)

    def _settle(self, entry: _Entry) -> None:
        if entry.loading is not None and entry.loading.done():
            self._finish(entry)

    def _finish(self, entry: _Entry) -> None:
        """Wait for a read; a failed one leaves no image and its reason in the statistics."""
        if entry.loading is None:
            return
        try:
            entry.image = entry.loading.result()
            self.stats.loads += 1
            self.stats.loaded_bytes += entry.size
            entry.used = next(self._serial)
            entry.broken = False
        except (EngineError, OSError, RuntimeError) as e:  # RuntimeError: what torch raises without more memory
            self.stats.failures.append(str(e))
            entry.broken = True
        entry.loading = None

    @staticmethod
    def _written(entry: _Entry) -> Exception | None:
        """Wait for a write that is under way; why it failed, if it did: then the image has no file."""
        if entry.writing is None:
            return None
        writing, entry.writing = entry.writing, None
        failure = writing.exception()
        entry.unwritable = failure is not None
        if isinstance(failure, OSError | RuntimeError):
            return failure
        entry.file = writing.result()
        return None
