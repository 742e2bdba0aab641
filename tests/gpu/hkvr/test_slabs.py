"""One pool for cells of any size: exact books, nothing lost to slabs of another size."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from talaria_gpu.hkvr.slabs import Cell, SlabPool


def test_a_freed_slab_serves_another_size():
    pool = SlabPool(4096, 1024)
    small = [pool.take(256) for _ in range(16)]
    assert pool.take(512) is None
    for cell in small[4:8]:
        pool.give(cell)
    assert pool.take(512) == Cell(1024, 512)


def test_compaction_wins_a_slab_back_from_gaps():
    pool = SlabPool(2048, 1024)
    cells = [pool.take(256) for _ in range(8)]
    for cell in (cells[0], cells[2], cells[4], cells[6]):
        pool.give(cell)
    assert pool.take(1024) is None
    moves = pool.compact(lambda cell: cell.offset < 1024)
    assert [m.source for m in moves] == [cells[5], cells[7]]
    assert {m.target for m in moves} == {cells[0], cells[2]}
    assert pool.take(1024) == Cell(1024, 1024)
    assert pool.check() == ""


def test_fixed_cells_stay():
    pool = SlabPool(2048, 1024)
    cells = [pool.take(256) for _ in range(8)]
    for cell in cells[::2]:
        pool.give(cell)
    assert pool.compact(lambda _: True) == []
    assert pool.check() == ""


@pytest.mark.parametrize("cell", [Cell(0, 256), Cell(64, 256), Cell(0, 128)])
def test_only_what_is_taken_can_be_given(cell):
    pool = SlabPool(2048, 1024)
    pool.give(pool.take(256))
    with pytest.raises(ValueError, match="not taken"):
        pool.give(cell)


def test_a_slab_larger_than_the_pool_is_refused():
    with pytest.raises(ValueError, match="do not fit"):
        SlabPool(100, 101)


@given(
    st.lists(
        st.tuples(st.sampled_from(["take", "give", "compact"]), st.sampled_from([100, 300, 512]), st.integers(0, 99))
    )
)
def test_no_two_cells_overlap_and_the_books_add_up(actions):
    pool, held = SlabPool(8192, 1024), []
    for what, size, pick in actions:
        if what == "take":
            cell = pool.take(size)
            if cell is not None:
                held.append(cell)
        elif what == "give" and held:
            pool.give(held.pop(pick % len(held)))
        elif what == "compact":
            fixed = {cell for cell in held if cell.offset % 7 == pick % 7}
            before = pool.free_slabs
            moves = pool.compact(lambda cell, fixed=fixed: cell in fixed)
            assert not fixed & {m.source for m in moves}
            for move in moves:
                held[held.index(move.source)] = move.target
            assert pool.free_slabs == before + bool(moves)
        assert pool.check() == ""
        ends = sorted((c.offset, c.offset + c.size) for c in held)
        assert all(a[1] <= b[0] for a, b in pairwise(ends))
        assert pool.taken_bytes == sum(c.size for c in held)
