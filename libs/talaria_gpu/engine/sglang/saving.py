"""Checkpoints: blocks of finished turns and of prompts under way go to the host while the slot serves (4.3)."""

from __future__ import annotations

from typing import Any

from talaria_gpu.hkvr.keys import BlockKeys
from talaria_gpu.hkvr.store import HostKv
from talaria_gpu.hkvr.transfer import DeviceKv


class Saver:
    """One model's.

    A prompt's full blocks are copied when its prefill chunk has been computed, the answer's when the call finishes: at
    a switch little is left to drain. What is shorter than a block at the end is recomputed on return.

    Args:
        store: the host's.
        kv: the model's pool.
        tree: the model's prefix tree.
    """

    def __init__(self, store: HostKv, kv: DeviceKv, tree: Any) -> None:
        self._store, self._kv, self._tree = store, kv, tree
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

    def keys(self, request: Any, tokens: int) -> list[bytes]:
        """Keys of the full blocks in the first `tokens` of the request's prompt and output; [] if it is not watched."""
        keys = self._keys.get(request.rid)
        if keys is None:
            return []
        ids = request.origin_input_ids
        if tokens > len(ids):
            ids = ids + request.output_ids
        return keys.upto(ids, tokens)

    def checkpoint(self, request: Any) -> None:
        """Rows of the request have become the tree's: start copying those that are new."""
        tokens = request.kv.cache_protected_len
        keys = self.keys(request, tokens)
        if len(keys) <= self._saved.get(request.rid, 0):
            return
        self._saved[request.rid] = len(keys)
        node = request.last_node
        rows = self._tree.path_device_indices(node)[: len(keys) * self._kv.descriptor.block_tokens].cpu()
        lock = self._tree.lock(node)
        if self._store.save(self._kv, keys, rows, lambda: self._tree.unlock(lock)):
            self.forgot = True
