"""The low-first allocators alone: any order of allocations, frees and leases."""

from __future__ import annotations

import warnings
from random import Random

import pytest
import torch

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]
PAGES = 60


@pytest.fixture(scope="module")
def allocators():
    """By page size."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from talaria_gpu.engine.sglang import environment

        environment.prepare("cpu")
        from talaria_gpu.engine.sglang.allocators import LowFirstPages, LowFirstTokens

    def make(page_size: int):
        size = PAGES * page_size
        if page_size == 1:
            return LowFirstTokens(size, torch.float32, "cpu", None, need_sort=False)
        return LowFirstPages(size, page_size, torch.float32, "cpu", None, need_sort=False)

    return make


class Life:
    """An allocator, and the truth about its pages."""

    def __init__(self, allocator, page_size: int, seed: int) -> None:
        self.it, self.page, self.random = allocator, page_size, Random(seed)
        self.held: list[torch.Tensor] = []
        self.lent: set[int] = set()

    def pages(self, rows: torch.Tensor) -> set[int]:
        return set((rows // self.page).tolist())

    def taken(self) -> set[int]:
        return set().union(*(self.pages(rows) for rows in self.held))

    def reclaimed(self, page: int) -> None:
        """What a stager would be told."""
        assert any(lent < page for lent in self.lent), "asked for nothing"
        self.lent = {lent for lent in self.lent if lent >= page}

    def allocate(self) -> None:
        wanted = self.random.randint(1, 12)
        free = sorted(set(range(1, PAGES + 1)) - self.taken())
        before = set(self.lent)
        rows = self.it.alloc(wanted * self.page)
        if rows is None:
            assert wanted > len(free)
            return
        got = self.pages(rows)
        assert len(got) == wanted
        assert not got & self.lent, "a page that weights may still be written to"
        assert sorted(got) == [page for page in free if page not in self.lent][:wanted]
        assert self.lent == before or wanted > len(free) - len(before), "taken back without need"
        self.held.append(rows)

    def free(self) -> None:
        if self.held:
            rows = self.held.pop(self.random.randrange(len(self.held)))
            if self.random.random() < 0.5:
                self.it.free_group_begin()
                self.it.free(rows)
                self.it.free_group_end()
            else:
                self.it.free(rows)

    def lease(self) -> None:
        free = self.it.unleased_pages()
        assert free == sorted(free)
        if self.random.random() < 0.5:
            self.it.end_lease()
            self.lent = set()
            free = self.it.unleased_pages()
        pages = tuple(sorted(self.random.sample(free, self.random.randint(0, len(free)))))
        self.lent = set(pages)
        self.it.lease(pages, self.reclaimed)

    def check(self) -> None:
        free = set(range(1, PAGES + 1)) - self.taken()
        assert self.it.available_size() == len(free) * self.page
        assert set(self.it.get_all_free_pages().tolist()) == free
        assert len(self.it.get_all_free_pages()) == len(free)
        assert self.it.leased_pages == len(self.lent)
        assert set(self.it.unleased_pages()) == free - self.lent


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("seed", range(6))
def test_any_life(allocators, page_size, seed):
    life = Life(allocators(page_size), page_size, seed)
    for _ in range(120):
        life.random.choice([life.allocate, life.allocate, life.free, life.free, life.lease])()
        life.check()
    if life.lent:
        life.it.clear()
        assert not life.lent
    assert life.it.available_size() <= PAGES * page_size


def test_only_free_pages_can_be_lent(allocators):
    allocator = allocators(16)
    allocator.alloc(64)
    with pytest.raises(ValueError, match="only free pages"):
        allocator.lease((1, 2), print)
    allocator.lease((50, 51), print)
    assert allocator.available_size() == (PAGES - 4) * 16
