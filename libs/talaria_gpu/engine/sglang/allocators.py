"""KV allocators that hand out low addresses first and lend their high pages to staging (4.4).

Leased pages count as available: admission and retraction do not notice. When the low pages run short, the lowest
leased ones come back, after the stager has been told. The lease is mirrored on the host, and what an allocation needs
is counted from SGLang's host tensors: nothing here waits for the device, except the start of a lease.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from sglang.srt.mem_cache import kv_cache_configurator
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from sglang.srt.utils import get_num_new_pages

BATCH_TOKENS = 64
"""Leased pages come back in batches of so many tokens: one wait for many allocations."""


class LowFirst:
    """Mixed into SGLang's allocators: an ascending free list, and a lease of some of its pages.

    Invariant: free and leased pages are disjoint, each ascending; together they are what SGLang takes for free.
    """

    free_pages: torch.Tensor
    page_size: int

    _leased: torch.Tensor | None = None
    _mirror: list[int] = []
    _on_reclaim: Callable[[int], None] | None = None

    def unleased_pages(self) -> list[int]:
        """Free pages, ascending. Waits for the device."""
        pages: list[int] = self.free_pages.tolist()
        return pages

    def lease(self, pages: tuple[int, ...], on_reclaim: Callable[[int], None]) -> None:
        """Lend free `pages` (ascending). `on_reclaim(p)` is called before calls get leased pages below p."""
        self.end_lease()
        if not pages:
            return
        wanted = torch.tensor(pages, dtype=self.free_pages.dtype, device=self.free_pages.device)
        mask = torch.isin(self.free_pages, wanted)
        if int(mask.sum()) != len(pages):
            raise ValueError("only free pages can be lent")
        self._leased, self.free_pages = self.free_pages[mask], self.free_pages[~mask]
        self._mirror, self._on_reclaim = list(pages), on_reclaim

    def end_lease(self) -> None:
        """Take all pages back without asking: whoever leased them has stopped writing."""
        if self._leased is not None:
            self.free_pages = torch.cat((self.free_pages, self._leased))
            self._sort()
        self._leased, self._mirror, self._on_reclaim = None, [], None

    @property
    def leased_pages(self) -> int:
        """How many pages are lent."""
        return len(self._mirror)

    def _ensure(self, pages: int) -> None:
        short = pages - len(self.free_pages)
        if short <= 0 or self._leased is None or self._on_reclaim is None:
            return
        batch = max(1, BATCH_TOKENS // self.page_size)
        take = min(len(self._mirror), -(-short // batch) * batch)
        self._on_reclaim(self._mirror[take - 1] + 1)
        # Pages freed since the lease may lie above: sorted, for "ascending" is what low-first means.
        self.free_pages = torch.cat((self.free_pages, self._leased[:take]))
        self._sort()
        self._leased, self._mirror = self._leased[take:], self._mirror[take:]
        if not self._mirror:
            self._leased = self._on_reclaim = None

    def _sort(self) -> None:
        self.free_pages = torch.sort(self.free_pages).values

    # --- what SGLang calls

    def clear(self) -> None:
        """Everything is free, nothing is lent."""
        if self._on_reclaim is not None:
            self._on_reclaim(self._mirror[-1] + 1)
        super().clear()  # type: ignore[misc]  # SGLang's allocator is the other base
        self._leased, self._mirror, self._on_reclaim = None, [], None

    def available_size(self) -> int:
        """Tokens that can be allocated, the lent ones included."""
        return int(super().available_size()) + len(self._mirror) * self.page_size  # type: ignore[misc]  # as above

    def get_all_free_pages(self) -> torch.Tensor:
        """All free pages, the lent ones included."""
        free: torch.Tensor = super().get_all_free_pages()  # type: ignore[misc]  # as above
        return free if self._leased is None else torch.cat((free, self._leased))


class LowFirstTokens(LowFirst, TokenToKVPoolAllocator):  # type: ignore[misc]  # SGLang is untyped here
    """Pages of one token."""

    def alloc(self, need_size: int) -> Any:
        """The lowest free rows, or None."""
        self._ensure(need_size)
        return super().alloc(need_size)

    def free(self, free_index: torch.Tensor) -> None:
        """Back to their place in the order."""
        super().free(free_index)
        if self.free_group is None and free_index.numel():
            self._sort()


class LowFirstPages(LowFirst, PagedTokenToKVPoolAllocator):  # type: ignore[misc]  # SGLang is untyped here
    """Pages of several tokens."""

    def alloc(self, need_size: int) -> Any:
        """The lowest free pages, or None."""
        self._ensure(need_size // self.page_size)
        return super().alloc(need_size)

    def alloc_extend(  # noqa: PLR0917 - SGLang's signature
        self,
        prefix_lens: torch.Tensor,
        prefix_lens_cpu: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_cpu: torch.Tensor,
        last_loc: torch.Tensor,
        extend_num_tokens: int,
        num_new_pages: int | None = None,
    ) -> Any:
        """Rows for a prefill, or None."""
        if num_new_pages is None:
            num_new_pages = get_num_new_pages(
                seq_lens=seq_lens_cpu, page_size=self.page_size, prefix_lens=prefix_lens_cpu
            )
        self._ensure(num_new_pages)
        return super().alloc_extend(
            prefix_lens, prefix_lens_cpu, seq_lens, seq_lens_cpu, last_loc, extend_num_tokens, num_new_pages
        )

    def alloc_decode(self, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor, last_loc: torch.Tensor) -> Any:
        """One row per request, or None."""
        self._ensure(get_num_new_pages(seq_lens=seq_lens_cpu, page_size=self.page_size, decode=True))
        return super().alloc_decode(seq_lens, seq_lens_cpu, last_loc)

    def _release_page_ids(self, *page_ids: torch.Tensor) -> None:
        super()._release_page_ids(*page_ids)
        self._sort()


@contextmanager
def low_first() -> Iterator[None]:
    """Schedulers built inside get these allocators."""
    stock = kv_cache_configurator.TokenToKVPoolAllocator, kv_cache_configurator.PagedTokenToKVPoolAllocator
    kv_cache_configurator.TokenToKVPoolAllocator = LowFirstTokens
    kv_cache_configurator.PagedTokenToKVPoolAllocator = LowFirstPages
    try:
        yield
    finally:
        kv_cache_configurator.TokenToKVPoolAllocator, kv_cache_configurator.PagedTokenToKVPoolAllocator = stock
