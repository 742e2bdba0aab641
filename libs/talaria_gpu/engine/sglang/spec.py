"""What the engine is told about a model. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from talaria_common.errors import EngineError

SGLANG_VERSION = "0.5.23"
"""The only release this adapter knows: internals move between releases."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """One model to open."""

    path: Path
    """Hugging Face directory: config.json and safetensors."""
    dtype: str = "auto"
    context_tokens: int | None = None
    """Longest prompt + completion; None: the model's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryOptions:
    """How weights are kept and moved."""

    staging: bool = False
    """Whether the next model's weights are staged in idle KV."""
    chunk_bytes: int = 4 << 20
    """Of a staged chunk."""
    h2d_bytes_per_s: float | None = None
    """Emulated bandwidth of weights from host to device; None: the real one. CPU only."""
    d2d_bytes_per_s: float | None = None
    """The same within the device."""
    host_weights_bytes: int | None = None
    """Bound of the host images; None: all stay on the host."""
    weights_dir: Path | None = None
    """For images that do not fit the bound; None: the system's temporary directory."""
    mem_fraction: float = 0.8
    """Share of a GPU's memory that the buffer may take (5.6); the rest is for activations, graphs and workspaces."""
    canary_every: int = 0
    """A golden-token canary runs at every so many switches; 0: never."""

    def check_share(self, buffer_bytes: int, device_bytes: int) -> None:
        """Raise EngineError if the buffer takes more than `mem_fraction` of a device of so many bytes."""
        if buffer_bytes > self.mem_fraction * device_bytes:
            gib = 1 << 30
            raise EngineError(
                f"the device buffer of {buffer_bytes / gib:.2f} GiB is {buffer_bytes / device_bytes:.0%} of the "
                f"device's {device_bytes / gib:.2f} GiB, and mem_fraction_bump allows {self.mem_fraction:.0%}. Set "
                "kv_tokens or buffer_mib lower, tp higher, or mem_fraction_bump higher if that leaves activations room"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class HostKvOptions:
    """How KV is kept on the host (3.5, 4.3)."""

    capacity_bytes: int
    """Of the pool, for all models."""
    verify: bool = True
    """Whether checksums are made and compared."""
    suspends: bool = True
    """Whether calls that still decode at a switch keep their rows; else they are retracted."""
    d2h_gbps: float | None = None
    """Emulated bandwidth of KV to the host, 10^9 bytes per second; None: the real one."""
    h2d_gbps: float | None = None
    """The same of KV to the device."""
