"""Which model it is, down to the bytes, and what its KV looks like: the names under which KV is kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import xxhash

from talaria_gpu.engine.sglang.layout import kv_layers
from talaria_gpu.engine.sglang.spec import ModelSpec
from talaria_gpu.hkvr.descriptor import Family, KvDescriptor
from talaria_gpu.hkvr.keys import identity_of
from talaria_gpu.hkvr.transfer import DeviceKv

MIN_BLOCK_TOKENS = 16
_PATTERNS = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model")
_CHUNK = 16 << 20


def device_kv(name: str, spec: ModelSpec, pool: Any, page_tokens: int) -> DeviceKv:
    """The model's KV pool, placed in the buffer, with its descriptor. Reads the model's files once."""
    layers = kv_layers(pool)
    segments = tuple(layer.reshape(layer.shape[0], -1).view(torch.uint8) for layer in layers)
    family: Family = "mla" if hasattr(pool, "kv_buffer") else "mha"
    block_tokens = -(-MIN_BLOCK_TOKENS // page_tokens) * page_tokens
    dtype = str(layers[0].dtype)
    row_bytes = tuple(segment.shape[1] for segment in segments)
    identity = identity_of(
        {
            "files": files_digest(spec.path),
            "dtype": f"{spec.dtype}/{dtype}",
            "layout": f"{family}/page-first/{block_tokens}/{row_bytes}",
            "tp": "0/1",
        }
    )
    return DeviceKv(
        descriptor=KvDescriptor(
            model=name,
            identity=identity,
            family=family,
            dtype=dtype,
            page_tokens=page_tokens,
            block_tokens=block_tokens,
            row_bytes=row_bytes,
        ),
        segments=segments,
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
