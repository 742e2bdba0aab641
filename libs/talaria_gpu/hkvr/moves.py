"""Bytes between a rank's device and its host pool, with their checksums; on the thread of a stream."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import torch
import xxhash

from talaria_gpu.hkvr.slabs import Cell
from talaria_gpu.hkvr.transfer import DeviceKv, Piece, device_to_host, host_to_device

STRETCH_BYTES = 16 << 20
"""Copied at once while the next one's, or the last one's, checksums are made: so that they find it in the cache."""


class Batch(NamedTuple):
    """Pieces of one pool."""

    kv: DeviceKv
    pieces: list[Piece]

    @property
    def bytes(self) -> int:
        """Of all its pieces."""
        return sum(len(piece.rows) for piece in self.pieces) * self.kv.descriptor.bytes_per_token


class _Stretch(NamedTuple):
    kv: DeviceKv
    pieces: list[Piece]
    first: int
    """Number of its first piece among all."""


class Moves:
    """One direction's. Checksums are made, or compared, by a thread beside the copies, a stretch before or behind them.

    Args:
        name: of that thread.
        pool: uint8, the host's.
        device: where the other end is.
    """

    def __init__(self, name: str, pool: torch.Tensor, device: torch.device) -> None:
        self._pool, self._bytes = pool, pool.numpy()
        self._cuda = device.type == "cuda"
        self._hasher = ThreadPoolExecutor(1, thread_name_prefix=name)

    def out(self, batches: Sequence[Batch], *, hashed: bool) -> list[int]:
        """Copy to the host; checksums of the cells in order, zeros unless `hashed`."""
        sums = [0] * sum(len(batch.pieces) for batch in batches)
        hashing: list[Future[None]] = []
        for stretch in _stretches(batches, STRETCH_BYTES if hashed else None):
            device_to_host(stretch.kv, self._pool, stretch.pieces)
            if hashed:
                hashing.append(self._hasher.submit(self._hash, stretch, sums, self._launched()))
        for future in hashing:
            future.result()
        return sums

    def back(self, batches: Sequence[Batch], sums: Sequence[int] | None) -> int:
        """Copy to the device; how many pieces, from the first on, have the checksums `sums` (None: all).

        Pieces behind a damaged one are not copied.
        """
        if sums is None:
            for stretch in _stretches(batches, None):
                host_to_device(stretch.kv, self._pool, stretch.pieces)
            return sum(len(batch.pieces) for batch in batches)
        stretches = list(_stretches(batches, STRETCH_BYTES))
        intact, checking = 0, self._ahead(stretches, 0, sums)
        for index, stretch in enumerate(stretches):
            good = checking.result()
            checking = self._ahead(stretches, index + 1, sums)
            host_to_device(stretch.kv, self._pool, stretch.pieces[:good])
            intact += good
            if good < len(stretch.pieces):
                break
        checking.result()
        return intact

    def _launched(self) -> torch.cuda.Event | None:
        return torch.cuda.current_stream().record_event() if self._cuda else None

    def _ahead(self, stretches: Sequence[_Stretch], index: int, sums: Sequence[int]) -> Future[int]:
        """How many pieces of a stretch are intact, to be known when the one before it has been copied."""
        stretch = stretches[index] if index < len(stretches) else None
        return self._hasher.submit(self._intact, stretch, sums)

    def _intact(self, stretch: _Stretch | None, sums: Sequence[int]) -> int:
        if stretch is None:
            return 0
        wanted = sums[stretch.first :]
        checks = (self.checksum(p.cell) == wanted[i] for i, p in enumerate(stretch.pieces))
        return next((i for i, right in enumerate(checks) if not right), len(stretch.pieces))

    def checksum(self, cell: Cell) -> int:
        """Of a cell's bytes now."""
        return int(xxhash.xxh3_64_intdigest(self._bytes[cell.offset : cell.offset + cell.size]))

    def close(self) -> None:
        """End the thread and let go of the pool."""
        self._hasher.shutdown()
        self._pool = torch.empty(0, dtype=torch.uint8)
        self._bytes = self._pool.numpy()

    def _hash(self, stretch: _Stretch, sums: list[int], copied: torch.cuda.Event | None) -> None:
        if copied is not None:
            copied.synchronize()
        for index, piece in enumerate(stretch.pieces):
            sums[stretch.first + index] = self.checksum(piece.cell)


def _stretches(batches: Sequence[Batch], size: int | None) -> Iterator[_Stretch]:
    """What is copied at once: `size` bytes or a block, if that is larger; None: whole batches."""
    first = 0
    for kv, pieces in batches:
        most = max(1, len(pieces) if size is None else size // kv.descriptor.block_bytes)
        for at in range(0, len(pieces), most):
            yield _Stretch(kv, pieces[at : at + most], first + at)
        first += len(pieces)
