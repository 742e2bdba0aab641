"""Staging and gather plans against a byte array: whatever the order in which copies complete, the image comes out."""

from __future__ import annotations

from itertools import product
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from talaria_gpu.staging.chunks import ChunkMap, State
from talaria_gpu.staging.plan import GAP_PAGE, Segment, StagePlan, SwitchPlan, stage_plan, switch_plan

GARBAGE = 255


def layout(weights: int, segment_pages: int, page_bytes: list[int], gap: int) -> tuple[list[Segment], tuple[int, int]]:
    """The active model's buffer: its weights, KV segments with unequal pages, a gap."""
    segments, base = [], weights
    for size in page_bytes:
        segments.append(Segment(base, size))
        base += size * segment_pages
    return segments, (base, base + gap)


def overlap(a: int, an: int, b: int, bn: int) -> bool:
    return a < b + bn and b < a + an


def check_shape(plan: StagePlan, segments: list[Segment], pages: int, free: list[int], gap: tuple[int, int]) -> None:
    """Chunks are disjoint, ascend, cover the image from 0 on, and touch free pages and the gap only."""
    at, end = 0, 0
    for chunk in plan.chunks:
        assert chunk.size > 0
        assert chunk.target == at
        assert chunk.source >= max(end, chunk.target)
        at, end = at + chunk.size, chunk.source + chunk.size
        touched = {
            page
            for base, size in segments
            for page in range(pages)
            if overlap(chunk.source, chunk.size, base + page * size, size)
        }
        assert touched <= set(plan.pages)
        assert min(touched, default=GAP_PAGE) == chunk.page
        if not touched:
            assert gap[0] <= chunk.source <= chunk.source + chunk.size <= gap[1]
    assert set(plan.pages) <= set(free)
    assert list(plan.pages) == sorted(plan.pages)
    assert at == plan.covered_bytes <= plan.weight_bytes


def check_account(plan: SwitchPlan, weight_bytes: int) -> None:
    assert plan.d2d_bytes + plan.h2d_bytes == weight_bytes
    assert plan.dirty_bytes + plan.missing_bytes == plan.h2d_bytes
    assert sum(m.size for m in plan.moves) == plan.d2d_bytes
    assert sum(load.size for load in plan.loads) == plan.h2d_bytes
    expected = "d2d" if not plan.h2d_bytes else "partial" if plan.d2d_bytes else "h2d"
    assert plan.path == expected


def check_beside(plan: SwitchPlan) -> None:
    """A load touches nothing that a move which may run at the same time reads or writes."""
    for load in plan.loads:
        for index, move in enumerate(plan.moves):
            assert not overlap(load.offset, load.size, move.target, move.size)
            if index >= load.after:
                assert not overlap(load.offset, load.size, move.source, move.size)


def apply_move(buffer: bytearray, source: int, target: int, size: int, *, bounce: bool) -> None:
    if bounce:
        buffer[target : target + size] = buffer[source : source + size]
        return
    for i in reversed(range(size)):  # any order of bytes must do: this one is the worst for an overlap
        buffer[target + i] = buffer[source + i]


def execute(plan: SwitchPlan, buffer: bytearray, image: bytes, moves_before: list[int]) -> None:
    """Each load runs when `moves_before[i]` moves are done; they never fall."""
    done = 0
    for load, wanted in zip(plan.loads, moves_before, strict=True):
        while done < wanted:
            move = plan.moves[done]
            apply_move(buffer, move.source, move.target, move.size, bounce=move.bounce)
            done += 1
        buffer[load.offset : load.offset + load.size] = image[load.offset : load.offset + load.size]
    for move in plan.moves[done:]:
        apply_move(buffer, move.source, move.target, move.size, bounce=move.bounce)


def schedules(plan: SwitchPlan) -> list[list[int]]:
    """Every order in which loads can complete among moves; up to 120 of them, spread evenly."""
    found: list[list[int]] = [[]]
    for load in plan.loads:
        found = [
            [*before, at]
            for before in found
            for at in range(max(load.after, before[-1] if before else 0), len(plan.moves) + 1)
        ]
        if len(found) > 120:
            found = found[:: len(found) // 120 + 1] + found[-1:]
    return found


def run_all_orders(stage: StagePlan, states: list[State], image: bytes, size: int, chunk: int) -> None:
    plan = switch_plan(stage, [s is State.CLEAN for s in states], [s is State.DIRTY for s in states], chunk_bytes=chunk)
    check_account(plan, len(image))
    check_beside(plan)
    start = bytearray([GARBAGE]) * size
    for piece, state in zip(stage.chunks, states, strict=True):
        if state is State.CLEAN:
            start[piece.source : piece.source + piece.size] = image[piece.target : piece.target + piece.size]
    for schedule in schedules(plan):
        buffer = bytearray(start)
        execute(plan, buffer, image, schedule)
        assert buffer[: len(image)] == image, (stage, plan, schedule)


@pytest.mark.parametrize("source_weights", [0, 1, 3, 9])
@pytest.mark.parametrize("gap", [0, 2, 5])
def test_small_cases_exhaustively(source_weights, gap):
    """Every image size, every choice of free pages, every mix of clean, dirty and missing chunks."""
    checked = 0
    for page_bytes, chunk in product(([1], [2, 1], [1, 3]), (1, 2, 5)):
        pages = 4
        segments, hole = layout(source_weights, pages, page_bytes, gap)
        for weight_bytes in range(1, hole[1] + 1):
            image = bytes(range(1, weight_bytes + 1))
            for free in product([False, True], repeat=pages - 1):
                pages_free = [p + 1 for p, yes in enumerate(free) if yes]
                stage = stage_plan(weight_bytes, segments, pages_free, hole, chunk_bytes=chunk)
                check_shape(stage, segments, pages, pages_free, hole)
                n = len(stage.chunks)
                mixes = list(product([State.MISSING, State.CLEAN, State.DIRTY], repeat=n)) if n <= 3 else []
                random = Random(weight_bytes * 31 + n)
                mixes += [tuple(random.choices([State.CLEAN, State.DIRTY], k=n)) for _ in range(2)]
                mixes.append((State.CLEAN,) * n)
                for states in mixes:
                    run_all_orders(stage, list(states), image, hole[1], chunk)
                    checked += 1
    assert checked > 500


@st.composite
def cases(draw):
    pages = draw(st.integers(2, 12))
    page_bytes = draw(st.lists(st.integers(1, 40), min_size=1, max_size=6))
    segments, gap = layout(draw(st.integers(0, 300)), pages, page_bytes, draw(st.integers(0, 200)))
    free = sorted(draw(st.sets(st.integers(1, pages - 1))))
    return {
        "pages": pages,
        "segments": segments,
        "gap": gap,
        "free": free,
        "weight_bytes": draw(st.integers(1, max(1, gap[1]))),
        "chunk": draw(st.integers(1, 70)),
        "least": draw(st.integers(1, 60)),
    }


@settings(max_examples=80, deadline=None)
@given(case=cases(), data=st.data())
def test_any_layout_and_any_life(case, data):  # noqa: C901 - one life, every event in it
    """Write, take pages back, stop, gather: in any order. Staged, dirty and missing bytes make up the weights."""
    random = data.draw(st.randoms(use_true_random=False))
    size = max(case["gap"][1], case["weight_bytes"])
    image = bytes(i % 251 + 1 for i in range(case["weight_bytes"]))
    stage = stage_plan(
        case["weight_bytes"],
        case["segments"],
        case["free"],
        case["gap"],
        chunk_bytes=case["chunk"],
        least_bytes=case["least"],
    )
    check_shape(stage, case["segments"], case["pages"], case["free"], case["gap"])
    chunks = ChunkMap(stage)
    buffer = bytearray([GARBAGE]) * size
    leased, writing = list(stage.pages), []
    for _ in range(random.randrange(3 * len(stage.chunks) + 4)):
        what = random.random()
        if what < 0.5 and (index := chunks.begin()) is not None:
            writing.append(index)
        elif what < 0.8 and writing:
            index = writing.pop(random.randrange(len(writing)))
            piece = stage.chunks[index]
            buffer[piece.source : piece.source + piece.size] = image[piece.target : piece.target + piece.size]
            chunks.written(index)
        elif what < 0.95 and leased:
            taken = leased[: random.randint(1, len(leased))]
            if chunks.is_writing_below(taken[-1] + 1):
                with pytest.raises(RuntimeError, match="being written"):
                    chunks.reclaim(taken[-1] + 1)
                continue
            chunks.reclaim(taken[-1] + 1)
            del leased[: len(taken)]
            for base, page_bytes in case["segments"]:
                for page in taken:
                    buffer[base + page * page_bytes : base + (page + 1) * page_bytes] = b"\xfe" * page_bytes
    chunks.stop()
    assert chunks.begin() is None
    if writing:
        with pytest.raises(RuntimeError, match="still being written"):
            chunks.switch_plan(case["chunk"])
    for index in writing:
        chunks.failed(index)
    assert chunks.is_complete
    for piece, state in zip(stage.chunks, chunks.states, strict=True):
        held = buffer[piece.source : piece.source + piece.size]
        assert state is not State.CLEAN or held == image[piece.target : piece.target + piece.size]
    plan = chunks.switch_plan(case["chunk"])
    check_account(plan, len(image))
    assert plan.d2d_bytes == chunks.bytes_in(State.CLEAN)
    assert plan.dirty_bytes == chunks.bytes_in(State.DIRTY)
    assert plan.missing_bytes == chunks.bytes_in(State.MISSING)
    check_beside(plan)
    at = [max(load.after, random.randint(0, len(plan.moves))) for load in plan.loads]
    execute(plan, buffer, image, [max(at[: i + 1]) for i in range(len(at))])
    assert buffer[: len(image)] == image


def test_the_gap_and_the_highest_pages_are_used_first():
    segments, gap = layout(100, 10, [10, 10], 30)
    stage = stage_plan(70, segments, range(1, 10), gap, chunk_bytes=10)
    assert stage.pages == (8, 9)
    assert [c.source for c in stage.chunks] == [180, 190, 280, 290, 300, 310, 320]
    assert [c.page for c in stage.chunks] == [8, 9, 8, 9, GAP_PAGE, GAP_PAGE, GAP_PAGE]


def test_short_stretches_are_left_alone():
    segments, gap = layout(100, 10, [10], 0)
    stage = stage_plan(70, segments, [2, 3, 5, 7, 8, 9], gap, chunk_bytes=10, least_bytes=20)
    assert stage.pages == (2, 3, 7, 8, 9)


def test_low_pages_are_written_last():
    segments, gap = layout(100, 10, [10, 10], 10)
    chunks = ChunkMap(stage_plan(70, segments, range(1, 10), gap, chunk_bytes=10))
    order = []
    while (index := chunks.begin()) is not None:
        order.append(chunks.plan.chunks[index].page)
        chunks.written(index)
    assert order == sorted(order, reverse=True)
    assert chunks.reclaim(8) == 20
    assert chunks.reclaim(8) == 0
    assert chunks.bytes_in(State.DIRTY) == 20


def test_neighbouring_chunks_are_copied_as_one():
    segments, gap = layout(1000, 100, [10], 0)
    stage = stage_plan(400, segments, range(50, 100), gap, chunk_bytes=10)
    n = len(stage.chunks)
    plan = switch_plan(stage, [True] * n, [False] * n, chunk_bytes=10)
    assert len(plan.moves) == -(-n // 8)
    assert not plan.loads
