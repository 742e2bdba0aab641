"""Where the next model's weights are staged, and in which order a switch gathers them (3.5, 4.4). Pure: bytes only.

The device buffer of the active model is [weights | KV segments, ascending | gap]. Chunks of the next model's image are
written into the gap and into the high pages of every KV segment. With chunks ascending in the buffer as they ascend in
the image, a chunk never lies below its place in the image: the chunks before it lie below it and do not overlap. So a
gather that goes upwards never overwrites a chunk that it has still to read; only a chunk that overlaps its own place
needs a bounce. Copies from host may run beside the gather: each waits for the moves whose source it overwrites.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

GAP_PAGE = 1 << 62
"""The page of a chunk in the gap, which no KV allocation ever takes."""
MAX_MERGED = 8
"""Most chunks in one copy of a switch."""

PathClass = Literal["d2d", "partial", "h2d"]


class Segment(NamedTuple):
    """One KV tensor in the buffer: bytes [base, base + pages x page_bytes)."""

    base: int
    page_bytes: int


class Chunk(NamedTuple):
    """Bytes [target, target + size) of the image, staged at [source, source + size) of the buffer."""

    source: int
    target: int
    size: int
    page: int
    """The lowest KV page that it touches; `GAP_PAGE` in the gap."""


@dataclass(frozen=True, slots=True)
class StagePlan:
    """Chunks, ascending both in the buffer and in the image, which they cover from 0 on without holes."""

    weight_bytes: int
    chunks: tuple[Chunk, ...]
    pages: tuple[int, ...]
    """KV pages that no call may have while chunks are written there, ascending."""

    @property
    def covered_bytes(self) -> int:
        """Bytes of the image that have a chunk; the rest comes from host at the switch."""
        return sum(chunk.size for chunk in self.chunks)


class Move(NamedTuple):
    """A copy within the buffer; `bounce`: source and target overlap, so it goes through a buffer of its own."""

    source: int
    target: int
    size: int
    bounce: bool


class Load(NamedTuple):
    """A copy of [offset, offset + size) of the image to the same place in the buffer, once `after` moves are done."""

    offset: int
    size: int
    after: int


@dataclass(frozen=True, slots=True)
class SwitchPlan:
    """How a switch makes the buffer's low end equal to the image. Moves go one after the other, in this order.

    Loads go in their order beside the moves. moved + loaded = the weights' bytes, and loaded = dirty + missing.
    """

    moves: tuple[Move, ...]
    loads: tuple[Load, ...]
    d2d_bytes: int
    h2d_bytes: int
    dirty_bytes: int
    """Staged, then overwritten by KV."""
    missing_bytes: int
    """Never staged."""

    @property
    def path(self) -> PathClass:
        """Path class of appendix D."""
        if not self.h2d_bytes:
            return "d2d"
        return "partial" if self.d2d_bytes else "h2d"


def stage_plan(
    weight_bytes: int,
    segments: Sequence[Segment],
    free_pages: Sequence[int],
    gap: tuple[int, int],
    *,
    chunk_bytes: int,
    least_bytes: int = 1,
) -> StagePlan:
    """Chunks for an image of `weight_bytes`: as much as possible in the gap, the rest in the highest free pages.

    Args:
        weight_bytes: size of the image.
        segments: the active model's KV tensors, ascending.
        free_pages: pages that hold nothing, ascending; fewer are used if fewer suffice, the highest ones.
        gap: [from, to) of the buffer above everything of the active model.
        chunk_bytes: size of a chunk; the last one of a stretch is shorter.
        least_bytes: stretches of free pages that are shorter in some segment are left alone.
    """
    in_gap = min(weight_bytes, max(0, gap[1] - gap[0]))
    runs = _runs(weight_bytes - in_gap, segments, free_pages, least_bytes)
    chunks: list[Chunk] = []
    target, left = 0, weight_bytes - in_gap
    for segment in segments:
        for first, last in runs:
            size = min(left, (last - first + 1) * segment.page_bytes)
            start = segment.base + first * segment.page_bytes
            for at, n in _pieces(0, size, chunk_bytes):
                chunks.append(Chunk(start + at, target + at, n, first + at // segment.page_bytes))
            target, left = target + size, left - size
    in_gap = min(in_gap, weight_bytes - target)
    for at, n in _pieces(0, in_gap, chunk_bytes):
        chunks.append(Chunk(gap[1] - in_gap + at, target + at, n, GAP_PAGE))
    return StagePlan(weight_bytes, tuple(chunks), tuple(p for a, b in runs for p in range(a, b + 1)))


def _runs(need: int, segments: Sequence[Segment], free: Sequence[int], least: int) -> list[tuple[int, int]]:
    """Stretches of free pages [first, last] that hold `need` bytes, the highest, ascending."""
    if need <= 0 or not segments:
        return []
    stretches: list[list[int]] = []
    for page in free:
        if stretches and page == stretches[-1][1] + 1:
            stretches[-1][1] = page
        else:
            stretches.append([page, page])
    shortest = -(-least // min(segment.page_bytes for segment in segments))
    left = -(-need // sum(segment.page_bytes for segment in segments))
    chosen: list[tuple[int, int]] = []
    for first, last in reversed(stretches):
        if last - first + 1 < shortest or left <= 0:
            continue
        first = max(first, last - left + 1)  # noqa: PLW2901 - the low end of the last stretch stays with the calls
        chosen.append((first, last))
        left -= last - first + 1
    return chosen[::-1]


def _pieces(start: int, size: int, most: int) -> Iterator[tuple[int, int]]:
    for at in range(start, start + size, most):
        yield at, min(most, start + size - at)


def switch_plan(plan: StagePlan, clean: Sequence[bool], dirty: Sequence[bool], *, chunk_bytes: int) -> SwitchPlan:
    """The copies of a switch.

    Args:
        plan: what was to be staged.
        clean: per chunk, whether it holds its part of the image.
        dirty: per chunk, whether it did and has been overwritten; only told apart for the account.
        chunk_bytes: granularity at which loads wait for moves.
    """
    moves = _moves([chunk for chunk, good in zip(plan.chunks, clean, strict=True) if good])
    holes = [(c.target, c.size) for c, good in zip(plan.chunks, clean, strict=True) if not good]
    covered = plan.covered_bytes
    if covered < plan.weight_bytes:
        holes.append((covered, plan.weight_bytes - covered))
    lost = sum(c.size for c, spoilt in zip(plan.chunks, dirty, strict=True) if spoilt)
    h2d = sum(size for _, size in holes)
    return SwitchPlan(
        moves=moves,
        loads=_loads(holes, moves, chunk_bytes),
        d2d_bytes=plan.weight_bytes - h2d,
        h2d_bytes=h2d,
        dirty_bytes=lost,
        missing_bytes=h2d - lost,
    )


def _moves(chunks: Sequence[Chunk]) -> tuple[Move, ...]:
    """One per chunk, neighbours merged while that makes no bounce."""
    moves: list[Move] = []
    merged = 0
    for source, target, size, _ in chunks:
        last = moves[-1] if moves else None
        if (
            last is not None
            and merged < MAX_MERGED
            and not last.bounce
            and last.source + last.size == source
            and last.target + last.size == target
            and last.target + last.size + size <= last.source
        ):
            moves[-1] = last._replace(size=last.size + size)
            merged += 1
        else:
            moves.append(Move(source, target, size, bounce=target < source < target + size))
            merged = 1
    return tuple(moves)


def _loads(holes: Sequence[tuple[int, int]], moves: Sequence[Move], chunk_bytes: int) -> tuple[Load, ...]:
    sources = [move.source for move in moves]
    loads: list[Load] = []
    for start, size in holes:
        for offset, n in _pieces(start, size, chunk_bytes):
            last = bisect_left(sources, offset + n)  # moves before it start below the piece's end
            after = last if last and moves[last - 1].source + moves[last - 1].size > offset else 0
            before = loads[-1] if loads else None
            if (
                before is not None
                and before.after == after
                and before.offset + before.size == offset
                and before.size < MAX_MERGED * chunk_bytes
            ):
                loads[-1] = before._replace(size=before.size + n)
            else:
                loads.append(Load(offset, n, after))
    return tuple(sorted(loads, key=lambda load: (load.after, load.offset)))
