"""Profiles as a sim engine's device: what fits, and how long prefill, decode and switches take."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from talaria_gpu.engine.sim.device import ModelSpec, Part, Phases, Substrate
from talaria_replay.sim.profiles import (
    CalibrationName,
    Hardware,
    Model,
    Points,
    ProfileError,
    Roofline,
    fit,
    parse_decode,
    parse_prefill,
)

GIB = float(1 << 30)


@dataclass(frozen=True, slots=True)
class Times:
    """One model's curves on one device, ms.

    prefill = fixed + per_token·Σnew + per_pair·Σ(new·cached + new²/2), or with `power`, fixed·(Σnew)^power of what
    begins in the step, and the curve's rise for a prompt that goes on: its steps cost what it would cost at once;
    decode step = fixed + per_call·batch + per_context·Σcontext, or with `decode_batches`, what lies between the next
    smaller and the next larger batch, + per_context·Σcontext.
    """

    prefill_fixed: float
    prefill_token: float
    prefill_pair: float
    decode_fixed: float
    decode_call: float
    decode_context: float
    prefill_power: float = 0.0
    source: str = ""
    decode_batches: tuple[tuple[int, float], ...] = ()
    """(calls, ms without context), ascending: on a CPU two calls may take as long as eight."""

    def prefill_ms(self, parts: Sequence[Part]) -> float:
        """One step."""
        if self.prefill_power:
            power = self.prefill_power
            begin: float = sum(p.todo for p in parts if not p.done) ** power
            go_on: float = sum((p.done + p.todo) ** power - p.done**power for p in parts if p.done)
            return self.prefill_fixed * (begin + go_on)
        new = sum(p.todo for p in parts)
        pairs = sum(p.todo * (p.cached + p.done + p.todo / 2) for p in parts)
        return self.prefill_fixed + self.prefill_token * new + self.prefill_pair * pairs

    def decode_ms(self, batch: int, context: int, steps: int) -> float:
        """So many iterations, the contexts growing by one token each."""
        at = self.decode_fixed + self.decode_call * batch
        if self.decode_batches:
            at = _between(self.decode_batches, batch)
        first = at + self.decode_context * context
        return steps * first + self.decode_context * batch * steps * (steps - 1) / 2


def times(model: Model, hw: Hardware, calibration: CalibrationName) -> Times:
    """The curves of `model` on `hw`. Raises ProfileError where the profile has no such calibration."""
    if calibration == "roofline":
        if model.roofline is None:
            raise ProfileError(f"model {model.name}: it has no [roofline]")
        return _roofline(model.roofline, model, hw)
    kind, tables = ("measured", model.measured) if calibration == "measured" else ("aic", model.aic)
    points = tables.get(hw.name)
    if points is None:
        raise ProfileError(f"model {model.name}: no [{kind}.{hw.name}]; there is {', '.join(tables) or 'none'}")
    where = f"model {model.name}: [{kind}.{hw.name}]"
    if calibration != "paper" and not (points.prefill_ms or points.incr_prefill_ms):
        raise ProfileError(f"{where}: prefill_ms: expected a point or more, there or in incr_prefill_ms")
    if not points.decode_step_ms:
        raise ProfileError(f"{where}: decode_step_ms: expected a point or more")
    d0, d1, d2 = fit([((1.0, b, c), ms) for b, c, ms in parse_decode(points)])
    if calibration != "paper":
        p0, p1, p2 = fit([((1.0, n, n * (c + n / 2)), ms) for c, n, ms in parse_prefill(points)])
        if calibration == "measured":
            batches, slope = _by_batch(points)
            return Times(p0, p1, p2, 0.0, 0.0, slope, source=points.source, decode_batches=batches)
        return Times(p0, p1, p2, d0, d1, d2, source=points.source)
    if model.paper is None:
        raise ProfileError(f"model {model.name}: it has no [paper]")
    if len(model.paper.prefill_ms) != 2:
        raise ProfileError(f"model {model.name}: [paper]: prefill_ms: expected two points")
    factor, power = _power(model.paper)
    return Times(factor, 0.0, 0.0, d0, d1, d2, prefill_power=power, source=model.paper.source)


def _by_batch(points: Points) -> tuple[tuple[tuple[int, float], ...], float]:
    """Measured decode steps: (calls, ms without context) of each batch, and ms per token of context."""
    rows = parse_decode(points)
    sizes = sorted({batch for batch, _, _ in rows})
    if len(sizes) == len(rows):  # one context for each: only together they tell what a token of context costs
        _, _, slope = fit([((1.0, batch, context), ms) for batch, context, ms in rows])
        return tuple((batch, max(0.0, ms - slope * context)) for batch, context, ms in sorted(rows)), slope
    *at, slope = fit([((*(float(batch == size) for size in sizes), float(context)), ms) for batch, context, ms in rows])
    return tuple(zip(sizes, at, strict=True)), slope


def _between(table: Sequence[tuple[int, float]], batch: int) -> float:
    """Of a table (calls, ms), linear between its rows and beyond the last two; below the first, the first."""
    at = min(bisect_left(table, (batch, -math.inf)), len(table) - 1)
    size, ms = table[at]
    if at == 0:
        return ms * max(1.0, batch / size)
    before, least = table[at - 1]
    slope = (ms - least) / (size - before)
    return ms + max(0.0, slope) * (batch - size) if batch > size else least + slope * (batch - before)


def _power(points: Points) -> tuple[float, float]:
    """A power law through two points: the paper gives no third, nor any of a short prompt."""
    (n0, t0), (n1, t1) = sorted((int(n), ms) for n, ms in points.prefill_ms.items())
    power = math.log(t1 / t0) / math.log(n1 / n0)
    return t0 / n0**power, power


def _roofline(r: Roofline, model: Model, hw: Hardware) -> Times:
    missing = [name for name in ("bf16_tflops", "hbm_tb_s") if not getattr(hw, name)]
    if missing:
        raise ProfileError(f"hardware {hw.name}: {', '.join(missing)}: expected for the roofline of {model.name}")
    flops = hw.gpus * hw.bf16_tflops * 1e12 * r.efficiency
    bandwidth = hw.gpus * hw.hbm_tb_s * 1e12 * r.bandwidth_efficiency
    return Times(
        prefill_fixed=r.step_overhead_ms,
        prefill_token=2 * r.active_params / flops * 1000,
        prefill_pair=4 * r.attention_layers * r.query_width / flops * 1000,
        decode_fixed=r.step_overhead_ms + 2 * r.active_params / bandwidth * 1000,
        decode_call=0.0,
        decode_context=model.kv_bytes_per_token * copies(model, hw) / bandwidth * 1000,
        source=r.source,
    )


def copies(model: Model, hw: Hardware) -> int:
    """How often each token's KV is kept over the group's GPUs."""
    return max(1, hw.gpus // model.kv_heads)


def buffer_bytes(hw: Hardware) -> int:
    """HBM for weights, KV and the gap, of the group."""
    return int(hw.gpus * hw.hbm_gib * GIB * hw.usable)


def weight_bytes(model: Model, hw: Hardware) -> int:
    """Over all GPUs."""
    return round(model.weight_gb_on.get(hw.name, model.weight_gb) * 1e9)


def state_bytes(model: Model) -> int:
    """HBM kept for the recurrent state of as many calls as may run."""
    return round(model.max_running * model.state_mb_per_sequence * 1e6)


def kv_capacity_tokens(model: Model, hw: Hardware) -> int:
    """Tokens of KV beside weights and recurrent state. Raises ProfileError when not even those, or `kv_tokens`, fit."""
    room = buffer_bytes(hw) - weight_bytes(model, hw) - state_bytes(model)
    fits = room // (model.kv_bytes_per_token * copies(model, hw))
    if model.kv_tokens is not None:
        if model.kv_tokens > fits:
            raise ProfileError(f"model {model.name}: kv_tokens: expected at most {max(0, fits)}, what {hw.name} leaves")
        return model.kv_tokens
    if fits < 1024:
        raise ProfileError(f"model {model.name} does not fit {hw.name}: {fits} tokens of KV would be left")
    return fits


class ProfiledDevice:
    """A `talaria_gpu.engine.sim.device.Device` of profiles.

    Args:
        hw: the GPU group.
        models: by the name that calls use.
        calibration: which timing.
        hkvr, staging: which of the mechanisms it has.
        block_tokens: of host KV.
        host_gib: of host KV; None: what the weights of all `models` leave of the hardware's.

    Raises:
        ProfileError: a model has no such timing, or does not fit; weights and KV do not fit the host.
    """

    def __init__(
        self,
        hw: Hardware,
        models: Mapping[str, Model],
        calibration: CalibrationName,
        *,
        hkvr: bool = False,
        staging: bool = False,
        block_tokens: int = 64,
        host_gib: float | None = None,
    ) -> None:
        self.hw = hw
        weights = sum(weight_bytes(m, hw) for m in models.values()) if host_gib is None else 0
        host_bytes = int((hw.host_gib if host_gib is None else host_gib) * GIB) - weights
        self.substrate = Substrate(
            hkvr=hkvr,
            staging=staging,
            host_bytes=host_bytes,
            h2d_bytes_per_s=hw.gpus * hw.h2d_gb_s * 1e9,
            d2h_bytes_per_s=hw.gpus * (hw.kv_gb_s or hw.h2d_gb_s) * 1e9,
            kv_bytes_per_s=hw.gpus * hw.kv_gb_s * 1e9 or None,
            buffer_bytes=buffer_bytes(hw),
            chunk_bytes=int(hw.gpus * hw.staging_chunk_mib * (1 << 20)),
            block_tokens=block_tokens,
        )
        self.times = {name: times(m, hw, calibration) for name, m in models.items()}
        self._models = dict(models)
        self._specs = {name: self._spec(m) for name, m in models.items()}
        block = max(spec.kv_bytes_per_token for spec in self._specs.values()) * block_tokens if hkvr else 0
        if host_bytes < block:
            what = " and ".join(["weights"] * bool(weights) + ["a block of KV"] * bool(block))
            raise ProfileError(f"{hw.name}: host_gib: expected at least {(weights + block) / GIB:.4f}: {what}")

    def _spec(self, model: Model) -> ModelSpec:
        capacity = kv_capacity_tokens(model, self.hw)
        return ModelSpec(
            kv_capacity_tokens=capacity,
            context_tokens=min(capacity, model.context_tokens),
            max_running=model.max_running,
            weight_bytes=weight_bytes(model, self.hw),
            kv_bytes_per_token=model.kv_bytes_per_token * copies(model, self.hw),
            prefill_tokens=model.prefill_tokens,
            kv_segments=model.kv_segments,
            reserved_bytes=state_bytes(model),
        )

    def spec(self, model: str) -> ModelSpec:
        """What the device holds of it."""
        return self._specs[model]

    def prefill_ms(self, model: str, parts: Sequence[Part]) -> float:
        """One prefill step."""
        return self.times[model].prefill_ms(parts)

    def decode_ms(self, model: str, batch: int, context_tokens: int, steps: int) -> float:
        """Decode iterations."""
        return self.times[model].decode_ms(batch, context_tokens, steps)

    def open_ms(self, model: str) -> float:
        """Its weights, from disk to the host."""
        return self._specs[model].weight_bytes / self.hw.disk_gb_s / 1e6 if self.hw.disk_gb_s else 0.0

    def switch_ms(self, source: str | None, target: str, d2d_bytes: int = 0) -> Phases:
        """Every rank gathers its share within its HBM and, beside that, loads the rest from host (appendix D)."""
        hw = self.hw
        h2d_bytes = self._specs[target].weight_bytes - d2d_bytes
        load = max(d2d_bytes / hw.d2d_gb_s, h2d_bytes / hw.h2d_gb_s) / hw.gpus / 1e6
        first = hw.phase1_ms if source is not None else 0.0
        return (first, hw.phase2_ms + load, hw.phase3_ms, hw.phase4_ms, hw.phase5_ms)
