"""From settings to a running engine, importing SGLang on the way."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from talaria_common.settings import InstanceSettings, Settings
from talaria_gpu.engine.sglang import environment
from talaria_gpu.engine.sglang.spec import HostKvOptions, MemoryOptions, ModelSpec
from talaria_gpu.sched.ablation import Ablation

if TYPE_CHECKING:
    from talaria_gpu.engine.sglang.engine import SglangEngine
    from talaria_gpu.engine.sglang.ranks.leader import RankedEngine

MIB = 1 << 20


def build(
    instance: InstanceSettings,
    paths: dict[str, Path],
    settings: Settings,
    *,
    progress: Callable[[str], None] = print,
    poison: bool = False,
) -> SglangEngine | RankedEngine:
    """The engine of one instance, its models loaded and none active yet.

    Args:
        instance: device, sizes and the models' names.
        paths: each model's directory, as `talaria_gpu.models.prepare` returns it.
        settings: the whole configuration, for the models' dtype and context length.
        progress: told what is being done, in words.
        poison: see `SglangEngine`.

    Raises:
        EngineError: SGLang or its kernels are not what this adapter needs, or the models do not fit the buffer.
    """
    progress("importing SGLang")
    environment.prepare(instance.device, instance.tp)
    from talaria_gpu.engine.sglang.engine import SglangEngine  # only now: it imports SGLang
    from talaria_gpu.engine.sglang.ranks.leader import RankedEngine

    specs = {
        name: ModelSpec(
            path=paths[name],
            dtype=settings.models[name].dtype,
            context_tokens=settings.models[name].context_tokens,
        )
        for name in instance.models
    }
    options: dict[str, Any] = {
        "models": specs,
        "device": instance.device,
        "kv_tokens": instance.kv_tokens,
        "page_size": instance.page_size,
        "max_running": instance.max_running,
        "chunked_prefill_tokens": instance.chunked_prefill_tokens,
        "buffer_bytes": None if instance.buffer_mib is None else instance.buffer_mib * MIB,
        "threads": instance.threads,
        "seed": instance.seed,
        "memory": memory_options(instance),
        "host_kv": host_kv_options(instance),
        "poison": poison,
        "initially": instance.open,
    }
    if instance.tp > 1:
        return RankedEngine(instance.tp, options, progress)
    return SglangEngine(**options, progress=progress)


def memory_options(instance: InstanceSettings) -> MemoryOptions:
    """How the instance keeps and moves weights. Emulated bandwidths are for CPUs."""
    emulated = instance.device == "cpu"
    h2d, d2d = instance.emulate_weight_h2d_gbps, instance.emulate_weight_d2d_gbps
    every = {"off": 0, "always": 1}
    # On a plain CPU host and device are one memory: to stage is to copy twice.
    staging = bool(not emulated or h2d) if instance.staging is None else instance.staging
    return MemoryOptions(
        staging=staging and len(instance.models) > 1 and Ablation.named(instance.scheduler).staging,
        chunk_bytes=instance.staging_chunk_mib * MIB,
        h2d_bytes_per_s=h2d * 1e9 if emulated and h2d else None,
        d2d_bytes_per_s=d2d * 1e9 if emulated and d2d else None,
        host_weights_bytes=None if instance.host_weights_mib is None else instance.host_weights_mib * MIB,
        weights_dir=Path(instance.host_weights_dir) if instance.host_weights_dir else None,
        mem_fraction=instance.mem_fraction_bump,
        canary_every=every[instance.canary] if isinstance(instance.canary, str) else instance.canary,
    )


def host_kv_options(instance: InstanceSettings) -> HostKvOptions | None:
    """How the instance keeps KV on the host; None: not at all."""
    if not instance.host_kv_mib or not Ablation.named(instance.scheduler).hkvr:
        return None
    return HostKvOptions(
        capacity_bytes=instance.host_kv_mib * MIB,
        verify=instance.host_kv_verify,
        d2h_gbps=instance.emulate_kv_d2h_gbps,
        h2d_gbps=instance.emulate_kv_h2d_gbps,
    )
