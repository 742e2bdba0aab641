"""What this adapter assumes of SGLang, one by one, so that an upgrade fails with a name; and the leak checks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from talaria_common.errors import EngineError
from talaria_gpu.engine.sglang.layout import Region, kv_layers, state_tensors, tensors_of

if TYPE_CHECKING:
    import torch

    from talaria_gpu.engine.sglang.scheduler import SlotScheduler


def check_built(name: str, scheduler: SlotScheduler, kv_tokens: int, page_size: int, max_running: int) -> None:
    """The scheduler came out as asked. Raises EngineError with what differs."""
    found = {
        "KV tokens": (scheduler.max_total_num_tokens, kv_tokens // page_size * page_size),
        "calls in a batch": (scheduler.max_running_requests, max_running),
        "page size": (scheduler.token_to_kv_pool_allocator.page_size, page_size),
        "prefix tree": (isinstance(scheduler.tree_cache, UnifiedRadixCache), True),
        "overlap": (scheduler.enable_overlap, False),
        "mixed prefill": (scheduler.is_mixed_chunk, False),
    }
    wrong = [f"{what} {got!r}, expected {wanted!r}" for what, (got, wanted) in found.items() if got != wanted]
    if wrong:
        raise EngineError(f"{name}: SGLang came up otherwise than asked: {'; '.join(wrong)}")


def check_inside(name: str, scheduler: SlotScheduler, buffer: torch.Tensor) -> None:
    """Every weight and KV tensor lies in the buffer. Raises EngineError: another holder of memory has appeared."""
    runner = scheduler.model_runner
    low, high = buffer.data_ptr(), buffer.data_ptr() + buffer.numel()
    pool = runner.token_to_kv_pool
    held = [*tensors_of(runner.model), *kv_layers(pool), *state_tensors(pool)]
    stray = [t for t in held if t.device == buffer.device and t.numel() and not low <= t.data_ptr() < high]
    if stray:
        shapes = ", ".join(str(tuple(t.shape)) for t in stray[:4])
        raise EngineError(f"{name}: {len(stray)} tensors lie outside the device buffer (shapes {shapes})")


def check_at_home(name: str, region: Region) -> None:
    """The model's device addresses are those at opening. Raises EngineError."""
    moved = sum(a != b for a, b in zip(region.addresses(), region.home, strict=True))
    if moved:
        raise EngineError(f"{name}: {moved} of {len(region.home)} device addresses moved")


def check_idle(name: str, scheduler: SlotScheduler) -> None:
    """Nothing runs or waits, and nothing is held: SGLang's invariants and ours. Raises EngineError."""
    scheduler.settle()
    if not scheduler.is_fully_idle():
        raise EngineError(f"{name}: SGLang does not take itself for idle")
    leaks, messages = scheduler.invariant_checker._check_all_pools(scheduler.pool_stats_observer.get_pool_stats())
    scheduler.invariant_checker._check_req_pool()
    tree, allocator, rows = scheduler.tree_cache, scheduler.token_to_kv_pool_allocator, scheduler.req_to_token_pool
    free, cached, total = allocator.available_size(), tree.evictable_size(), scheduler.max_total_num_tokens
    found = {
        "SGLang's pool check: " + " ".join(messages): leaks,
        f"{tree.protected_size()} cached tokens are locked": tree.protected_size() != 0,
        f"{free} free + {cached} cached != {total} KV rows": free + cached != total,
        f"{rows.available_size()} of {rows.size} request rows are free": rows.available_size() != rows.size,
        "free pages are listed twice": len(set(allocator.get_all_free_pages().tolist())) * allocator.page_size != free,
    }
    if scheduler.state_slots is not None:
        spare, kept, all_of_them = scheduler.state_slots.available_size(), tree.mamba_evictable_size(), scheduler.states
        found[f"{spare} free + {kept} cached != {all_of_them} recurrent states"] = spare + kept != all_of_them
    wrong = [what for what, bad in found.items() if bad]
    if wrong:
        raise EngineError(f"{name}: leaked: {'; '.join(wrong)}")
