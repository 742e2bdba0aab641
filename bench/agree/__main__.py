"""See the package."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

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

ISSUES, QUICK_ISSUES = 6, 3
CALLS, QUICK_CALLS = 5, 3
GENERATED = "generated"


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


def main() -> int:
    """Measure, simulate, print and write."""
    parser = argparse.ArgumentParser(prog="bench.agree", description="Simulator and real engine side by side.")
    parser.add_argument("trace", nargs="?", default=GENERATED, help="a trace file, or 'generated'")
    parser.add_argument("--calls", type=int, default=0)
    parser.add_argument("--issues", type=int, default=0)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path, default=None, help="default bench/results/agree.json")
    args = parser.parse_args()
    where, paths = machine(), models.prepared()
    path = None if args.trace == GENERATED else Path(args.trace)
    calls = sessions.read(
        path,
        models.NAMES,
        calls=args.calls or (QUICK_CALLS if args.quick else CALLS),
        issues=args.issues or (QUICK_ISSUES if args.quick else ISSUES),
    )
    found: dict[str, Figure] = {}
    sct: dict[str, dict[str, float]] = {"real": {}, "simulated": {}}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        job = Job(
            ablation="talaria", paths={n: str(p) for n, p in paths.items()}, context=models.CONTEXT, kv_tokens=KV_TOKENS
        )
        known = child(msgspec.structs.replace(job, prefix_tokens=PREFIX_TOKENS), folder).profiles
        how = scale.of(known, sessions.median_prefix(calls))
        print(f"agree: {how}", flush=True)
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
        parts = components(job, folder)
        scenario = simulated.profiles(parts, how.weights_bytes_per_s, how.kv_bytes_per_s, folder)
        for ablation in NAMES:
            real = values(child(msgspec.structs.replace(job, ablation=ablation), folder).replays["main"])
            said = simulated_values(simulated.run(scenario, ablation, how, fitting, stagger_s))
            tag = ablation.replace("-", "_")
            sct["real"][ablation], sct["simulated"][ablation] = real["sct_p50_s"][0], said["sct_p50_s"]
            for key, predicted in said.items():
                if key not in real:
                    continue
                measured, unit = real[key]
                found[f"real_{key}_{tag}"] = figure([measured], unit)
                found[f"simulated_{key}_{tag}"] = figure([predicted], unit)
                if measured:
                    found[f"{key}_simulated_over_real_{tag}"] = figure([predicted / measured], "x")
            print(
                f"agree: {ablation:11} SCT p50 real {sct['real'][ablation]:.2f} s, simulated "
                f"{sct['simulated'][ablation]:.2f} s ({sct['simulated'][ablation] / sct['real'][ablation]:.2f})",
                flush=True,
            )
    same = order(sct["real"]) == order(sct["simulated"])
    found["same_order"] = figure([float(same)], "1 or 0")
    found["calls"] = figure([float(len(fitting))], "calls")
    print(f"agree: order, real: {', '.join(order(sct['real']))}; simulated: {', '.join(order(sct['simulated']))}")
    for key, value in sorted(found.items()):
        print(f"agree: {key:46} {value['median']:>10} {value['unit']}")
    print(f"agree: {write('agree', 1, found, args.out, where=where)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
