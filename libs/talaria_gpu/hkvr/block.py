"""A block of the registry, and what the registry counts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from talaria_gpu.hkvr.descriptor import KvDescriptor
from talaria_gpu.hkvr.slabs import Cell


@dataclass(slots=True, eq=False)
class Block:
    """One block of one prefix."""

    key: bytes
    descriptor: KvDescriptor
    parent: Block | None
    depth: int
    """Blocks before it."""
    cell: Cell
    tokens: int
    """That it holds: a hybrid's last block may hold fewer than the descriptor's; a part of a state holds none."""
    state: Literal["copying", "host", "gone"] = "copying"
    pins: int = 1
    refs: int = 0
    hits: int = 0
    priority: float = 0.0
    checksum: int = 0
    children: set[bytes] = field(default_factory=set)
    stamp: int = 0
    """Of its entry in the eviction queue; 0: it has none."""

    @property
    def end_tokens(self) -> int:
        """Length of the prefix that ends with it; meaningless for parts of states."""
        return self.depth * self.descriptor.block_tokens + self.tokens


@dataclass(slots=True)
class Counts:
    """Since the start, in blocks unless they say otherwise."""

    saved: int = 0
    restored: int = 0
    restored_tokens: int = 0
    evicted: int = 0
    refused: int = 0
    """Not saved: the pool was full of what must not go."""
    corrupt: int = 0
    """Restores that were cut short: a checksum differed, and what follows was dropped."""
    disagreed: int = 0
    """Prefixes that were cut short: not all ranks had the same, and what follows was dropped."""
    failed: int = 0
    """Dropped, or not restored: the copy did not complete."""
    moved: int = 0
