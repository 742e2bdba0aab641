"""Rows on the device <-> blocks in host memory: layer-first there, page-first here (appendix C).

Layers that lie at equal distances are moved together: between two memories that the CPU can address, a whole stretch of
blocks is one strided copy. Over a link, blocks are put together on the device first, so that what crosses it is
contiguous on both sides.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from talaria_gpu.hkvr.descriptor import KvDescriptor
from talaria_gpu.hkvr.slabs import Cell

LEAST_COPY_BYTES = 64 << 10
"""Copies that would be smaller on average are left to one that gathers or scatters row by row."""
SCRATCH_BYTES = 32 << 20
"""Of blocks that are put together, or taken apart, on the device at a time."""


class Stack(NamedTuple):
    """Neighbouring segments that can be moved in one copy."""

    start: int
    """First byte of their fragments in a block."""
    rows: torch.Tensor
    """uint8 [segments, rows, row bytes], over the model's own tensors."""


@dataclass(frozen=True, slots=True)
class DeviceKv:
    """A model's KV pool as this package sees it."""

    descriptor: KvDescriptor
    segments: tuple[torch.Tensor, ...]
    """uint8 [rows, row bytes] each, over the model's own KV tensors; addresses never change."""
    stacks: tuple[Stack, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "stacks", tuple(_stacks(self.descriptor, self.segments)))


class Piece(NamedTuple):
    """Tokens [skip, skip + len(rows)) of one block, and the device rows that hold them."""

    cell: Cell
    rows: torch.Tensor
    """int64 [tokens], on the CPU."""
    skip: int = 0


class _Run(NamedTuple):
    """Pieces that are copied together: whole blocks in adjacent cells, or a part of one."""

    offset: int
    blocks: int
    skip: int
    rows: np.ndarray[Any, Any]
    """int64 [blocks x tokens per block]."""

    @property
    def tokens(self) -> int:
        """Of each block."""
        return len(self.rows) // self.blocks


def device_to_host(kv: DeviceKv, pool: torch.Tensor, pieces: Sequence[Piece]) -> None:
    """Copy rows into cells of `pool`. On CUDA whether it has completed is the current stream's business."""
    local = kv.segments[0].device.type == "cpu"
    for run in _runs(kv.descriptor, pieces):
        if local:
            for stack in kv.stacks:
                _gather(stack, run, _fragments(pool, kv.descriptor, run, stack))
        else:
            _download(kv, run, pool)


def host_to_device(kv: DeviceKv, pool: torch.Tensor, pieces: Sequence[Piece]) -> None:
    """Copy cells of `pool` into rows."""
    local = kv.segments[0].device.type == "cpu"
    for run in _runs(kv.descriptor, pieces):
        if local:
            for stack in kv.stacks:
                _scatter(stack, run, _fragments(pool, kv.descriptor, run, stack))
        else:
            _upload(kv, run, pool)


def _fragments(blocks: torch.Tensor, descriptor: KvDescriptor, run: _Run, stack: Stack) -> torch.Tensor:
    """A stack's bytes of a run, [segments, blocks, tokens, row bytes], within `blocks`, uint8 [bytes]."""
    count, _, width = stack.rows.shape
    strides = (descriptor.block_tokens * width, descriptor.block_bytes, width, 1)
    start = blocks.storage_offset() + run.offset + stack.start + run.skip * width
    return blocks.as_strided((count, run.blocks, run.tokens, width), strides, start)


# --- between two memories of the CPU


def _gather(stack: Stack, run: _Run, there: torch.Tensor) -> None:
    rectangles = _rectangles(stack, run)
    for first, count, row in rectangles:
        part = there[:, first : first + count]
        part.copy_(stack.rows[:, row : row + count * run.tokens].view(part.shape))
    if not rectangles:
        (source,) = _wide(stack.rows)
        picked = source.index_select(1, torch.from_numpy(run.rows))
        there.copy_(picked.view(torch.uint8).view(there.shape))


def _scatter(stack: Stack, run: _Run, there: torch.Tensor) -> None:
    rectangles = _rectangles(stack, run)
    for first, count, row in rectangles:
        part = there[:, first : first + count]
        stack.rows[:, row : row + count * run.tokens].view(part.shape).copy_(part)
    if not rectangles:
        into, moved = _wide(stack.rows, there.reshape(len(stack.rows), len(run.rows), -1))
        into.index_copy_(1, torch.from_numpy(run.rows), moved)


def _rectangles(stack: Stack, run: _Run) -> list[tuple[int, int, int]]:
    """Neighbouring blocks whose rows follow each other: (first block, how many, first row); [] where these are small.

    Each is one strided copy, which runs at the memory's own speed where there is enough in it.
    """
    table = run.rows.reshape(run.blocks, run.tokens)
    if not (table == table[:, :1] + np.arange(run.tokens)).all():
        return []
    firsts = table[:, 0]
    cuts = np.flatnonzero(firsts[1:] != firsts[:-1] + run.tokens) + 1
    starts = [0, *cuts.tolist()]
    count, total, width = stack.rows.shape
    if len(starts) > 1 and count * len(run.rows) * width < LEAST_COPY_BYTES * len(starts):
        return []
    if int(firsts.max()) + run.tokens > total:
        raise IndexError(f"rows up to {int(firsts.max()) + run.tokens - 1} of {total}")
    ends = [*starts[1:], run.blocks]
    return [(start, end - start, int(firsts[start])) for start, end in zip(starts, ends, strict=True)]


# --- over a link: blocks are put together on the device


def _download(kv: DeviceKv, run: _Run, pool: torch.Tensor) -> None:
    for part, scratch in _slices(kv, run):
        rows = torch.from_numpy(part.rows).to(scratch.device, non_blocking=True)
        for stack in kv.stacks:
            here = _fragments(scratch, kv.descriptor, part._replace(offset=0), stack)
            here.copy_(stack.rows.index_select(1, rows).view(here.shape))
        for source, target in _stretches(kv, part, scratch, pool):
            target.copy_(source, non_blocking=True)


def _upload(kv: DeviceKv, run: _Run, pool: torch.Tensor) -> None:
    for part, scratch in _slices(kv, run):
        for target, source in _stretches(kv, part, scratch, pool):
            target.copy_(source, non_blocking=True)
        rows = torch.from_numpy(part.rows).to(scratch.device, non_blocking=True)
        for stack in kv.stacks:
            here = _fragments(scratch, kv.descriptor, part._replace(offset=0), stack)
            into, moved = _wide(stack.rows, here.reshape(len(stack.rows), len(rows), -1))
            into.index_copy_(1, rows, moved)


def _slices(kv: DeviceKv, run: _Run) -> Iterator[tuple[_Run, torch.Tensor]]:
    """The run in stretches of so many blocks as fit the scratch memory, with that, uint8 [bytes]."""
    size, tokens = kv.descriptor.block_bytes, run.tokens
    most = max(1, SCRATCH_BYTES // size)
    for at in range(0, run.blocks, most):
        blocks = min(most, run.blocks - at)
        rows = run.rows[at * tokens : (at + blocks) * tokens]
        scratch = torch.empty(blocks * size, dtype=torch.uint8, device=kv.segments[0].device)
        yield run._replace(offset=run.offset + at * size, blocks=blocks, rows=rows), scratch


def _stretches(
    kv: DeviceKv, part: _Run, scratch: torch.Tensor, pool: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """What of the scratch goes where in the pool, contiguous on both sides: whole blocks at once, else each segment."""
    if part.tokens == kv.descriptor.block_tokens:
        yield scratch, pool[part.offset : part.offset + scratch.numel()]
        return
    for at, width in kv.descriptor.fragments():
        start, length = at + part.skip * width, part.tokens * width
        yield scratch[start : start + length], pool[part.offset + start : part.offset + start + length]


def _wide(*both: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The same rows as 8-byte words where all are made of such: torch scatters element by element."""
    numbers = [(t.shape[-1], t.storage_offset(), *t.stride()[:-1]) for t in both]
    aligned = not any(n % 8 for each in numbers for n in each)
    return tuple(t.view(torch.int64) for t in both) if aligned else both


# --- what is moved together


def _stacks(descriptor: KvDescriptor, segments: Sequence[torch.Tensor]) -> Iterator[Stack]:
    """Neighbouring segments of one shape, at equal distances in one storage."""
    starts = [at for at, _ in descriptor.fragments()]
    first = 0
    for index in range(1, len(segments) + 1):
        if index < len(segments) and _continues(segments[first : index + 1]):
            continue
        group = segments[first:index]
        distance = group[1].data_ptr() - group[0].data_ptr() if len(group) > 1 else group[0].numel()
        stacked = group[0].as_strided((len(group), *group[0].shape), (distance, *group[0].stride()))
        yield Stack(starts[first], stacked)
        first = index


def _continues(group: Sequence[torch.Tensor]) -> bool:
    a, b, last = group[0], group[1], group[-1]
    distance = b.data_ptr() - a.data_ptr()
    return bool(
        distance > 0
        and last.shape == a.shape
        and last.untyped_storage().data_ptr() == a.untyped_storage().data_ptr()
        and last.data_ptr() - a.data_ptr() == distance * (len(group) - 1)
    )


def _runs(descriptor: KvDescriptor, pieces: Sequence[Piece]) -> list[_Run]:
    """Group pieces: neighbours in order, all whole, in adjacent cells; each other one by itself."""
    size = descriptor.block_bytes
    runs: list[_Run] = []
    group: list[Piece] = []
    for piece in pieces:
        whole = len(piece.rows) == descriptor.block_tokens
        if group and not (whole and piece.cell.offset == group[-1].cell.offset + size):
            runs.append(_run(group))
            group = []
        if whole:
            group.append(piece)
        elif len(piece.rows):
            runs.append(_run([piece]))
    if group:
        runs.append(_run(group))
    return runs


def _run(group: Sequence[Piece]) -> _Run:
    first = group[0]
    rows = first.rows if len(group) == 1 else torch.cat([piece.rows for piece in group])
    return _Run(first.cell.offset, len(group), first.skip, rows.numpy())
