"""SGLang's KV allocators with low addresses first and high pages on loan to staging: see `staging.low_first` (4.4)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from sglang.srt.mem_cache import kv_cache_configurator
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from sglang.srt.utils import get_num_new_pages

from talaria_gpu.staging.low_first import LowFirst


class LowFirstTokens(LowFirst, TokenToKVPoolAllocator):  # type: ignore[misc]  # SGLang is untyped here
    """Pages of one token."""

    def alloc(self, need_size: int) -> Any:
        """The lowest free rows, or None."""
        self._ensure(need_size)
        return super().alloc(need_size)

    def free(self, free_index: torch.Tensor) -> None:
        """Back to their place in the order; SGLang's appends them."""
        if self.free_group is None and free_index.numel():
            self._back(free_index)
        else:
            super().free(free_index)


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
        self._back(page_ids[0] if len(page_ids) == 1 else torch.cat(page_ids))


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
