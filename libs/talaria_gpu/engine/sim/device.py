"""What the sim engine's device can hold and how long it takes: the seam for profiles of real hardware.

`FlatDevice` is the one of the settings: the same numbers for every model, whatever the batch. The simulator brings one
that is built from profiles (talaria_replay.sim).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from talaria_common.settings import SimSettings

_MIB = 1 << 20

Phases = tuple[float, float, float, float, float]
"""Milliseconds of a switch's five phases (appendix D)."""


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
    prefill_tokens: int | None = None
    """Calls are added to a prefill batch until it has so many tokens; None: all that fit in KV."""


class Device(Protocol):
    """Sizes and times. All times are milliseconds and depend on the arguments alone."""

    def spec(self, model: str) -> ModelSpec:
        """What the device holds of `model`."""
        ...

    def prefill_ms(self, model: str, parts: Sequence[tuple[int, int]]) -> float:
        """One prefill batch: (tokens cached before, tokens to compute) of each call."""
        ...

    def decode_ms(self, model: str, batch: int, context_tokens: int, steps: int) -> float:
        """`steps` decode iterations of `batch` calls whose contexts come to `context_tokens` at the first."""
        ...

    def switch_ms(self, source: str | None, target: str) -> Phases:
        """A switch between two models."""
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

    def spec(self, model: str) -> ModelSpec:
        """The same for every model."""
        del model
        return self._spec

    def prefill_ms(self, model: str, parts: Sequence[tuple[int, int]]) -> float:
        """Linear in the tokens to compute."""
        del model
        return self._sim.ttft_ms + self._sim.prefill_ms_per_ktoken * sum(todo for _, todo in parts) / 1000

    def decode_ms(self, model: str, batch: int, context_tokens: int, steps: int) -> float:
        """The same whatever the batch."""
        del model, batch, context_tokens
        return self._sim.decode_step_ms * steps

    def switch_ms(self, source: str | None, target: str) -> Phases:
        """All of it loading."""
        del source, target
        return (0.0, self._sim.switch_ms, 0.0, 0.0, 0.0)
