"""What the sim engine's device can hold and how long it takes: the seam for profiles of real hardware.

`FlatDevice` is the one of the settings: the same numbers for every model, whatever the batch. The simulator brings one
that is built from profiles (talaria_replay.sim).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from talaria_common.settings import SimSettings

_MIB = 1 << 20

Phases = tuple[float, float, float, float, float]
"""Milliseconds of a switch's five phases (appendix D)."""


class Part(NamedTuple):
    """One call's share of a prefill step, in tokens."""

    cached: int
    """Before its prefill began."""
    done: int
    """By earlier steps of its prefill."""
    todo: int
    """To compute in this step."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One model on the device."""

    kv_capacity_tokens: int
    context_tokens: int
    """Longest prompt + completion."""
    max_running: int
    """Calls in one batch."""
    weight_bytes: int
    kv_bytes_per_token: int
    """Over all ranks, with every copy."""
    prefill_tokens: int | None = None
    """Most tokens of one prefill step: a longer prompt takes several. None: all that fit in KV."""
    kv_segments: int = 1
    """KV tensors per rank: a staging chunk lies in one of them."""
    reserved_bytes: int = 0
    """Of the buffer, for recurrent state while the model is active: neither KV nor gap. Over all ranks."""

    @property
    def taken_bytes(self) -> int:
        """Of the buffer, whatever the calls: weights and what is reserved."""
        return self.weight_bytes + self.reserved_bytes

    @property
    def kv_end_bytes(self) -> int:
        """Where the gap begins in the buffer: above weights, reserve and all KV rows."""
        return self.taken_bytes + self.kv_capacity_tokens * self.kv_bytes_per_token


@dataclass(frozen=True, slots=True)
class Substrate:
    """What keeps KV and brings weights over a switch (3.5). Bytes and rates are those of all ranks together."""

    hkvr: bool
    """KV has a second home on the host, and running calls are suspended."""
    staging: bool
    """The next model's weights are staged in idle KV pages."""
    host_bytes: int
    """Pool for KV."""
    h2d_bytes_per_s: float
    """One link for weights and KV, shared evenly while both move."""
    d2h_bytes_per_s: float
    buffer_bytes: int
    """Device buffer: weights, KV and the gap."""
    chunk_bytes: int = 4 * _MIB
    """Staging chunk in one segment."""
    block_tokens: int = 64
    """Tokens of a block of host KV."""
    kv_bytes_per_s: float | None = None
    """Host to device on a link of KV's own; None: it shares that of the weights."""


class Device(Protocol):
    """Sizes and times. All times are milliseconds and depend on the arguments alone."""

    @property
    def substrate(self) -> Substrate | None:
        """None: a switch loads all weights from host, and forgets all KV."""
        ...

    def spec(self, model: str) -> ModelSpec:
        """What the device holds of `model`."""
        ...

    def prefill_ms(self, model: str, parts: Sequence[Part]) -> float:
        """One prefill batch."""
        ...

    def decode_ms(self, model: str, batch: int, context_tokens: int, steps: int) -> float:
        """`steps` decode iterations of `batch` calls whose contexts come to `context_tokens` at the first."""
        ...

    def open_ms(self, model: str) -> float:
        """Reading the weights of a model that is opened."""
        ...

    def switch_ms(self, source: str | None, target: str, d2d_bytes: int = 0) -> Phases:
        """A switch between two models, `d2d_bytes` of whose weights were staged; without waits, parks and restores."""
        ...


class FlatDevice:
    """Args: sim: an instance's [instances.sim]."""

    def __init__(self, sim: SimSettings) -> None:
        self._sim = sim
        self._spec = ModelSpec(
            kv_capacity_tokens=sim.kv_capacity_tokens,
            context_tokens=min(sim.context_tokens, sim.kv_capacity_tokens),
            max_running=sim.max_running,
            weight_bytes=sim.weight_mib * _MIB,
            kv_bytes_per_token=sim.kv_bytes_per_token,
        )

    @property
    def substrate(self) -> Substrate | None:
        """None."""
        return None

    def spec(self, model: str) -> ModelSpec:
        """The same for every model."""
        del model
        return self._spec

    def prefill_ms(self, model: str, parts: Sequence[Part]) -> float:
        """Linear in the tokens to compute."""
        del model
        return self._sim.ttft_ms + self._sim.prefill_ms_per_ktoken * sum(p.todo for p in parts) / 1000

    def decode_ms(self, model: str, batch: int, context_tokens: int, steps: int) -> float:
        """The same whatever the batch."""
        del model, batch, context_tokens
        return self._sim.decode_step_ms * steps

    def open_ms(self, model: str) -> float:
        """None."""
        del model
        return 0.0

    def switch_ms(self, source: str | None, target: str, d2d_bytes: int = 0) -> Phases:
        """All of it loading."""
        del source, target, d2d_bytes
        return (0.0, self._sim.switch_ms, 0.0, 0.0, 0.0)
