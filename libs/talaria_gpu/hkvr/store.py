"""`HostKv`: one rank's host KV: pool, registry and copies together (3.5, 4.3).

Called from the engine's thread only; the copy threads touch bytes and nothing else. What has completed takes effect in
`poll`, on the caller's thread: so a block becomes visible at a moment of the caller's choosing, and always whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import xxhash

from talaria_gpu.hkvr.registry import Block, Counts, Registry
from talaria_gpu.hkvr.slabs import Cell, Move, SlabPool
from talaria_gpu.hkvr.streams import CopyStream, Transfer
from talaria_gpu.hkvr.transfer import DeviceKv, Piece, device_to_host, host_to_device

SLAB_BYTES = 8 << 20
_EWMA = 0.3


@dataclass(slots=True, eq=False)
class Save:
    """Blocks on their way to the host."""

    kv: DeviceKv
    blocks: list[Block]
    transfer: Transfer
    checksums: list[int]
    done: Callable[[], None]
    """Called by `poll` when the device rows may change again."""


@dataclass(slots=True, eq=False)
class Restore:
    """Blocks on their way to the device; hand it to `HostKv.restored` once `transfer.done`."""

    kv: DeviceKv
    blocks: list[Block]
    tokens: int
    transfer: Transfer
    good: list[int] = field(default_factory=list)
    """Tokens of each piece that arrived and was found intact, in order."""


class Parked(NamedTuple):
    """Rows kept exactly, for a model that is not active."""

    kv: DeviceKv
    pieces: tuple[Piece, ...]
    checksums: tuple[int, ...]


class Stats(NamedTuple):
    """Totals of the store."""

    capacity_bytes: int
    taken_bytes: int
    blocks: int
    d2h_bytes: int
    d2h_ms: float
    h2d_bytes: int
    h2d_ms: float
    counts: Counts


class HostKv:
    """The registry of one rank.

    Args:
        capacity_bytes: of the pool, page-locked on CUDA.
        device: where the KV pools are.
        slab_bytes: no block may be larger; None: 8 MiB, or less in a small pool.
        verify: compare checksums on restore. Off, they are not even made.
        d2h_gbps: emulated bandwidth; None: none.
        h2d_gbps: the same for restores.
        cost_ms_per_token: see `Registry`.
    """

    def __init__(
        self,
        capacity_bytes: int,
        device: torch.device,
        *,
        slab_bytes: int | None = None,
        verify: bool = True,
        d2h_gbps: float | None = None,
        h2d_gbps: float | None = None,
        cost_ms_per_token: Callable[[str], float] = lambda _: 1.0,
    ) -> None:
        slab = min(SLAB_BYTES, max(capacity_bytes // 8, 1)) if slab_bytes is None else slab_bytes
        self._pool = torch.empty(capacity_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._bytes = self._pool.numpy()
        self.registry = Registry(SlabPool(capacity_bytes, slab), self._move, cost_ms_per_token)
        self._verify = verify
        self._out = CopyStream("kv-d2h", device, d2h_gbps)
        self._in = CopyStream("kv-h2d", device, h2d_gbps)
        self._saves: list[Save] = []
        self._reads: list[Restore] = []
        self._restore_ms: dict[str, float] = {}
        self._totals = {"d2h": [0.0, 0.0], "h2d": [0.0, 0.0]}

    # --- to the host

    def save(self, kv: DeviceKv, keys: Sequence[bytes], rows: torch.Tensor, done: Callable[[], None]) -> int:
        """Start copying those blocks of a prefix that are not here yet.

        Args:
            kv: the model's.
            keys: of the prefix's full blocks.
            rows: int64 [tokens] on the CPU; their device rows, which must not change until `done`.
            done: called by a later `poll`, or at once if there is nothing to copy.

        Returns: blocks that found no room.
        """
        size = kv.descriptor.block_tokens
        blocks: list[Block] = []
        pieces: list[Piece] = []
        parent: Block | None = None
        refused = 0
        for index, key in enumerate(keys):
            block = self.registry.get(key)
            if block is None:
                block = self.registry.reserve(kv.descriptor, key, parent)
                if block is None:
                    refused = len(keys) - index
                    break
                blocks.append(block)
                pieces.append(Piece(block.cell, rows[index * size : (index + 1) * size]))
            parent = block
        if not blocks:
            done()
            return refused
        checksums: list[int] = []

        def run() -> None:
            device_to_host(kv, self._pool, pieces)
            if self._verify:
                self._sync()
                checksums.extend(self._checksum(piece.cell) for piece in pieces)

        nbytes = len(blocks) * kv.descriptor.block_bytes
        self._saves.append(Save(kv, blocks, self._out.submit(run, nbytes), checksums, done))
        return refused

    def poll(self) -> None:
        """Let completed copies take effect."""
        for save in [s for s in self._saves if s.transfer.done]:
            self._saves.remove(save)
            self._count("d2h", save.transfer)
            if save.transfer.error is None:
                for index, block in enumerate(save.blocks):
                    self.registry.commit(block, save.checksums[index] if self._verify else 0)
            else:
                for block in save.blocks:
                    self.registry.drop(block)
                    self.registry.unpin([block])
                self.registry.counts.failed += len(save.blocks)
            save.done()

    @property
    def saving(self) -> int:
        """Copies to the host whose end has not taken effect."""
        return len(self._saves)

    def drain(self, identity: bytes | None = None) -> int:
        """The switch barrier: wait for the model's copies to the host (None: every model's); how many there were."""
        mine = [s for s in self._saves if identity in {None, s.kv.descriptor.identity}]
        for save in mine:
            save.transfer.wait()
        self.poll()
        return len(mine)

    # --- to the device

    def restore(self, kv: DeviceKv, blocks: Sequence[Block], rows: torch.Tensor, have: int) -> Restore:
        """Start copying a matched prefix to the device.

        Args:
            kv: the model's.
            blocks: as matched, from the first block of the prefix on; pinned until `restored`.
            rows: int64 on the CPU: the device rows of tokens [have, end).
            have: tokens of the prefix that the device has.
        """
        size = kv.descriptor.block_tokens
        wanted = list(blocks[have // size :])
        self.registry.pin(wanted)
        pieces: list[Piece] = []
        at = have
        for block in wanted:
            end = block.end_tokens
            pieces.append(Piece(block.cell, rows[at - have : end - have], skip=at % size))
            at = end
        sums = [block.checksum for block in wanted]
        good: list[int] = []

        def run() -> None:
            intact = len(pieces)
            if self._verify:
                intact = next((i for i, p in enumerate(pieces) if self._checksum(p.cell) != sums[i]), intact)
            host_to_device(kv, self._pool, pieces[:intact])
            good.extend(len(p.rows) for p in pieces[:intact])

        nbytes = len(rows) * kv.descriptor.bytes_per_token
        restore = Restore(kv, wanted, len(rows), self._in.submit(run, nbytes), good)
        self._reads.append(restore)
        return restore

    def restored(self, restore: Restore) -> int:
        """End a restore; returns how many of its tokens, from the first on, are there. Corrupt blocks are dropped."""
        restore.transfer.wait()
        self._reads.remove(restore)
        counts = self.registry.counts
        arrived = len(restore.good) if restore.transfer.error is None else 0
        self.registry.touch(restore.blocks[:arrived])
        if restore.transfer.error is not None:
            counts.failed += 1
        elif arrived < len(restore.blocks):
            counts.corrupt += 1
            self.registry.drop(restore.blocks[arrived])
        self.registry.unpin(restore.blocks)
        self._count("h2d", restore.transfer)
        tokens = sum(restore.good[:arrived])
        if tokens:
            name, took = restore.kv.descriptor.model, restore.transfer.ms / restore.tokens
            before = self._restore_ms.get(name, took)
            self._restore_ms[name] = before + _EWMA * (took - before)
            counts.restored += arrived
            counts.restored_tokens += tokens
        return tokens

    # --- rows of a model that is switched out while it runs

    def park(self, kv: DeviceKv, rows: torch.Tensor) -> Parked | None:
        """Copy exactly these rows out, and wait; None: no room even after evicting all that may go.

        Args:
            kv: the model's.
            rows: int64 [n] on the CPU, ascending.
        """
        size = kv.descriptor.block_tokens
        cells = self.registry.take_private(kv.descriptor.block_bytes, -(-len(rows) // size))
        if cells is None:
            return None
        pieces = tuple(Piece(cell, rows[i * size : (i + 1) * size]) for i, cell in enumerate(cells))
        checksums: list[int] = []

        def run() -> None:
            device_to_host(kv, self._pool, pieces)
            if self._verify:
                self._sync()
                checksums.extend(self._checksum(cell) for cell in cells)

        transfer = self._out.submit(run, len(rows) * kv.descriptor.bytes_per_token)
        transfer.wait()
        self._count("d2h", transfer)
        if transfer.error is not None:
            self.registry.give_private(cells)
            raise transfer.error
        return Parked(kv, pieces, tuple(checksums))

    def unpark(self, parked: Parked) -> bool:
        """Copy the rows back to where they were, and wait; False: they were damaged meanwhile, and nothing is there.

        Either way the room is given back.
        """
        intact: list[bool] = []

        def run() -> None:
            intact.append(
                not self._verify
                or all(
                    self._checksum(piece.cell) == checksum
                    for piece, checksum in zip(parked.pieces, parked.checksums, strict=True)
                )
            )
            if intact[0]:
                host_to_device(parked.kv, self._pool, parked.pieces)

        rows = sum(len(piece.rows) for piece in parked.pieces)
        transfer = self._in.submit(run, rows * parked.kv.descriptor.bytes_per_token)
        transfer.wait()
        self._count("h2d", transfer)
        self.forget(parked)
        if transfer.error is not None:
            raise transfer.error
        self.registry.counts.corrupt += not intact[0]
        return intact[0]

    def forget(self, parked: Parked) -> None:
        """Give the room of parked rows back."""
        self.registry.give_private([piece.cell for piece in parked.pieces])

    # --- figures

    def restore_ms_per_token(self, model: str) -> float:
        """Measured, EWMA; 0 while nothing was."""
        return self._restore_ms.get(model, 0.0)

    def stats(self) -> Stats:
        """Totals since the start."""
        (d2h_bytes, d2h_ms), (h2d_bytes, h2d_ms) = self._totals["d2h"], self._totals["h2d"]
        pool = self.registry.pool
        return Stats(
            capacity_bytes=pool.slabs * pool.slab_bytes,
            taken_bytes=pool.taken_bytes,
            blocks=len(self.registry),
            d2h_bytes=int(d2h_bytes),
            d2h_ms=d2h_ms,
            h2d_bytes=int(h2d_bytes),
            h2d_ms=h2d_ms,
            counts=self.registry.counts,
        )

    def check_idle(self) -> str:
        """What is held though nothing should be; "" if nothing."""
        if self._saves or self._reads:
            return f"{len(self._saves)} saves and {len(self._reads)} restores are under way"
        return self.registry.check()

    def close(self) -> None:
        """Finish what is under way, end the threads, and give the memory back."""
        self._out.close()
        self._in.close()
        self._pool = torch.empty(0, dtype=torch.uint8)
        self._bytes = self._pool.numpy()

    # --- inside

    def _move(self, move: Move) -> None:
        source, target = move
        self._pool[target.offset : target.offset + target.size].copy_(
            self._pool[source.offset : source.offset + source.size]
        )

    def _checksum(self, cell: Cell) -> int:
        return int(xxhash.xxh3_64_intdigest(self._bytes[cell.offset : cell.offset + cell.size]))

    def _sync(self) -> None:
        """On the copy thread: the bytes are there (its stream is the current one)."""
        if self._pool.is_pinned():
            torch.cuda.current_stream().synchronize()

    def _count(self, direction: str, transfer: Transfer) -> None:
        total = self._totals[direction]
        total[0] += transfer.bytes
        total[1] += transfer.ms
