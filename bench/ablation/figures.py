"""From replays to figures: each value is of one run, ratios are taken within it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bench.ablation.job import Replay
from bench.report import Figure, figure
from talaria_gpu.sched.ablation import NAMES
from talaria_replay.measure import session_times
from talaria_replay.quantiles import nearest_rank

PHASES = ("switch", "p", "d1", "sp", "d", "dfin", "linger")


def values(replay: Replay) -> dict[str, tuple[float, str]]:
    """What one replay says by itself: name → value, unit."""
    records = replay.records
    sct = list(session_times(records).values())
    ttft = [r.ttft_s for r in records]
    back = [r.ttft_s for r in records if r.call]
    prompt = sum(r.prompt_tokens for r in records)
    out: dict[str, tuple[float, str]] = {"wall_s": (replay.wall_s, "s"), "thread_s": (replay.thread_s, "s CPU")}
    for name, of in (("sct", sct), ("ttft", ttft), ("return_ttft", back)):
        for percent in (50, 95):
            if of:
                out[f"{name}_p{percent}_s"] = (nearest_rank(of, percent), "s")
    out["cached_share"] = (sum(r.cached_tokens for r in records) / prompt, "of prompt tokens")
    out["scheduler_share"] = (replay.scheduler_s / max(1e-9, replay.engine_s), "of step time")
    if replay.work:
        work = replay.work.values()
        out["prefill_steps"] = (sum(w.prefills for w in work), "steps")
        out["decode_steps"] = (sum(sum(w.decodes.values()) for w in work), "steps")
        out["computed_tokens"] = (sum(w.new_tokens for w in work), "tokens")
        steps_ms = sum(w.prefill_ms + sum(w.decode_ms.values()) for w in work)
        out["steps_s"] = (steps_ms / 1000, "s")
    slots = replay.slots
    wall = sum(s["wall_ms"] for s in slots)
    if not slots or not wall:
        return out
    for phase in PHASES:
        out[f"round_{phase}_share"] = (sum(s[f"{phase}_ms"] for s in slots) / wall, "of rounds' time")
    out["slots"] = (len(slots), "slots")
    out["rounds"] = (len({s["round"] for s in slots}), "rounds")
    ended = [s for a, s in zip(slots[1:], slots, strict=False) if a["round"] != s["round"]]
    if ended:
        out["round_p50_s"] = (nearest_rank([s["round_ms"] / 1000 for s in ended], 50), "s")
    out["infeasible_share"] = (sum(bool(s["infeasible"]) for s in slots) / len(slots), "of slots")
    admitted, parked = (sum(s[k] for s in slots) for k in ("sp_admitted", "sp_deferred"))
    if admitted + parked:
        out["sp_admission_rate"] = (admitted / (admitted + parked), "of returns handled")
    if replay.switches:
        totals = [s["total_ms"] for s in replay.switches]
        out["switch_p50_ms"] = (nearest_rank(totals, 50), "ms")
        moved = sum(s["weight_bytes"] for s in replay.switches)
        out["staged_share"] = (sum(s.get("d2d_bytes", 0) for s in replay.switches) / moved, "of weight bytes")
    return out


RATIOS = (
    "sct_p50_s",
    "sct_p95_s",
    "ttft_p50_s",
    "ttft_p95_s",
    "return_ttft_p50_s",
    "return_ttft_p95_s",
    "wall_s",
    "thread_s",
    "prefill_steps",
    "decode_steps",
    "computed_tokens",
    "steps_s",
)


def figures(runs: Sequence[Mapping[str, Mapping[str, Replay]]]) -> dict[str, Figure]:
    """Of all runs: configuration → replay's name → replay. "main" has no prefix in its figures' names."""
    found: dict[str, list[tuple[float, str]]] = {}
    for run in runs:
        for part in next(iter(run.values())):
            prefix = "" if part == "main" else f"{part}_"
            of = {name: values(run[name][part]) for name in NAMES if name in run}
            for name, each in of.items():
                tag = name.replace("-", "_")
                for key, value in each.items():
                    found.setdefault(f"{prefix}{key}_{tag}", []).append(value)
                    base = of["talaria"].get(key)
                    if name != "talaria" and key in RATIOS and base and base[0]:
                        short = key.removesuffix("_s")
                        found.setdefault(f"{prefix}{short}_{tag}_over_talaria", []).append((value[0] / base[0], "x"))
    return {name: figure([v for v, _ in each], each[0][1]) for name, each in found.items()}
