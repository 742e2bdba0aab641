"""Checkpoints: blocks of finished turns and of prompts under way go to the host while the slot serves (4.3)."""

from __future__ import annotations

from typing import Any

from talaria_gpu.engine.sglang.identity import Pools
from talaria_gpu.engine.sglang.tree import state_slot
from talaria_gpu.hkvr.keys import BlockKeys
from talaria_gpu.hkvr.records import Snapshot
from talaria_gpu.hkvr.states import Found, find
from talaria_gpu.hkvr.store import HostKv


class Saver:
    """One model's.

    A prompt's full blocks are copied when its prefill chunk has been computed, the answer's when the call finishes: at
    a switch little is left to drain. What is shorter than a block at the end is recomputed on return.

    A hybrid's state is copied with them, where the tree has one: then also the rows behind the last full block, so that
    the state has all of its prefix. Without a state the rows are of no use, and stay.

    Args:
        store: the host's.
        pools: the model's.
        tree: the model's prefix tree.
        locked: most recurrent states that copies under way may lock.
    """

    def __init__(self, store: HostKv, pools: Pools, tree: Any, locked: int) -> None:
        self._store, self._pools, self._tree, self._locked = store, pools, tree, locked
        self._kv = pools.kv
        self._keys: dict[str, BlockKeys] = {}
        self._saved: dict[str, int] = {}
        self.forgot = False
        """Whether blocks found no room since last cleared: prefixes that will be missing."""

    def watch(self, rid: str, salt: str) -> None:
        """A call has come."""
        self._keys[rid] = BlockKeys(self._kv.descriptor.identity, salt, self._kv.descriptor.block_tokens)

    def forget(self, rid: str) -> None:
        """A call is gone."""
        self._keys.pop(rid, None)
        self._saved.pop(rid, None)

    def find(self, request: Any) -> Found:
        """What the host has of the request's prompt and output, below its last token: that one must be computed."""
        keys = self._keys.get(request.rid)
        if keys is None:
            return Found()
        tokens = len(request.origin_input_ids) + len(request.output_ids) - 1
        ids = _ids(request, tokens)
        return find(self._store.registry, keys, ids, tokens, kv=self._kv.descriptor, parts=len(self._pools.states))

    def checkpoint(self, request: Any) -> None:
        """Rows of the request have become the tree's: start copying those that are new."""
        keys = self._keys.get(request.rid)
        tokens = request.kv.cache_protected_len
        size = self._kv.descriptor.block_tokens
        hybrid = bool(self._pools.states)
        if not hybrid:
            tokens = tokens // size * size
        if keys is None or tokens < size or tokens <= self._saved.get(request.rid, 0):
            return
        node = request.last_node
        slot = state_slot(self._tree, node) if hybrid else None
        if hybrid and slot is None:
            return
        self._saved[request.rid] = tokens
        ids = _ids(request, tokens)
        rows = self._tree.path_device_indices(node)[:tokens].cpu()
        snapshot = None
        if slot is not None:
            snapshot = Snapshot(self._pools.states, keys.exact(ids, tokens), slot.cpu())
            while self._store.saving >= self._locked:
                self._store.save_oldest()
        lock = self._tree.lock(node)
        if self._store.save(self._kv, keys.upto(ids, tokens), rows, lambda: self._tree.unlock(lock), snapshot):
            self.forgot = True


def _ids(request: Any, tokens: int) -> Any:
    ids = request.origin_input_ids
    return ids + request.output_ids if tokens > len(ids) else ids
