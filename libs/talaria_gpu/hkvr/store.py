"""`HostKv`: one rank's host KV: pool, registry and copies together (3.5, 4.3).

Called from the engine's thread only; the copy threads touch bytes and nothing else. What has completed takes effect in
`poll`, on the caller's thread: so a block becomes visible at a moment of the caller's choosing, and always whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from talaria_gpu.hkvr.agreement import Alone, Ranks, agree_on
from talaria_gpu.hkvr.block import Block
from talaria_gpu.hkvr.moves import Batch, Moves
from talaria_gpu.hkvr.records import Parked, Restore, Save, Snapshot, Stats
from talaria_gpu.hkvr.registry import Registry
from talaria_gpu.hkvr.slabs import Cell, Move, SlabPool
from talaria_gpu.hkvr.states import Found, state_keys
from talaria_gpu.hkvr.transfer import DeviceKv, Piece
from talaria_gpu.streams import CopyThread, Transfer

SLAB_BYTES = 8 << 20
POISON = 0xFF
"""Garbage byte: NaN as float32, float16 and bfloat16."""
_EWMA = 0.3
_UNDER_WAY, _FAILED, _COMPLETE = range(3)
"""Of a copy, in the order in which the least of all ranks' counts."""


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
        ranks: those that keep the same blocks, each its own share.
        poison: overwrite cells that are given back with garbage, so that reading stale bytes shows.
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
        ranks: Ranks = Alone(),  # noqa: B008 - has no state
        poison: bool = False,
    ) -> None:
        self._ranks = ranks
        slab = min(SLAB_BYTES, max(capacity_bytes // 8, 1)) if slab_bytes is None else slab_bytes
        self._pool = torch.empty(capacity_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._poison = poison
        freed = self._spoil if poison else None
        self.registry = Registry(SlabPool(capacity_bytes, slab), self._move, cost_ms_per_token, freed)
        self._verify = verify
        self._outward, self._inward = (Moves(name, self._pool, device) for name in ("kv-out", "kv-in"))
        self._out = CopyThread("kv-d2h", device, d2h_gbps and d2h_gbps * 1e9)
        self._in = CopyThread("kv-h2d", device, h2d_gbps and h2d_gbps * 1e9)
        self._saves: list[Save] = []
        self._reads: list[Restore] = []
        self._restore_ms: dict[str, float] = {}
        self._totals = {"d2h": [0.0, 0.0], "h2d": [0.0, 0.0]}

    # --- to the host

    def save(
        self,
        kv: DeviceKv,
        keys: Sequence[bytes],
        rows: torch.Tensor,
        done: Callable[[], None],
        snapshot: Snapshot | None = None,
    ) -> int:
        """Start copying those blocks of a prefix that are not here yet.

        Args:
            kv: the model's.
            keys: of the prefix's full blocks.
            rows: int64 [tokens] on the CPU; their device rows, which must not change until `done`.
            done: called by a later `poll`; one rank alone calls it at once if there is nothing to copy.
            snapshot: the state at the end of `rows`, which may then reach beyond the last full block.

        Returns: blocks that found no room.
        """
        size = kv.descriptor.block_tokens
        chain = [(kv, key, rows[index * size : (index + 1) * size]) for index, key in enumerate(keys)]
        if snapshot is not None:
            if len(rows) > len(keys) * size:
                chain.append((kv, snapshot.end, rows[len(keys) * size :]))
            names = state_keys(snapshot.end, len(snapshot.parts))
            chain += [(part, name, snapshot.slot) for part, name in zip(snapshot.parts, names, strict=True)]
        blocks, batches, refused = self._reserve(kv, chain)
        if not blocks and self._ranks.size == 1:
            done()
            return refused
        # Of several ranks each keeps count of every save, also of one that it has nothing to copy for: others may have.
        checksums: list[int] = []

        def run() -> None:
            checksums.extend(self._outward.out(batches, hashed=self._verify))

        nbytes = sum(batch.bytes for batch in batches)
        self._saves.append(Save(kv, blocks, self._out.submit(run, nbytes), checksums, done))
        return refused

    def _reserve(
        self, kv: DeviceKv, chain: Sequence[tuple[DeviceKv, bytes, torch.Tensor]]
    ) -> tuple[list[Block], list[Batch], int]:
        """Places for what of a chain (pool, key, rows) is not here; what is to be copied; how much found no room."""
        blocks: list[Block] = []
        batches: list[Batch] = []
        parent: Block | None = None
        for index, (owner, key, rows) in enumerate(chain):
            block = self.registry.get(key)
            if block is None:
                block = self.registry.reserve(owner.descriptor, key, parent, len(rows) if owner is kv else None)
                if block is None:
                    return blocks, batches, len(chain) - index
                blocks.append(block)
                if not batches or batches[-1].kv is not owner:
                    batches.append(Batch(owner, []))
                batches[-1].pieces.append(Piece(block.cell, rows))
            parent = block
        return blocks, batches, 0

    def poll(self) -> None:
        """Let copies take effect that have completed on all ranks."""
        if not self._saves:
            return
        outcomes = self._ranks.least([_outcome(save.transfer) for save in self._saves])
        over = [(save, outcome) for save, outcome in zip(self._saves, outcomes, strict=True) if outcome]
        for save, outcome in over:
            self._saves.remove(save)
            self._count("d2h", save.transfer)
            if outcome == _COMPLETE:
                for index, block in enumerate(save.blocks):
                    self.registry.commit(block, save.checksums[index] if self._verify else 0)
            else:
                for block in save.blocks:
                    self.registry.drop(block)
                    self.registry.unpin([block])
                self.registry.counts.failed += len(save.blocks)
            save.done()

    @property
    def slab_bytes(self) -> int:
        """No block may be larger."""
        return self.registry.pool.slab_bytes

    @property
    def saving(self) -> int:
        """Copies to the host whose end has not taken effect."""
        return len(self._saves)

    def save_oldest(self) -> None:
        """Wait for the copy to the host that was begun first, and let it take effect."""
        if self._saves:
            self._saves[0].transfer.wait()
            self.poll()

    def drain(self, identity: bytes | None = None) -> int:
        """The switch barrier: wait for the model's copies to the host (None: every model's); how many there were."""
        mine = [s for s in self._saves if identity in {None, s.kv.descriptor.identity}]
        for save in mine:
            save.transfer.wait()
        self.poll()
        return len(mine)

    # --- to the device

    def agreed(self, found: Found) -> Found:
        """The part of a prefix that all ranks have; a hybrid's is of no use without its state.

        What follows is dropped here: it would stay out of step with what other ranks save and evict.
        """
        agreed, unanimous = agree_on(self._ranks, found.keys)
        self.registry.counts.disagreed += not unanimous
        if agreed == len(found.keys):
            return found
        # Of a hybrid only the state: the KV before it may be other sessions', and another rank may have all of it.
        self.registry.drop(found.states[0] if found.states else found.all_blocks[agreed])
        blocks = () if found.states else found.blocks[:agreed]
        return Found(blocks[-1].end_tokens, blocks) if blocks else Found()

    def restore(
        self,
        kv: DeviceKv,
        found: Found,
        rows: torch.Tensor,
        have: int,
        state: tuple[tuple[DeviceKv, ...], torch.Tensor] | None = None,
    ) -> Restore:
        """Start copying a prefix to the device.

        Args:
            kv: the model's.
            found: the prefix; its blocks are pinned until `restored`.
            rows: int64 on the CPU: the device rows of tokens [have, end).
            have: tokens of the prefix that the device has.
            state: a hybrid's: the parts of its states, and the slot int64 [1] on the CPU.
        """
        size = kv.descriptor.block_tokens
        missing = found.blocks[have // size :]
        wanted = [*missing, *found.states]
        self.registry.pin(wanted)
        batch = Batch(kv, [])
        at = have
        for block in missing:
            end = block.end_tokens
            batch.pieces.append(Piece(block.cell, rows[at - have : end - have], skip=at % size))
            at = end
        batches = [batch]
        if state is not None:
            parts, slot = state
            batches += [Batch(p, [Piece(b.cell, slot)]) for p, b in zip(parts, found.states, strict=True)]
        sums = [block.checksum for block in wanted]
        good: list[int] = []

        def run() -> None:
            intact = self._inward.back(batches, sums if self._verify else None)
            good.extend([len(piece.rows) for piece in batch.pieces][:intact])
            good.extend([0] * (intact - len(good)))

        nbytes = sum(b.bytes for b in batches)
        restore = Restore(kv, wanted, len(rows), self._in.submit(run, nbytes), state is not None, good)
        self._reads.append(restore)
        return restore

    def restored(self, restore: Restore) -> int:
        """End a restore; returns how many of its tokens, from the first on, are there. Corrupt blocks are dropped.

        On all ranks as many: the least that arrived on any.
        """
        restore.transfer.wait()
        self._reads.remove(restore)
        counts = self.registry.counts
        failed = restore.transfer.error is not None
        mine = len(restore.good) if not failed else 0
        arrived, completed = self._ranks.least([mine, int(not failed)])
        restore.failed = not completed
        self.registry.touch(restore.blocks[:arrived])
        if not completed:
            counts.failed += 1
        elif arrived < len(restore.blocks):
            counts.corrupt += 1
            self.registry.drop(restore.blocks[arrived])
        self.registry.unpin(restore.blocks)
        self._count("h2d", restore.transfer)
        if restore.whole and arrived < len(restore.blocks):
            return 0
        tokens = sum(restore.good[:arrived])
        if tokens:
            name, took = restore.kv.descriptor.model, restore.transfer.ms / restore.tokens
            before = self._restore_ms.get(name, took)
            self._restore_ms[name] = before + _EWMA * (took - before)
            counts.restored += arrived
            counts.restored_tokens += tokens
        return tokens

    # --- rows of a model that is switched out while it runs

    def has_room(self, wanted: Sequence[tuple[DeviceKv, torch.Tensor]]) -> bool:
        """Whether all these rows could be parked together, if everything goes that may."""
        cells = [(kv.descriptor.block_bytes, -(-len(rows) // kv.descriptor.block_tokens)) for kv, rows in wanted]
        return self.registry.has_room(cells)

    def park(self, kv: DeviceKv, rows: torch.Tensor) -> Parked | None:
        """Copy exactly these rows out, and wait; None, with nothing kept: no room, or the copy failed.

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
            checksums.extend(self._outward.out([Batch(kv, list(pieces))], hashed=self._verify))

        transfer = self._out.submit(run, len(rows) * kv.descriptor.bytes_per_token)
        transfer.wait()
        self._count("d2h", transfer)
        if transfer.error is not None:
            self.registry.give_private(cells)
            self.registry.counts.failed += 1
            return None
        return Parked(kv, pieces, tuple(checksums))

    def unpark(self, parked: Parked) -> bool:
        """Copy the rows back to where they were, and wait; False: damaged, or not copied, and they hold anything.

        On all ranks alike. Either way the room is given back.
        """
        intact: list[bool] = []

        def run() -> None:
            sums = parked.checksums if self._verify else None
            intact.append(self._inward.back([Batch(parked.kv, list(parked.pieces))], sums) == len(parked.pieces))

        rows = sum(len(piece.rows) for piece in parked.pieces)
        transfer = self._in.submit(run, rows * parked.kv.descriptor.bytes_per_token)
        transfer.wait()
        self._count("h2d", transfer)
        self.forget(parked)
        failed = transfer.error is not None
        whole = bool(self._ranks.least([int(not failed and intact[0])])[0])
        self.registry.counts.failed += failed
        self.registry.counts.corrupt += not whole and not failed
        return whole

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
        for moves in (self._outward, self._inward):
            moves.close()
        self._pool = torch.empty(0, dtype=torch.uint8)

    # --- inside

    def _move(self, move: Move) -> None:
        source, target = move
        self._pool[target.offset : target.offset + target.size].copy_(
            self._pool[source.offset : source.offset + source.size]
        )
        if self._poison:
            self._spoil(source)

    def _spoil(self, cell: Cell) -> None:
        self._pool[cell.offset : cell.offset + cell.size] = POISON

    def _count(self, direction: str, transfer: Transfer) -> None:
        total = self._totals[direction]
        total[0] += transfer.bytes
        total[1] += transfer.ms


def _outcome(transfer: Transfer) -> int:
    if not transfer.done:
        return _UNDER_WAY
    return _COMPLETE if transfer.error is None else _FAILED
