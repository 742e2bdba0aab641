"""Suspension: what decodes when a slot ends keeps its exact rows on the host and goes on as if nothing had been (3.4).

Frozen, not retracted: used rows and recurrent states are copied out and back to the same places; SGLang's scheduler,
tree and allocators are not touched in between, so that the next step is a decode, or the next chunk of a prefill.
"""

from __future__ import annotations

from typing import Any

import torch

from talaria_gpu.engine.sglang.identity import Pools
from talaria_gpu.engine.sglang.tree import evict_all
from talaria_gpu.hkvr.agreement import Ranks
from talaria_gpu.hkvr.records import Parked
from talaria_gpu.hkvr.store import HostKv
from talaria_gpu.hkvr.transfer import DeviceKv


class Suspension:
    """One model's.

    Args:
        store: the host's.
        pools: the model's.
        tree: its prefix tree.
        allocator: of its KV rows.
        slots: the allocator of a hybrid's recurrent states.
        ranks: all of the model's.
    """

    def __init__(
        self, store: HostKv, pools: Pools, tree: Any, allocator: Any, *, slots: Any | None, ranks: Ranks
    ) -> None:
        self._store, self._pools, self._ranks = store, pools, ranks
        self._tree, self._allocator, self._slots = tree, allocator, slots
        self._parked: list[Parked] = []

    @property
    def active(self) -> bool:
        """Whether rows are out."""
        return bool(self._parked)

    def suspend(self) -> bool:
        """Copy out every row that a request holds. False, and nothing is kept: on some rank that was not possible.

        Cached prefixes that nobody holds go first: the registry has them.
        """
        evict_all(self._tree)
        wanted = [(self._pools.kv, self._used_rows())]
        if self._slots is not None:
            wanted += [(part, self._used_slots(self._slots)) for part in self._pools.states]
        # Without room for all of it, parking some would evict prefixes for nothing.
        if self._all(self._store.has_room(wanted)) and all(self._all(self._park(*each)) for each in wanted):
            return True
        self._give_back()
        return False

    def _all(self, mine: bool) -> bool:
        """Whether it is so on all ranks. Asked before each step, for what a rank alone goes on with it evicts alone."""
        return bool(self._ranks.least([int(mine)])[0])

    def _park(self, kv: DeviceKv, rows: torch.Tensor) -> bool:
        parked = self._store.park(kv, rows)
        if parked is not None:
            self._parked.append(parked)
        return parked is not None

    def resume(self) -> bool:
        """Copy the rows back. False: they were damaged, and must be computed again."""
        parked, self._parked = self._parked, []
        return sum(not self._store.unpark(each) for each in parked) == 0  # every one: they give their room back

    def forget(self) -> None:
        """Nobody will come back for the rows: give their room up, and every prefix in the tree with them."""
        if self._parked:
            self._give_back()
            evict_all(self._tree)

    def _give_back(self) -> None:
        for parked in self._parked:
            self._store.forget(parked)
        self._parked.clear()

    def _used_rows(self) -> torch.Tensor:
        """All rows that are not free, ascending; the padding page is never used."""
        page = self._allocator.page_size
        used = torch.ones(self._pools.kv.segments[0].shape[0] // page, dtype=torch.bool)
        used[self._allocator.get_all_free_pages().cpu()] = False
        used[0] = False
        return (used.nonzero().view(-1, 1) * page + torch.arange(page)).flatten()

    @staticmethod
    def _used_slots(slots: Any) -> torch.Tensor:
        """All states that are not free; the padding state, 0, is never used."""
        used = torch.ones(slots.size + 1, dtype=torch.bool)
        used[slots.free_slots.cpu()] = False
        used[0] = False
        return used.nonzero().flatten()
