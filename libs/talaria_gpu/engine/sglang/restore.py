"""Prefixes from the host become ordinary hits: rows allocated, filled beside the computation, then put into the tree.

Before SGLang admits a call, the longest prefix that the host has beyond what the device has is brought in. The path in
the tree is locked from the match until the call is admitted; the new rows are in no tree, and so in nobody's way, until
their copy has completed and its checksums were right (4.3, appendix B). A hybrid's prefix comes with the recurrent
state at its end, or not at all.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.common import evict_from_tree_cache
from sglang.srt.mem_cache.radix_cache import RadixKey

from talaria_gpu.engine.sglang.identity import Pools
from talaria_gpu.engine.sglang.saving import Saver
from talaria_gpu.engine.sglang.scheduler import SlotScheduler
from talaria_gpu.hkvr.agreement import Ranks
from talaria_gpu.hkvr.block import Block
from talaria_gpu.hkvr.records import Restore
from talaria_gpu.hkvr.store import HostKv


@dataclass(slots=True)
class _Coming:
    """A prefix on its way."""

    request: Any
    ids: Any
    """Its tokens."""
    have: int
    """Tokens that the device had."""
    lock: Any
    """On the node where they end."""
    rows: torch.Tensor
    """Device rows for the rest."""
    slot: torch.Tensor | None
    """A hybrid's: the place of its state."""
    restore: Restore
    keys: frozenset[bytes]
    wanted: bool = True
    """False: the call has gone meanwhile."""


class Restorer:
    """One model's.

    Args:
        store: the host's.
        pools: the model's.
        saver: knows what the host has of a call.
        scheduler: the model's: its tree, its rows, and how many of those may be taken.
        ranks: all of the model's.
    """

    def __init__(self, store: HostKv, pools: Pools, saver: Saver, scheduler: SlotScheduler, ranks: Ranks) -> None:
        self._store, self._pools, self._saver = store, pools, saver
        self._scheduler, self._ranks = scheduler, ranks
        self._tree, self._allocator = scheduler.tree_cache, scheduler.token_to_kv_pool_allocator
        self._states = scheduler.state_slots
        self._coming: dict[str, _Coming] = {}
        self._gone: list[_Coming] = []
        """Of calls that went in mid-restore."""
        self._held: dict[str, Any] = {}
        """Locks on restored prefixes whose calls have not been admitted yet."""
        self._device_had: dict[str, int] = {}
        """For restored calls: tokens of the prefix that did not come from the host."""
        self._computed: set[str] = set()
        """Calls whose copy failed: another try might fail as well, and so on while others run."""
        self._refs: dict[str, list[Block]] = {}

    # --- what is there

    def refer(self, request: Any) -> None:
        """A call has come: the blocks that it will want are the last to be evicted."""
        blocks = self._saver.find(request).all_blocks
        self._store.registry.refer(blocks)
        self._refs[request.rid] = blocks

    def on_host(self, request: Any) -> int:
        """Tokens of its prefix that the host has."""
        return self._saver.find(request).tokens

    def from_host(self, rid: str, start: int) -> bool:
        """Whether a prefill that begins at `start` skips tokens that came from the host."""
        return start > self._device_had.get(rid, start)

    @property
    def busy(self) -> bool:
        """Whether prefixes are on their way, or held for calls to come."""
        return bool(self._coming or self._held or self._gone)

    # --- bringing prefixes in

    def prepare(self, requests: Iterable[Any]) -> set[str]:
        """Start what the host has for these waiting requests; rids of those that must wait for it."""
        waiting = set()
        for request in requests:
            rid = request.rid
            settled = rid in self._held or rid in self._computed or request.kv.holds_kv
            if rid in self._coming or (not settled and self._start(request)):
                waiting.add(rid)
        return waiting

    def publish(self, *, wait: bool = False) -> int:
        """Put into the tree what has arrived (`wait`: everything, once it has). How many tokens."""
        under_way = [*self._coming.values(), *self._gone]
        if not under_way:
            return 0
        there = self._ranks.least([int(wait or c.restore.transfer.done) for c in under_way])
        tokens = 0
        for coming in [c for c, arrived in zip(under_way, there, strict=True) if arrived]:
            if coming.wanted:
                del self._coming[coming.request.rid]
            else:
                self._gone.remove(coming)
            tokens += self._arrived(coming)
        return tokens

    def admitted(self, rid: str) -> None:
        """SGLang holds the request's prefix itself now."""
        self._tree.unlock(self._held.pop(rid, None))

    def release(self, keep: Collection[str] = ()) -> None:
        """Give up every hold but those for `keep`: the prefixes stay in the tree while nobody needs their rows."""
        for rid in [rid for rid in self._held if rid not in keep]:
            self.admitted(rid)

    def coming_for_others(self, rids: Collection[str]) -> int:
        """How many prefixes are on their way for other calls than these, or for calls that have gone."""
        return len(self._gone) + sum(rid not in rids for rid in self._coming)

    def left(self, rid: str) -> None:
        """The call is over, in whatever state. Rows of a prefix that is still coming are freed when it has arrived."""
        self.admitted(rid)
        self._device_had.pop(rid, None)
        self._computed.discard(rid)
        self._store.registry.unrefer(self._refs.pop(rid, []))
        coming = self._coming.pop(rid, None)
        if coming is not None:
            coming.wanted = False
            self._gone.append(coming)

    # --- inside

    def _start(self, request: Any) -> bool:
        found = self._store.agreed(self._saver.find(request))
        end, size = found.tokens, self._pools.kv.descriptor.block_tokens
        if not end:
            return False
        ids = _ids(request)[:end]
        match = self._tree.match_prefix(MatchPrefixParams(key=_key(request, ids)))
        have = match.device_prefix_len
        if have >= end:
            return False
        if any(found.blocks[have // size].key in coming.keys for coming in self._coming.values()):
            return True  # another call's restore brings it
        lock = self._tree.lock(match.last_device_node)  # before evicting: the path must stay
        if self._scheduler.spare_tokens < end - have:  # SGLang does not count what we take
            self._tree.unlock(lock)
            return False
        evict_from_tree_cache(self._tree, end - have)
        rows = self._allocator.alloc(end - have)
        slot = None if rows is None or self._states is None else self._state_slot()
        if rows is None or (self._states is not None and slot is None):
            if rows is not None:
                self._allocator.free(rows)
            self._tree.unlock(lock)
            return False  # no room for it now; then there is none for computing it either, and SGLang lets it wait
        state = None if slot is None else (self._pools.states, slot.cpu())
        restore = self._store.restore(self._pools.kv, found, rows.cpu(), have, state)
        keys = frozenset(block.key for block in found.blocks[have // size :])
        self._coming[request.rid] = _Coming(request, ids, have, lock, rows, slot, restore, keys)
        return True

    def _state_slot(self) -> torch.Tensor | None:
        """Room for one recurrent state, or None."""
        assert self._states is not None
        slot: torch.Tensor | None = self._states.alloc(1)
        if slot is None:
            self._tree.evict_for_alloc(EvictParams(num_tokens=0, mamba_num=1))
            slot = self._states.alloc(1)
        return slot

    def _arrived(self, coming: _Coming) -> int:
        got = self._store.restored(coming.restore)
        if coming.restore.failed and coming.wanted:
            self._computed.add(coming.request.rid)
        lost = coming.rows[got:]
        if not got or not coming.wanted:
            self._allocator.free(coming.rows)
            if coming.slot is not None:
                self._states.free(coming.slot)  # type: ignore[union-attr]  # a slot is one of theirs
            self._tree.unlock(coming.lock)
            return 0
        if len(lost):
            self._allocator.free(lost)
        end = coming.have + got
        path = self._tree.path_device_indices(coming.lock.node)
        result = self._tree.insert(
            InsertParams(
                key=_key(coming.request, coming.ids[:end]),
                value=torch.cat((path, coming.rows[:got])),
                mamba_value=coming.slot,
                prev_prefix_len=coming.have,  # the path is the tree's already; what it got meanwhile frees ours
            )
        )
        if coming.slot is not None and result.mamba_exist:
            self._states.free(coming.slot)  # type: ignore[union-attr]  # as above
        rid = coming.request.rid
        self._held[rid] = self._tree.lock(result.last_device_node)
        self._device_had[rid] = coming.have
        self._tree.unlock(coming.lock)
        return got


def _ids(request: Any) -> Any:
    return request.origin_input_ids + request.output_ids


def _key(request: Any, ids: Any) -> Any:
    return RadixKey(ids, request.extra_key, cache_salt=request.cache_salt)
