"""What the length of answers does to the gains of Talaria: the fixed replay, simulated, with answers cut to shares.

    python -m bench.answers [--shares 1 0.5 0.25 0.1] [--issues N]

Generated sessions (the paper's shape) on three models of one instance, six sessions at a time, under talaria, no-sp and
round-only. All figures are simulated. No repeats: the same input gives the same figures.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from bench.report import Figure, figure, machine, write
from talaria_replay import workload
from talaria_replay.sim.run import simulate
from talaria_replay.sim.scenario import Group, Scenario
from talaria_replay.trace import Call

MODELS = ("qwen3-235b", "glm-5-nvfp4", "qwen3.5-122b")
CALIBRATIONS = ("paper", "aic")
CONCURRENT = 6
METRICS = ("sct_s", "ttft_s")


def replay(calls: Sequence[Call], calibration: str, ablation: str) -> dict[str, float]:
    """Percentiles of one simulation, s."""
    scenario = Scenario(
        groups=(Group(hardware="paper-tp8", models=MODELS),),
        calibration=calibration,
        ablation=ablation,
        admission=False,
        concurrent=CONCURRENT,
    )
    summary = simulate(scenario, calls).summary
    return {f"{m.removesuffix('_s')}_{p}": summary[m][p] for m in METRICS for p in ("p50", "p95")}


def main() -> int:
    """Simulate, print and write."""
    parser = argparse.ArgumentParser(
        prog="bench.answers", description="The gains by the length of answers (simulated)."
    )
    parser.add_argument(
        "--shares", type=float, nargs="+", default=[1.0, 0.5, 0.25, 0.1], help="of each answer's tokens"
    )
    parser.add_argument("--issues", type=int, default=10)
    parser.add_argument("--out", type=Path, default=None, help="default bench/results/answers.json")
    args = parser.parse_args()
    where = machine()
    calls = workload.generated(MODELS, seed=0, max_context_tokens=190_000, issues=args.issues)
    found: dict[str, Figure] = {"calls": figure([float(len(calls))], "calls")}
    for share in args.shares:
        cut = [msgspec.structs.replace(c, completion_tokens=max(1, round(c.completion_tokens * share))) for c in calls]
        tokens = statistics.mean(c.completion_tokens for c in cut)
        found[f"answer_tokens_{share:g}"] = figure([tokens], "tokens, mean")
        for calibration in CALIBRATIONS:
            of = {name: replay(cut, calibration, name) for name in ("talaria", "no-sp", "round-only")}
            for name, values in of.items():
                tag = f"{name.replace('-', '_')}_{calibration}_{share:g}"
                for key, value in values.items():
                    found[f"{key}_s_{tag}"] = figure([value], "s, simulated")
                    if name != "talaria":
                        over = tag.replace(f"_{calibration}", f"_over_talaria_{calibration}")
                        found[f"{key}_{over}"] = figure([value / of["talaria"][key]], "x, simulated")
            ratios = "  ".join(f"{n} {v['sct_p50'] / of['talaria']['sct_p50']:.2f}" for n, v in of.items())
            print(f"answers: {calibration}, {tokens:.0f} tokens: SCT p50 over talaria's: {ratios}", flush=True)
    print(f"answers: {write('answers', 1, found, args.out, where=where)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
