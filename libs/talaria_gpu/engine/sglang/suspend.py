"""Suspension: what decodes when a slot ends keeps its exact rows on the host and goes on as if nothing had been (3.4).

Frozen, not retracted: used rows are copied out and back to the same places; SGLang's scheduler, tree and allocator are
not touched in between, so that the next step is a decode, or the next chunk of a prefill.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from talaria_gpu.hkvr.store import HostKv, Parked
from talaria_gpu.hkvr.transfer import DeviceKv


class Suspension:
    """One model's.

    Args:
        store: the host's.
        kv: the model's pool.
        tree: its prefix tree.
        allocator: of its KV rows.
    """

    def __init__(self, store: HostKv, kv: DeviceKv, tree: Any, allocator: Any) -> None:
        self._store, self._kv = store, kv
        self._tree, self._allocator = tree, allocator
        self._parked: Parked | None = None

    @property
    def active(self) -> bool:
        """Whether rows are out."""
        return self._parked is not None

    def suspend(self) -> bool:
        """Copy out every row that a request holds. False: the pool has no room for them, and nothing is kept.

        Cached prefixes that nobody holds go first: the registry has them.
        """
        self.evict_cached()
        self._parked = self._store.park(self._kv, self._used_rows())
        return self._parked is not None

    def resume(self) -> bool:
        """Copy the rows back. False: they were damaged, and must be computed again."""
        parked, self._parked = self._parked, None
        return parked is None or self._store.unpark(parked)

    def forget(self) -> None:
        """Nobody will come back for the rows: give their room up, and every prefix in the tree with them."""
        if self._parked is not None:
            self._store.forget(self._parked)
            self._parked = None
            self.evict_cached()

    def evict_cached(self) -> None:
        """Empty the tree of what no request holds."""
        self._tree.evict(EvictParams(num_tokens=self._tree.evictable_size()))

    def _used_rows(self) -> torch.Tensor:
        """All rows that are not free, ascending; the padding page is never used."""
        page = self._allocator.page_size
        used = torch.ones(self._kv.segments[0].shape[0] // page, dtype=torch.bool)
        used[self._allocator.get_all_free_pages().cpu()] = False
        used[0] = False
        return (used.nonzero().view(-1, 1) * page + torch.arange(page)).flatten()
