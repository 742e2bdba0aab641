"""Rows on the device <-> blocks in host memory: layer-first there, page-first here (appendix C).

With torch's own copies, which run on every device. Where rows follow each other and so do cells, a whole run of blocks
is one strided copy per segment, straight from one memory to the other; scattered rows are gathered on the device first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from talaria_gpu.hkvr.descriptor import KvDescriptor
from talaria_gpu.hkvr.slabs import Cell


@dataclass(frozen=True, slots=True)
class DeviceKv:
    """A model's KV pool as this package sees it."""

    descriptor: KvDescriptor
    segments: tuple[torch.Tensor, ...]
    """uint8 [rows, row bytes] each, over the model's own KV tensors; addresses never change."""


class Piece(NamedTuple):
    """Tokens [skip, skip + len(rows)) of one block, and the device rows that hold them."""

    cell: Cell
    rows: torch.Tensor
    """int64 [tokens], on the CPU."""
    skip: int = 0


class _Run(NamedTuple):
    """Pieces that can be copied together: whole blocks in adjacent cells, or one piece."""

    offset: int
    blocks: int
    skip: int
    tokens: int
    rows: torch.Tensor
    first_row: int
    """Of rows that follow each other; -1: they do not."""


def device_to_host(kv: DeviceKv, pool: torch.Tensor, pieces: Sequence[Piece]) -> int:
    """Copy rows into cells; returns bytes. Whether it has completed is the stream's business."""
    for run in _runs(kv.descriptor, pieces):
        for (at, width), rows in zip(kv.descriptor.fragments(), kv.segments, strict=True):
            target = _fragment(pool, kv.descriptor, run, at, width)
            if run.first_row >= 0:
                target.copy_(rows[run.first_row : run.first_row + run.tokens].view(target.shape), non_blocking=True)
            else:
                gathered = rows.index_select(0, run.rows.to(rows.device, non_blocking=True))
                target.copy_(gathered.view(target.shape), non_blocking=True)
    return _bytes(kv, pieces)


def host_to_device(kv: DeviceKv, pool: torch.Tensor, pieces: Sequence[Piece]) -> int:
    """Copy cells into rows; returns bytes."""
    for run in _runs(kv.descriptor, pieces):
        for (at, width), rows in zip(kv.descriptor.fragments(), kv.segments, strict=True):
            source = _fragment(pool, kv.descriptor, run, at, width)
            if run.first_row >= 0:
                rows[run.first_row : run.first_row + run.tokens].view(source.shape).copy_(source, non_blocking=True)
            else:
                moved = source.reshape(run.tokens, width).to(rows.device, non_blocking=True)
                into, moved = _wide(rows, moved)
                into.index_copy_(0, run.rows.to(rows.device, non_blocking=True), moved)
    return _bytes(kv, pieces)


def _wide(*both: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The same rows as 8-byte words where all are made of such: torch scatters element by element."""
    aligned = all(rows.shape[1] % 8 == 0 and rows.storage_offset() % 8 == 0 for rows in both)
    return tuple(rows.view(torch.int64) for rows in both) if aligned else both


def _bytes(kv: DeviceKv, pieces: Sequence[Piece]) -> int:
    return sum(len(p.rows) for p in pieces) * kv.descriptor.bytes_per_token


def _fragment(pool: torch.Tensor, descriptor: KvDescriptor, run: _Run, at: int, width: int) -> torch.Tensor:
    """A segment's bytes of a run, [blocks, bytes]."""
    size = descriptor.block_bytes
    start = at + run.skip * width
    length = run.tokens // run.blocks * width
    return pool[run.offset : run.offset + run.blocks * size].view(run.blocks, size)[:, start : start + length]


def _runs(descriptor: KvDescriptor, pieces: Sequence[Piece]) -> list[_Run]:
    """Group pieces: neighbours in order, all whole, in adjacent cells, with rows of one kind."""
    runs: list[_Run] = []
    group: list[Piece] = []
    for piece in pieces:
        if group and not _joins(descriptor, group[-1], piece):
            runs.append(_run(group))
            group = []
        group.append(piece)
    if group:
        runs.append(_run(group))
    return runs


def _joins(descriptor: KvDescriptor, before: Piece, piece: Piece) -> bool:
    full = descriptor.block_tokens
    if len(before.rows) != full or len(piece.rows) != full:
        return False
    if before.cell.offset + before.cell.size != piece.cell.offset:
        return False
    return bool(piece.rows[0] == before.rows[-1] + 1) == _is_range(before.rows) == _is_range(piece.rows)


def _is_range(rows: torch.Tensor) -> bool:
    first, last = int(rows[0]), int(rows[-1])
    return last - first == len(rows) - 1 and bool((rows[1:] == rows[:-1] + 1).all())


def _run(group: list[Piece]) -> _Run:
    rows = torch.cat([p.rows for p in group]) if len(group) > 1 else group[0].rows
    first = group[0]
    return _Run(
        offset=first.cell.offset,
        blocks=len(group),
        skip=first.skip,
        tokens=len(rows),
        rows=rows,
        first_row=int(rows[0]) if _is_range(rows) else -1,
    )
