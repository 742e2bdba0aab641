"""Bytes between a rank's device and its host pool, with their checksums; on the thread of a stream."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import xxhash

from talaria_gpu.hkvr.lanes import STRETCH_BYTES, Lanes
from talaria_gpu.hkvr.slabs import Cell
from talaria_gpu.hkvr.transfer import DeviceKv, Piece, device_to_host, host_to_device


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
    """One direction's.

    Args:
        name: of its threads.
        pool: uint8, the host's.
        device: where the other end is.
    """

    def __init__(self, name: str, pool: torch.Tensor, device: torch.device) -> None:
        self._pool, self._bytes = pool, pool.numpy()
        self._cuda = device.type == "cuda"
        self._lanes = Lanes(name, device)

    def out(self, batches: Sequence[Batch], *, hashed: bool) -> list[int]:
        """Copy to the host; checksums of the cells in order, zeros unless `hashed`. It has completed on return."""
        sums = [0] * sum(len(batch.pieces) for batch in batches)

        def work(stretch: _Stretch) -> bool:
            device_to_host(stretch.kv, self._pool, stretch.pieces)
            if hashed and not self._cuda:
                self._hash(stretch, sums)
            return True

        self._lanes.run(work, list(self._stretches(batches)))
        if hashed and self._cuda:
            torch.cuda.current_stream().synchronize()
            for stretch in self._stretches(batches):
                self._hash(stretch, sums)
        return sums

    def back(self, batches: Sequence[Batch], sums: Sequence[int] | None) -> int:
        """Copy to the device; how many pieces, from the first on, have the checksums `sums` (None: all).

        Rows of later pieces hold anything afterwards.
        """
        damaged: list[int] = []

        def work(stretch: _Stretch) -> bool:
            intact = len(stretch.pieces)
            if sums is not None:
                for index, piece in enumerate(stretch.pieces):
                    if self.checksum(piece.cell) != sums[stretch.first + index]:
                        damaged.append(stretch.first + index)
                        intact = index
                        break
            host_to_device(stretch.kv, self._pool, stretch.pieces[:intact])
            return intact == len(stretch.pieces)

        self._lanes.run(work, list(self._stretches(batches)))
        return min(damaged, default=sum(len(batch.pieces) for batch in batches))

    def checksum(self, cell: Cell) -> int:
        """Of a cell's bytes now."""
        return int(xxhash.xxh3_64_intdigest(self._bytes[cell.offset : cell.offset + cell.size]))

    def close(self) -> None:
        """End the threads and let go of the pool."""
        self._lanes.close()
        self._pool = torch.empty(0, dtype=torch.uint8)
        self._bytes = self._pool.numpy()

    def _hash(self, stretch: _Stretch, sums: list[int]) -> None:
        for index, piece in enumerate(stretch.pieces):
            sums[stretch.first + index] = self.checksum(piece.cell)

    def _stretches(self, batches: Sequence[Batch]) -> Iterator[_Stretch]:
        first = 0
        for kv, pieces in batches:
            most = max(1, STRETCH_BYTES // kv.descriptor.block_bytes) if self._lanes.is_shared else max(1, len(pieces))
            for at in range(0, len(pieces), most):
                yield _Stretch(kv, pieces[at : at + most], first + at)
            first += len(pieces)
