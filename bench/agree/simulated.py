"""The simulated side: what was measured as profile files, and the same sessions in virtual time."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from bench.ablation.child import CHUNK, GAP_CAP_S, HOST_KV_BYTES, MAX_RUNNING, PAGE
from bench.ablation.models import CONTEXT, LAYERS
from bench.ablation.scale import Scale
from bench.ablation.work import Work
from bench.agree.child import Components, Measured
from talaria_gpu.engine.contract import SwitchTiming
from talaria_replay.sim import profiles as load
from talaria_replay.sim.device import Times, times
from talaria_replay.sim.run import SimResult, simulate
from talaria_replay.sim.scenario import Group, Scenario
from talaria_replay.trace import Call

HARDWARE = "this-machine"
GIB = 1 << 30


def profiles(found: Components, weights_bytes_per_s: float, kv_bytes_per_s: float, folder: Path) -> Scenario:
    """Files that describe this machine and its models, and a scenario of them."""
    hardware = folder / f"{HARDWARE}.toml"
    hardware.write_text(_toml(_hardware(found, weights_bytes_per_s, kv_bytes_per_s)))
    models = []
    for name, of in found.models.items():
        models.append(folder / f"{name}.toml")
        models[-1].write_text(_toml(_model(name, of)))
    return Scenario(
        groups=(Group(hardware=str(hardware), models=tuple(str(m) for m in models)),),
        calibration="measured",
        admission=False,
        page_tokens=PAGE,
        kv_block_tokens=PAGE,
        gap_cap_s=GAP_CAP_S,
        hop_ms=0.0,
        tokenize_ms_per_ktoken=0.0,
    )


def times_of(scenario: Scenario) -> dict[str, Times]:
    """The curves of each of its models."""
    group = scenario.groups[0]
    hardware = load.hardware(group.hardware)
    named = [load.model(name) for name in group.models]
    return {model.name: times(model, hardware, "measured") for model in named}


def steps_ms(of: Times, work: Work) -> tuple[float, float]:
    """What curves say of steps that were made: (prefill ms, decode ms)."""
    prefill = of.prefill_fixed * work.prefills + of.prefill_token * work.new_tokens + of.prefill_pair * work.pairs
    empty = sum(of.decode_ms(batch, 0, 1) * steps for batch, steps in work.decodes.items())
    return prefill, empty + of.decode_context * work.context


def run(scenario: Scenario, ablation: str, how: Scale, calls: Sequence[Call], stagger_s: float) -> SimResult:
    """One configuration. Gaps and budgets are scaled here, as the real side does it."""
    scale, slots = how.time, how.slots()
    scaled = [msgspec.structs.replace(c, gap_s=None if c.gap_s is None else c.gap_s * scale) for c in calls]
    changed = msgspec.structs.replace(
        scenario,
        ablation=ablation,
        slot_ms=slots["slot_ms"],
        drain_ms=slots["drain_ms"],
        patience_s=slots["patience_ms"] / 1000,
        t_ttft_s=slots["t_ttft_ms"] / 1000,
        gamma=slots["gamma"],
        t_tpot_ms=slots["t_tpot_ms"],
        gap_cap_s=GAP_CAP_S * scale,
        stagger_s=stagger_s,
        heartbeat_s=0.5,
    )
    return simulate(changed, scaled)


def _hardware(found: Components, weights_bytes_per_s: float, kv_bytes_per_s: float) -> dict[str, object]:
    staged = [t for t in found.switches if t.path == "d2d"]
    cold = [t for t in found.switches if t.path == "h2d"]

    def phase(at: int) -> float:
        return statistics.median(t.phases_ms[at] for t in found.switches)

    # Phase 2 beside its copies: of switches from host, whose link is set, what they took beyond it.
    beside = [t.phases_ms[1] - t.weight_bytes / weights_bytes_per_s * 1000 for t in cold]
    fixed_ms = max(0.0, statistics.median(beside)) if beside else 0.0
    return {
        "name": HARDWARE,
        "about": "measured by bench.agree",
        "gpus": 1,
        "hbm_gib": found.buffer_bytes / GIB,
        "usable": 1.0,
        "h2d_gb_s": weights_bytes_per_s / 1e9,
        "kv_gb_s": kv_bytes_per_s / 1e9,
        "d2d_gb_s": statistics.median(_gather_gb_s(t, fixed_ms) for t in staged) if staged else 1.0,
        "host_gib": (HOST_KV_BYTES + sum(of.weight_bytes for of in found.models.values())) / GIB,
        "phase1_ms": phase(0),
        "phase2_ms": fixed_ms,
        "phase3_ms": phase(2),
        "phase4_ms": phase(3),
        "phase5_ms": phase(4),
    }


def _gather_gb_s(t: SwitchTiming, fixed_ms: float) -> float:
    return t.weight_bytes / 1e6 / max(0.01, t.phases_ms[1] - fixed_ms)


def _model(name: str, of: Measured) -> dict[str, object]:
    prefill = {str(new): ms for cached, new, ms in of.prefill if not cached}
    more = {f"{new}+{cached}": ms for cached, new, ms in of.prefill if cached}
    decode = {f"b{batch}@{context}": ms for batch, context, ms in of.decode}
    points = {"source": "bench.agree", "prefill_ms": prefill, "incr_prefill_ms": more, "decode_step_ms": decode}
    return {
        "name": name,
        "about": "measured by bench.agree",
        "weight_gb": of.weight_bytes / 1e9,
        "kv_bytes_per_token": of.kv_bytes_per_token,
        "kv_heads": 1,
        "kv_segments": 2 * LAYERS,
        "context_tokens": CONTEXT,
        "max_running": MAX_RUNNING,
        "prefill_tokens": CHUNK,
        "kv_tokens": of.kv_capacity_tokens,
        "measured": {HARDWARE: points},
    }


def _toml(values: Mapping[str, object]) -> str:
    return "".join(f"{key} = {_value(value)}\n" for key, value in values.items())


def _value(value: object) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{json.dumps(key)} = {_value(of)}" for key, of in value.items()) + " }"
    return json.dumps(value)
