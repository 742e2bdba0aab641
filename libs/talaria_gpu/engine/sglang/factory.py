"""From settings to a running engine, importing SGLang on the way."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from talaria_common.settings import InstanceSettings, Settings
from talaria_gpu.engine.sglang import environment
from talaria_gpu.engine.sglang.spec import ModelSpec

if TYPE_CHECKING:
    from talaria_gpu.engine.sglang.engine import SglangEngine

MIB = 1 << 20


def build(
    instance: InstanceSettings,
    paths: dict[str, Path],
    settings: Settings,
    *,
    progress: Callable[[str], None] = print,
    poison: bool = False,
) -> SglangEngine:
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
    environment.prepare(instance.device)
    from talaria_gpu.engine.sglang.engine import SglangEngine  # only now: it imports SGLang

    specs = {
        name: ModelSpec(
            path=paths[name],
            dtype=settings.models[name].dtype,
            context_tokens=settings.models[name].context_tokens,
        )
        for name in instance.models
    }
    return SglangEngine(
        specs,
        device=instance.device,
        kv_tokens=instance.kv_tokens,
        page_size=instance.page_size,
        max_running=instance.max_running,
        chunked_prefill_tokens=instance.chunked_prefill_tokens,
        buffer_bytes=None if instance.buffer_mib is None else instance.buffer_mib * MIB,
        threads=instance.threads,
        seed=instance.seed,
        poison=poison,
        progress=progress,
    )
