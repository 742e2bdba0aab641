"""Which model it is, down to the bytes, and what its KV and states look like: the names under which they are kept."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash

from talaria_common.errors import EngineError
from talaria_gpu.engine.sglang.layout import attention_pool, kv_layers, state_tensors
from talaria_gpu.engine.sglang.spec import ModelSpec
from talaria_gpu.hkvr.agreement import Ranks
from talaria_gpu.hkvr.descriptor import Family, KvDescriptor
from talaria_gpu.hkvr.keys import identity_of
from talaria_gpu.hkvr.transfer import DeviceKv

MIN_BLOCK_TOKENS = 16
_PATTERNS = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model")
_CHUNK = 16 << 20


@dataclass(frozen=True, slots=True)
class Pools:
    """What of a model's device memory is kept on the host, as `hkvr` sees it."""

    kv: DeviceKv
    states: tuple[DeviceKv, ...] = ()
    """A hybrid's recurrent states, all layers', cut into parts that fit a slab; rows are slots."""


def device_pools(name: str, spec: ModelSpec, pool: Any, *, page_tokens: int, slab_bytes: int, ranks: Ranks) -> Pools:
    """The model's pools, placed in the buffer, with their descriptors. Reads the model's files once.

    Raises:
        EngineError: a layer's recurrent state is larger than a slab.
    """
    layers, states = kv_layers(pool), state_tensors(pool)
    segments = tuple(layer.reshape(layer.shape[0], -1).view(torch.uint8) for layer in layers)
    family: Family = "mla" if hasattr(attention_pool(pool), "kv_buffer") else "mha"
    block_tokens = -(-MIN_BLOCK_TOKENS // page_tokens) * page_tokens
    dtype = str(layers[0].dtype)
    row_bytes = tuple(segment.shape[1] for segment in segments)
    state_shapes = [(tuple(state.shape[2:]), str(state.dtype), state.shape[0]) for state in states]
    identity = identity_of(
        {
            "files": files_digest(spec.path),
            "dtype": f"{spec.dtype}/{dtype}",
            "layout": f"{family}/page-first/{block_tokens}/{row_bytes}/{state_shapes}",
            "tp": str(ranks.size),
        }
    )
    kv = KvDescriptor(
        model=name,
        identity=identity,
        family=family,
        dtype=dtype,
        page_tokens=page_tokens,
        block_tokens=block_tokens,
        row_bytes=row_bytes,
        complete=not states,
        rank=ranks.rank,
    )
    return Pools(DeviceKv(kv, segments), _state_parts(kv, states, slab_bytes))


def _state_parts(kv: KvDescriptor, states: list[torch.Tensor], slab_bytes: int) -> tuple[DeviceKv, ...]:
    parts: list[list[torch.Tensor]] = []
    for state in states:
        for layer in state:
            segment = layer.reshape(layer.shape[0], -1).view(torch.uint8)
            if segment.shape[1] > slab_bytes:
                raise EngineError(
                    f"{kv.model}: a layer's recurrent state has {segment.shape[1]} B, a slab of the host KV only "
                    f"{slab_bytes} B: set host_kv_mib higher"
                )
            if not parts or sum(s.shape[1] for s in parts[-1]) + segment.shape[1] > slab_bytes:
                parts.append([])
            parts[-1].append(segment)
    return tuple(
        DeviceKv(
            KvDescriptor(
                model=kv.model,
                identity=kv.identity,
                family="recurrent",
                dtype=str(states[0].dtype),
                page_tokens=1,
                block_tokens=1,
                row_bytes=tuple(segment.shape[1] for segment in part),
                complete=index == len(parts) - 1,
                rank=kv.rank,
            ),
            tuple(part),
        )
        for index, part in enumerate(parts)
    )


def files_digest(directory: Path) -> str:
    """Of weights, configuration and tokenizer, names and contents."""
    digest = xxhash.xxh3_128()
    for path in sorted({p for pattern in _PATTERNS for p in directory.glob(pattern)}):
        digest.update(path.name.encode() + path.stat().st_size.to_bytes(8, "little"))
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
    return str(digest.hexdigest())
