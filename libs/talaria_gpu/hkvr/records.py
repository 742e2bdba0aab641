"""What `HostKv` takes and gives: saves, restores and parked rows under way, and its figures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from talaria_gpu.hkvr.block import Block, Counts
from talaria_gpu.hkvr.transfer import DeviceKv, Piece
from talaria_gpu.streams import Transfer


class Snapshot(NamedTuple):
    """A hybrid's recurrent state, at the exact end of the rows that are saved with it."""

    parts: tuple[DeviceKv, ...]
    end: bytes
    """Name of the whole prefix: `BlockKeys.exact`."""
    slot: torch.Tensor
    """int64 [1] on the CPU."""


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
    whole: bool
    """A hybrid's: with a state behind it, it is of use only as a whole."""
    good: list[int] = field(default_factory=list)
    """Tokens of each block that arrived and was found intact, in order."""
    failed: bool = False
    """Known at the end: on some rank the copy did not complete. Its blocks stay: nothing is known against them."""


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
