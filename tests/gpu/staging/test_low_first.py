"""The free list alone: ascending whatever comes back, and told before it does."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from talaria_gpu.staging.low_first import merged
from tests.gpu.hkvr.fake_buffer import LowFirstPages


@given(st.sets(st.integers(0, 60)), st.permutations(range(12)), st.integers(0, 12))
def test_merged_is_sorted(there, others, count):
    free = sorted(there - set(others[:count]))
    back = torch.tensor(others[:count], dtype=torch.int32)
    got = merged(torch.tensor(free, dtype=torch.int64), back)
    assert got.dtype == torch.int64
    assert got.tolist() == sorted([*free, *others[:count]])


def test_pages_that_come_back_are_told_before_anybody_can_have_them():
    allocator = LowFirstPages(10, 2)
    taken = allocator.alloc(4)
    allocator.on_free = lambda pages: told.append((pages.tolist(), allocator.available_size()))
    told: list[object] = []
    allocator.free(taken[1:3])
    assert told == [([2, 3], 12)]
    assert allocator.alloc(3) == [2, 3, 5]


def test_what_is_lent_comes_back_from_below_when_pages_run_short():
    allocator, asked = LowFirstPages(200, 16), []
    allocator.lease(tuple(range(101, 201)), asked.append)
    taken = allocator.alloc(100)
    assert not asked
    assert allocator.available_size() == 100 * 16
    allocator.free(taken[:1])
    assert allocator.alloc(3) == [1, 101, 102]
    assert asked == [105]  # a batch of 64 tokens
    assert allocator.leased_pages == 96
    assert allocator.alloc(1000) is None
    assert allocator.leased_pages == 96
    with pytest.raises(ValueError, match="only free pages"):
        allocator.lease((1, 2), print)
