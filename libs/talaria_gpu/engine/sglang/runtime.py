"""Several SGLang runtimes in one process: server arguments and a runtime context per model, process groups shared."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sglang.srt.distributed import bootstrap
from sglang.srt.layers.rotary_embedding import factory as rotary_factory
from sglang.srt.models.deepseek_common import attention_backend_handler as mla
from sglang.srt.runtime_context import SpawnRanks, create_context, get_parallel
from sglang.srt.server_args import PortArgs, ServerArgs

from talaria_gpu.engine.sglang import cpu_attention
from talaria_gpu.engine.sglang.spec import ModelSpec
from talaria_gpu.engine.sglang.standins import hybrid_cpu

CPU_ATTENTION = "torch_native"
STATE_INTERVAL_TOKENS = 64
"""A hybrid's state is kept at every so many tokens of an answer, where pages are larger than one token. SGLang's
default of 256 would have up to 255 tokens of an answer computed again when its session comes back."""
SPARE_STATES = 4
"""Recurrent states beyond what SGLang's batch can need: those that are being copied to the host stay locked."""
_RENDEZVOUS = "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"
"""Where the ranks of the process groups meet. SGLang's default is a TCP port, chosen a moment before it is bound and
open on every interface; for ranks of one machine, a file in a directory of our own does."""
_groups: dict[str, Any] = {}
"""The process groups that the first model's start made. They belong to the process, as SGLang's own flag of it does."""


def server_args(
    spec: ModelSpec,
    *,
    device: str,
    context_tokens: int | None,
    kv_tokens: int,
    page_size: int,
    max_running: int,
    chunked_prefill_tokens: int,
    seed: int,
    tree: str | None = None,
    ranks: int = 1,
    hybrid: bool = False,
    gives_back: bool = False,
) -> ServerArgs:
    """One model's arguments. What is fixed here is what the adapter relies on: one step at a time, its own tree.

    `tree`: a registered prefix tree; None: SGLang's own choice. `device` is rank 0's.
    `hybrid`: whether it has recurrent layers. `gives_back`: see `unbound`.
    """
    kind, _, index = device.partition(":")
    args: dict[str, Any] = {
        "model_path": str(spec.path),
        "device": kind,
        "dtype": spec.dtype,
        "context_length": context_tokens,
        "base_gpu_id": int(index or 0),
        "max_total_tokens": kv_tokens,
        "page_size": page_size,
        "max_running_requests": max_running,
        "chunked_prefill_size": max(chunked_prefill_tokens // page_size, 1) * page_size,
        "schedule_policy": "fcfs",
        "mem_fraction_static": 0.5,  # an upper bound only: max_total_tokens sizes the pool, and checks.py compares
        "skip_tokenizer_init": True,
        "disable_overlap_schedule": True,  # a step's result is known when the step returns
        "radix_cache_backend": tree,
        "log_level": "warning",
        "random_seed": seed,
        "tp_size": ranks,
        "enable_memory_saver": gives_back,
        # Of hybrids only. With pages of one token SGLang keeps a state at the exact end of each prefill and answer,
        # with larger ones at multiples of the interval, in one slot more per call.
        "max_mamba_cache_size": max_states(page_size, max_running),
        "mamba_track_interval": math.lcm(STATE_INTERVAL_TOKENS, page_size),
    }
    if kind == "cpu":
        if hybrid:
            hybrid_cpu.install()
        args |= {"attention_backend": CPU_ATTENTION, "disable_cuda_graph": True}
    resolved = ServerArgs(**args)
    resolved.resolve_once()
    return resolved


def max_states(page_size: int, max_running: int) -> int:
    """How many recurrent states a hybrid has room for: at least what SGLang wants for its batches."""
    per_call = 4 if page_size > 1 else 3  # its own, its prefix's, the one it gives the tree, the one it tracks
    return per_call * max_running + SPARE_STATES


def port_args() -> PortArgs:
    """Port arguments without the IPC endpoints, which `scheduler` does not open."""
    return PortArgs(
        tokenizer_ipc_name="",
        scheduler_input_ipc_name="",
        detokenizer_ipc_name="",
        nccl_port=0,  # unused: see `_RENDEZVOUS`
        rpc_ipc_name="",
        metrics_ipc_name="",
        tokenizer_worker_ipc_name=None,
        decoupled_spec_ipc_config=None,
    )


def new_context(args: ServerArgs, rank: int = 0) -> Any:
    """A runtime context of its own for one model: what `use_context` selects."""
    placement = SpawnRanks(world_rank=rank, dp_rank=None, gpu_id=args.base_gpu_id + rank)
    return create_context(args, role="scheduler", ranks=placement)


@contextmanager
def building(device: str, meeting: Path | None = None) -> Iterator[None]:
    """Around the construction of one model's scheduler, inside its context.

    `meeting`: the file at which several ranks meet; None: there is one.

    SGLang starts its process groups once per process and refuses a second time: later models get the first one's. Its
    cache of rotary embeddings is per process, too; two models that shared a module would share its buffer's address.
    """
    rotary_factory._ROPE_DICT.clear()
    if device == "cpu":
        cpu_attention.install()
        # The default rule picks, for a prefill without a prefix, a form of MLA that this backend cannot run.
        mla.AttentionBackendRegistry.register(CPU_ATTENTION, lambda _attention, _batch: mla.AttnForwardMethod.MLA)
    if not _groups:
        with tempfile.TemporaryDirectory(prefix="talaria-ranks-") as directory:
            os.environ[_RENDEZVOUS] = (meeting or Path(directory) / "meet").as_uri()
            try:
                yield
            finally:
                del os.environ[_RENDEZVOUS]
                # Also when the model was refused: SGLang's flag that the groups exist is set all the same.
                _groups.update({k: v for k, v in get_parallel()._stamp.items() if k.endswith("_group")})
        return
    start = bootstrap.init_parallel_runtime
    bootstrap.init_parallel_runtime = _adopt_groups
    try:
        yield
    finally:
        bootstrap.init_parallel_runtime = start


def _adopt_groups(**_: Any) -> None:
    get_parallel().override_permanently(**_groups)
