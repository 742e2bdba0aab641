"""See the package."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from bench.ablation import models, scale, sessions
from bench.ablation.__main__ import KV_TOKENS, PREFIX_TOKENS, START_SPREAD_S, child
from bench.ablation.figures import values
from bench.ablation.job import Job
from bench.agree import simulated
from bench.agree.child import Components
from bench.report import ROOT, Figure, figure, machine, write
from talaria_gpu.sched.ablation import NAMES
from talaria_replay.measure import session_times
from talaria_replay.quantiles import nearest_rank
from talaria_replay.sim.run import SimResult
from talaria_replay.trace import Call

ISSUES, QUICK_ISSUES = 6, 3
CALLS, QUICK_CALLS = 5, 3
GENERATED = "generated"
Pair = tuple[dict[str, tuple[float, str]], dict[str, float]]
"""Of one configuration: what was measured (value, unit), and what was simulated."""
Run = dict[str, Pair]
"""By configuration."""


def components(job: Job, folder: Path) -> Components:
    """Measured in a process of its own. Raises RuntimeError with the end of what it said."""
    asked, answer, log = folder / "parts.json", folder / "parts-answer.json", folder / "parts-log"
    asked.write_bytes(msgspec.json.encode(job))
    with log.open("wb") as out:
        done = subprocess.run(
            [sys.executable, "-m", "bench.agree.child", str(asked), str(answer)],
            cwd=ROOT,
            env=os.environ | {"PYTHONWARNINGS": "ignore", "TQDM_DISABLE": "1", "OMP_WAIT_POLICY": "PASSIVE"},
            stdout=out,
            stderr=subprocess.STDOUT,
            timeout=900,
            check=False,
        )
    if done.returncode:
        raise RuntimeError(log.read_text(errors="replace")[-2000:])
    return msgspec.json.decode(answer.read_bytes(), type=Components)


def simulated_values(result: SimResult) -> dict[str, float]:
    """The figures that are compared."""
    sct = list(session_times(result.calls).values())
    ttft = [r.ttft_s for r in result.calls]
    return {
        "sct_p50_s": nearest_rank(sct, 50),
        "sct_p95_s": nearest_rank(sct, 95),
        "ttft_p50_s": nearest_rank(ttft, 50),
        "cached_share": result.summary["cached_share"],
        "switch_p50_ms": result.summary["switch_ms"].get("p50", 0.0),
        "slots": float(result.summary["slots"]),
        "wall_s": result.summary["window_s"],
    }


def order(of: dict[str, float]) -> list[str]:
    """Configurations, the best first."""
    return sorted(of, key=lambda name: of[name])


class Given(NamedTuple):
    """Sessions that are replayed on both sides."""

    name: str
    path: Path | None
    """None: generated."""
    held_out: bool
    """Not looked at while the simulator was built."""


def both(given: Given, calls: Sequence[Call], runs: int, folder: Path, paths: dict[str, Path]) -> list[Run]:
    """`runs` runs of every configuration on the real engine, each with the simulated one beside it."""
    job = Job(
        ablation="talaria", paths={n: str(p) for n, p in paths.items()}, context=models.CONTEXT, kv_tokens=KV_TOKENS
    )
    known = child(msgspec.structs.replace(job, prefix_tokens=PREFIX_TOKENS), folder).profiles
    how = scale.of(known, sessions.median_prefix(calls))
    print(f"agree: {given.name}: {how}", flush=True)
    fitting, _ = sessions.scaled(calls, how.prompts, how.answers, models.CONTEXT)
    starts = sessions.starts(fitting, START_SPREAD_S * how.time)
    stagger_s = sorted(starts.values())[1] if len(starts) > 1 else 0.0
    job = msgspec.structs.replace(
        job,
        scale=how.time,
        weights_bytes_per_s=how.weights_bytes_per_s,
        kv_bytes_per_s=how.kv_bytes_per_s,
        slots=how.slots(),
        replays={"main": fitting},
        starts=starts,
    )
    out: list[Run] = []
    for number in range(runs):
        parts = components(job, folder)
        scenario = simulated.profiles(parts, how.weights_bytes_per_s, how.kv_bytes_per_s, folder)
        run: Run = {}
        for ablation in NAMES:
            real = values(child(msgspec.structs.replace(job, ablation=ablation), folder).replays["main"])
            run[ablation] = real, simulated_values(simulated.run(scenario, ablation, how, fitting, stagger_s))
            measured, predicted = real["sct_p50_s"][0], run[ablation][1]["sct_p50_s"]
            print(
                f"agree: {given.name}, run {number + 1} {ablation:11} SCT p50 real {measured:.2f} s, simulated "
                f"{predicted:.2f} s ({predicted / measured:.2f})",
                flush=True,
            )
        out.append(run)
    return out


def figures(runs: Sequence[Run], prefix: str = "") -> dict[str, Figure]:
    """Over runs and traces: both sides' figures, their ratios, and whether configurations come in the same order."""
    found: dict[str, list[tuple[float, str]]] = {}
    for run in runs:
        for ablation, (real, said) in run.items():
            tag = ablation.replace("-", "_")
            for key, predicted in said.items():
                if key not in real:
                    continue
                measured, unit = real[key]
                found.setdefault(f"{prefix}real_{key}_{tag}", []).append((measured, unit))
                found.setdefault(f"{prefix}sim_{key}_{tag}", []).append((predicted, unit))
                if measured:
                    name = f"{prefix}{key.removesuffix('_ms').removesuffix('_s')}_sim_over_real_{tag}"
                    found.setdefault(name, []).append((predicted / measured, "x"))
        sct = [{name: float(side(pair)) for name, pair in run.items()} for side in (_real_sct, _sim_sct)]
        same = float(order(sct[0]) == order(sct[1]))
        found.setdefault(f"{prefix}same_order", []).append((same, "1 or 0"))
    return {name: figure([value for value, _ in rows], rows[0][1]) for name, rows in found.items()}


def _real_sct(pair: Pair) -> float:
    return pair[0]["sct_p50_s"][0]


def _sim_sct(pair: Pair) -> float:
    return pair[1]["sct_p50_s"]


def main() -> int:
    """Measure, simulate, print and write."""
    parser = argparse.ArgumentParser(prog="bench.agree", description="Simulator and real engine side by side.")
    parser.add_argument("traces", nargs="*", default=[GENERATED], help="trace files, or 'generated'")
    parser.add_argument(
        "--held-out", nargs="*", default=[], metavar="TRACE", help="traces that the simulator was not built with"
    )
    parser.add_argument("--calls", type=int, default=0)
    parser.add_argument("--issues", type=int, default=0)
    parser.add_argument("--runs", type=int, default=1, help="of each trace")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path, default=None, help="default bench/results/agree.json")
    args = parser.parse_args()
    where, paths = machine(), models.prepared()
    all_given = [
        Given(Path(text).name, None if text == GENERATED else Path(text), held_out)
        for held_out, texts in ((False, args.traces), (True, args.held_out))
        for text in texts
    ]
    runs: dict[bool, list[Run]] = {False: [], True: []}
    for given in all_given:
        calls = sessions.read(
            given.path,
            models.NAMES,
            calls=args.calls or (QUICK_CALLS if args.quick else CALLS),
            issues=args.issues or (QUICK_ISSUES if args.quick else ISSUES),
        )
        with tempfile.TemporaryDirectory() as name:
            runs[given.held_out] += both(given, calls, args.runs, Path(name), paths)
    found = figures(runs[False]) | figures(runs[True], "held_out_")
    found["traces"] = figure([float(len(args.traces))], "traces")
    found["held_out_traces"] = figure([float(len(args.held_out))], "traces")
    for key, value in sorted(found.items()):
        print(f"agree: {key:46} {value['median']:>10} {value['unit']}")
    print(f"agree: {write('agree', args.runs, found, args.out, where=where)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
