"""What an engine tells of its host KV. No torch: the sim engine keeps a registry, too."""

from __future__ import annotations

from dataclasses import fields

from talaria_gpu.engine.contract import HostKvFigures
from talaria_gpu.hkvr.registry import Registry


def figures_of(registry: Registry, d2h_bytes: int = 0, h2d_bytes: int = 0) -> HostKvFigures:
    """Of one rank's registry; the bytes are those that its copies have moved."""
    pool = registry.pool
    return HostKvFigures(
        capacity_bytes=pool.slabs * pool.slab_bytes,
        taken_bytes=pool.taken_bytes,
        blocks=len(registry),
        d2h_bytes=d2h_bytes,
        h2d_bytes=h2d_bytes,
        **{f.name: getattr(registry.counts, f.name) for f in fields(registry.counts)},
    )
