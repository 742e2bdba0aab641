"""Which blocks are in host memory, who holds them, and which go first (4.3, appendix B). Pure: no bytes, no clock.

A block is `copying` until its transfer has completed and been committed, and only then visible (`host`). Two counts
keep it, each for its own reason:

- pins: transfers under way. Its bytes stay where they are until the last pin goes, even if the block itself is gone.
- refs: calls whose prefix it is. It is evicted only when nothing without refs is left; a ref keeps no bytes.

Blocks form chains: a block's parent is the prefix before it. Leaves go first, so that what is there can be reached.
Among them GreedyDual-Size: priority = age + chance of return x recompute cost / bytes, where the age is the priority of
what was evicted last. A recurrent state counts with all the tokens that are computed again without it; KV whose state
is gone goes first.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence

from talaria_gpu.hkvr.block import Block, Counts
from talaria_gpu.hkvr.descriptor import KvDescriptor
from talaria_gpu.hkvr.slabs import Cell, Move, SlabPool


class Registry:
    """The index over one pool.

    Args:
        pool: where blocks get their cells.
        move: copies the bytes of one cell to another; called in the middle of making room.
        cost_ms_per_token: what recomputing a token of a model costs, by its name; the scale does not matter.
        freed: told of each cell that nobody has any more. For tests, which overwrite it.
    """

    def __init__(
        self,
        pool: SlabPool,
        move: Callable[[Move], None],
        cost_ms_per_token: Callable[[str], float] = lambda _: 1.0,
        freed: Callable[[Cell], None] | None = None,
    ) -> None:
        self._pool = pool
        self._move = move
        self._cost = cost_ms_per_token
        self._freed = freed
        self._blocks: dict[bytes, Block] = {}
        self._by_cell: dict[int, Block] = {}
        """Every cell in use by a block, "gone" but pinned ones included, by offset."""
        self._private: set[Cell] = set()
        self._pinned: dict[int, Block] = {}
        """Blocks with a pin, by `id`: few, whatever the registry holds."""
        self._queue: list[tuple[bool, float, int, Block]] = []
        """A heap. Entries whose stamp is not their block's are void."""
        self._queued = 0
        """Entries that are not."""
        self._stamp = 0
        self._age = 0.0
        self._tokens: dict[str, int] = {}
        self.counts = Counts()

    def __len__(self) -> int:
        return len(self._blocks)

    def tokens(self, model: str) -> int:
        """Tokens of a model's complete blocks."""
        return self._tokens.get(model, 0)

    @property
    def pool(self) -> SlabPool:
        """The pool beneath."""
        return self._pool

    # --- looking

    def get(self, key: bytes) -> Block | None:
        """The block, complete or not."""
        return self._blocks.get(key)

    def match(self, keys: Sequence[bytes]) -> list[Block]:
        """The longest visible prefix: blocks from the first on, all complete. Changes nothing."""
        found: list[Block] = []
        for key in keys:
            block = self._blocks.get(key)
            if block is None or block.state != "host":
                break
            found.append(block)
        return found

    def children(self, block: Block) -> list[Block]:
        """What follows a block directly."""
        return [self._blocks[key] for key in block.children]

    def touch(self, blocks: Iterable[Block]) -> None:
        """They were wanted: they stay longer."""
        for block in blocks:
            block.hits += 1
            self._rank(block)

    # --- coming

    def reserve(
        self, descriptor: KvDescriptor, key: bytes, parent: Block | None, tokens: int | None = None
    ) -> Block | None:
        """Room for a new block, pinned once and `copying`; others are evicted for it. None: there is no room.

        `tokens`: of a block that is not full.
        """
        if key in self._blocks:
            raise ValueError("this block is here already")
        if parent is not None:
            if parent.state == "gone":
                raise ValueError("a block cannot follow one that is gone")
            parent.children.add(key)  # before making room: it is no leaf any more
            self._withdraw(parent)
        cell = self._room(descriptor.block_bytes)
        if cell is None:
            if parent is not None:
                self._orphan(parent, key)
            self.counts.refused += 1
            return None
        depth = 0 if parent is None else parent.depth + 1
        if tokens is None:
            tokens = 0 if descriptor.family == "recurrent" else descriptor.block_tokens
        block = Block(key=key, descriptor=descriptor, parent=parent, depth=depth, cell=cell, tokens=tokens)
        self._blocks[key] = self._by_cell[cell.offset] = self._pinned[id(block)] = block
        self._rank(block)
        return block

    def commit(self, block: Block, checksum: int) -> None:
        """Its copy has completed: it becomes visible and loses the pin of its making."""
        if block.state == "copying":
            block.state, block.checksum = "host", checksum
            name = block.descriptor.model
            self._tokens[name] = self._tokens.get(name, 0) + block.tokens
            self.counts.saved += 1
        self.unpin([block])

    # --- staying

    def pin(self, blocks: Iterable[Block]) -> None:
        """A transfer reads or writes them."""
        for block in blocks:
            block.pins += 1
            self._pinned[id(block)] = block
            self._withdraw(block)

    def unpin(self, blocks: Iterable[Block]) -> None:
        """A transfer is over."""
        for block in blocks:
            if block.pins < 1:
                raise ValueError("unpinned more often than pinned")
            block.pins -= 1
            if not block.pins:
                del self._pinned[id(block)]
                if block.state == "gone":
                    self._free(block)
                else:
                    self._offer(block)

    def refer(self, blocks: Iterable[Block]) -> None:
        """A call's prefix holds them."""
        for block in blocks:
            block.refs += 1
            self._offer(block)

    def unrefer(self, blocks: Iterable[Block]) -> None:
        """The call is over."""
        for block in blocks:
            if block.refs < 1:
                raise ValueError("more refs were given back than taken")
            block.refs -= 1
            self._offer(block)

    # --- going

    def drop(self, block: Block) -> int:
        """Forget a block and all that follow it, at once; pinned cells are freed when their transfers end. How many."""
        if block.state == "gone":
            return 0
        waiting, dropped = [block], 0
        while waiting:
            at = waiting.pop()
            waiting += [self._blocks[key] for key in at.children]
            at.children.clear()
            if at.parent is not None and at is block:
                self._orphan(at.parent, at.key)
            self._forget(at)
            dropped += 1
        return dropped

    def drop_model(self, identity: bytes) -> int:
        """Forget a model's blocks; how many."""
        roots = [b for b in self._blocks.values() if b.parent is None and b.descriptor.identity == identity]
        return sum(self.drop(root) for root in roots)

    # --- room for something else than blocks

    def has_room(self, wanted: Iterable[tuple[int, int]]) -> bool:
        """Whether private cells could be had together, by (size, how many), if every block goes that may."""
        cells: dict[int, int] = {}
        for size, count in wanted:
            if count and not self._pool.cells_per_slab(size):
                return False
            cells[size] = cells.get(size, 0) + count
        fixed: dict[int, set[int]] = {}
        for cell in self._staying():
            cells[cell.size] = cells.get(cell.size, 0) + 1
            if self._is_fixed(cell):
                fixed.setdefault(cell.size, set()).add(cell.offset // self._pool.slab_bytes)
        slabs = (
            max(-(-count // self._pool.cells_per_slab(size)), len(fixed.get(size, ())))
            for size, count in cells.items()
            if count
        )
        return sum(slabs) <= self._pool.slabs

    def _staying(self) -> Iterator[Cell]:
        """Cells that no eviction frees: private ones, pinned blocks, and what those follow."""
        yield from self._private
        seen: set[int] = set()
        for block in self._pinned.values():
            at: Block | None = block
            while at is not None and id(at) not in seen:
                seen.add(id(at))
                yield at.cell
                at = at.parent

    def take_private(self, size: int, count: int) -> list[Cell] | None:
        """`count` cells that are nobody's block, evicting blocks for them; None, with nothing taken: no room.

        Where there cannot be enough, nothing is evicted either.
        """
        if not self.has_room([(size, count)]):
            return None
        cells: list[Cell] = []
        while len(cells) < count:
            cell = self._room(size)
            if cell is None:
                self.give_private(cells)
                return None
            self._private.add(cell)
            cells.append(cell)
        return cells

    def give_private(self, cells: Iterable[Cell]) -> None:
        """Return them."""
        for cell in cells:
            self._private.remove(cell)
            self._give(cell)

    # --- inside

    def _room(self, size: int) -> Cell | None:
        if not self._pool.cells_per_slab(size):
            return None
        while (cell := self._pool.take(size)) is None:
            moves = self._pool.compact(self._is_fixed)
            for move in moves:
                self._move(move)
                block = self._by_cell.pop(move.source.offset)
                block.cell = move.target
                self._by_cell[move.target.offset] = block
            self.counts.moved += len(moves)
            if not moves and not self._evict():
                return None
        return cell

    def _is_fixed(self, cell: Cell) -> bool:
        return cell in self._private or self._by_cell[cell.offset].pins > 0

    def _evict(self) -> bool:
        while self._queue:
            _, priority, stamp, block = heapq.heappop(self._queue)
            if stamp != block.stamp:
                continue
            self._age = max(self._age, priority)
            if block.parent is not None:
                self._orphan(block.parent, block.key)
            self._forget(block)
            self.counts.evicted += 1
            return True
        return False

    def _is_leaf(self, block: Block) -> bool:
        return block.state == "host" and not block.children and not block.pins

    def _orphan(self, parent: Block, key: bytes) -> None:
        parent.children.discard(key)
        self._offer(parent)

    def _rank(self, block: Block) -> None:
        chance = (block.hits + 1) / (block.hits + 2)  # rule of succession
        worth = self._cost(block.descriptor.model) * self._spared_tokens(block)
        block.priority = self._age + chance * worth / block.cell.size
        self._offer(block)

    def _spared_tokens(self, block: Block) -> int:
        """Whose recomputation the block spares: its own, a state's all back to the state before it."""
        if block.descriptor.family != "recurrent":
            return block.tokens
        if block.parent is not None and block.parent.descriptor.family == "recurrent":
            return self._spared_tokens(block.parent)
        tokens, at = 0, block.parent
        while at is not None and (at is block.parent or not self._ends_in_state(at)):
            tokens, at = tokens + at.tokens, at.parent
        return tokens

    def _ends_in_state(self, block: Block) -> bool:
        return block.descriptor.family == "recurrent" or any(
            self._blocks[key].descriptor.family == "recurrent" for key in block.children if key in self._blocks
        )

    def _offer(self, block: Block) -> None:
        """Put a leaf into the queue as it stands now."""
        self._withdraw(block)
        if not self._is_leaf(block):
            return
        self._stamp += 1
        block.stamp = self._stamp
        self._queued += 1
        priority = block.priority if block.descriptor.complete else 0.0  # nothing ends here any more
        heapq.heappush(self._queue, (block.refs > 0, priority, block.stamp, block))
        if len(self._queue) > 64 + 2 * self._queued:  # so that finding a leaf costs its logarithm, whatever is void
            self._queue = [entry for entry in self._queue if entry[2] == entry[3].stamp]
            heapq.heapify(self._queue)

    def _withdraw(self, block: Block) -> None:
        """Its entry in the queue is void."""
        if block.stamp:
            block.stamp = 0
            self._queued -= 1

    def _forget(self, block: Block) -> None:
        del self._blocks[block.key]
        self._withdraw(block)
        if block.state == "host":
            self._tokens[block.descriptor.model] -= block.tokens
        block.state, block.parent = "gone", None
        if not block.pins:
            self._free(block)

    def _free(self, block: Block) -> None:
        del self._by_cell[block.cell.offset]
        self._give(block.cell)

    def _give(self, cell: Cell) -> None:
        if self._freed is not None:
            self._freed(cell)
        self._pool.give(cell)

    def check(self) -> str:
        """What is wrong with the books; "" if nothing."""
        for block in self._blocks.values():
            if wrong := self._wrong(block):
                return wrong
        zombies = [b for b in self._by_cell.values() if b.state == "gone"]
        if any(not b.pins for b in zombies) or len(self._by_cell) != len(self._blocks) + len(zombies):
            return "cells of blocks that are gone were not freed"
        if {id(b) for b in self._by_cell.values() if b.pins} != self._pinned.keys():
            return "the pinned blocks are not those that have pins"
        held = sum(b.cell.size for b in self._by_cell.values()) + sum(c.size for c in self._private)
        if held != self._pool.taken_bytes:
            return f"{self._pool.taken_bytes} B are taken, {held} B held"
        queued = [id(e[3]) for e in self._queue if e[2] == e[3].stamp]
        leaves = sorted(id(b) for b in self._blocks.values() if self._is_leaf(b))
        if sorted(queued) != leaves or len(queued) != self._queued:
            return f"{len(leaves)} leaves can go, {len(queued)} are queued for it, {self._queued} were counted"
        return self._pool.check()

    def _wrong(self, block: Block) -> str:
        if block.parent is not None and (
            block.key not in block.parent.children or self._blocks.get(block.parent.key) is not block.parent
        ):
            return f"a block at depth {block.depth} hangs in the air"
        if any(key not in self._blocks for key in block.children):
            return f"a block at depth {block.depth} has a child that is not there"
        return "" if self._by_cell.get(block.cell.offset) is block else "a block's cell is another's"
