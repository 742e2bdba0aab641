"""SGLang's prefix tree, telling when a request's rows have become the tree's: that is when they can be copied out.

Rows that the tree owns and that are locked there do not change and are not freed, whatever becomes of the request. So
the copy needs a lock on the node and nothing of the request.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.registry import create_unified_radix_cache, register_radix_cache_backend
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

BACKEND = "talaria"
"""SGLang's `radix_cache_backend` for this tree."""


def state_slot(tree: Any, node: Any) -> torch.Tensor | None:
    """Int64 [1]: where the recurrent state at the end of `node` is; None: it has none."""
    slot: torch.Tensor | None = tree.tree_core.get_component_device_value(node, ComponentType.MAMBA)
    return slot


def evict_all(tree: Any) -> None:
    """Empty the tree of what no request holds."""
    states = tree.mamba_evictable_size() if tree.supports_mamba() else 0
    tree.evict(EvictParams(num_tokens=tree.evictable_size(), mamba_num=states))


class CheckpointTree(UnifiedRadixCache):  # type: ignore[misc]  # SGLang is untyped here
    """`UnifiedRadixCache` with a hook after each insert of a request: after every prefill chunk and at finish."""

    on_checkpoint: Callable[[Req], None] | None = None

    def checkpoint_into_tree(self, req: Req, *, up_to: int, **kwargs: Any) -> None:
        """SGLang's, then the hook: the request's first `req.kv.cache_protected_len` rows are the tree's now."""
        super().checkpoint_into_tree(req, up_to=up_to, **kwargs)
        if self.on_checkpoint is not None:
            self.on_checkpoint(req)


register_radix_cache_backend(BACKEND, lambda context: create_unified_radix_cache(context, cache_class=CheckpointTree))
