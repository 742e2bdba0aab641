"""See the package."""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec

from bench.ablation import figures, models, scale, sessions
from bench.ablation.check import Checker
from bench.ablation.job import Answer, Job, Replay
from bench.report import ROOT, Figure, figure, machine, write
from talaria_gpu.sched.ablation import NAMES
from talaria_replay import trace
from talaria_replay.trace import Call

PREFIX_TOKENS = 1536
"""What the trace's median prefix is scaled to."""
CONTEXT = models.CONTEXT
KV_TOKENS = 65_536
START_SPREAD_S = 4.0
"""The first sessions begin evenly over this much of the paper's time; when they do there is not published."""
CONCURRENT = 6
"""Sessions at a time: what the paper's own figures leave room for (30 sessions, p50 189 s and p95 867 s of 1632 s)."""
ISSUES, QUICK_ISSUES = 10, 4
CALLS, QUICK_CALLS = 6, 3
SINGLE_CALLS = 3
CHECKED = 6
"""Calls per model that are compared with the reference whatever the configurations say."""
CHECKED_DIFFERENT = 12
CHILD_TIMEOUT_S = 900
QUIET = {"PYTHONWARNINGS": "ignore", "TQDM_DISABLE": "1", "OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": "1"}


def child(job: Job, folder: Path) -> Answer:
    """Run the job in a process of its own. Raises RuntimeError with the end of what it said."""
    asked, answer, log = folder / "job.json", folder / "answer.json", folder / "log"
    answer.unlink(missing_ok=True)
    asked.write_bytes(msgspec.json.encode(job))
    with log.open("wb") as out:
        done = subprocess.run(
            [sys.executable, "-m", "bench.ablation.child", str(asked), str(answer)],
            cwd=ROOT,
            env=os.environ | QUIET,
            stdout=out,
            stderr=subprocess.STDOUT,
            timeout=CHILD_TIMEOUT_S,
            check=False,
        )
    if done.returncode:
        raise RuntimeError(f"{job.ablation}: " + log.read_text(errors="replace")[-2000:])
    return msgspec.json.decode(answer.read_bytes(), type=Answer)


def measure(job: Job, runs: int, budget_s: float, folder: Path) -> list[dict[str, dict[str, Replay]]]:
    """`runs` runs of every configuration, in another order each time; no run is begun that would outlast the budget."""
    out: list[dict[str, dict[str, Replay]]] = []
    began = time.monotonic()
    for number in range(runs):
        spent = time.monotonic() - began
        if number and spent + spent / number > budget_s:
            print("ablation: time is over", flush=True)
            break
        order = [*NAMES[number % len(NAMES) :], *NAMES[: number % len(NAMES)]]
        run: dict[str, dict[str, Replay]] = {}
        for name in order:
            answer = child(msgspec.structs.replace(job, ablation=name), folder)
            run[name] = answer.replays
            shown = figures.values(answer.replays["main"])
            text = "  ".join(f"{k} {shown[k][0]:.3g}" for k in ("wall_s", "sct_p50_s", "sct_p95_s", "ttft_p50_s"))
            print(f"ablation: run {number + 1} {name:10} {text}", flush=True)
        out.append(run)
    return out


def tokens_figures(
    runs: list[dict[str, dict[str, Replay]]], calls: list[Call], paths: dict[str, Path]
) -> dict[str, Figure]:
    """Compare answers with each other and with the reference."""
    checker = Checker(trace.sessions(calls), paths)
    said = {f"{i}/{name}": run[name]["main"].tokens for i, run in enumerate(runs) for name in run}
    different = checker.different_calls(said)
    first = next(iter(said.values()))
    rng = random.Random(0)
    sample: dict[str, list[list[int]]] = {}
    for model in paths:
        own = sorted(f"{c.session}/{c.call}" for c in calls if c.model == model)
        sample |= {rid: [first[rid]] for rid in rng.sample(own, min(CHECKED, len(own)))}
    checker.compare(sample | dict(list(different.items())[:CHECKED_DIFFERENT]))
    return {
        "calls_with_other_tokens": figure([float(checker.different)], "calls"),
        "answers_compared_with_reference": figure([float(checker.compared)], "answers"),
        "answers_unlike_reference": figure([float(checker.wrong)], "answers"),
        "reference_ties": figure([float(checker.ties)], "tokens"),
    }


def main() -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(prog="bench.ablation", description="The five configurations side by side.")
    parser.add_argument("trace", nargs="?", type=Path, help="default: $TALARIA_TRACES, else generated sessions")
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--calls", type=int, default=0, help=f"of each session (default {CALLS}, quick {QUICK_CALLS})")
    parser.add_argument("--prefix", type=int, default=PREFIX_TOKENS, help="tokens of the median prefix, scaled")
    parser.add_argument("--issues", type=int, default=0, help=f"sessions per model (default {ISSUES})")
    parser.add_argument(
        "--concurrent", type=int, default=CONCURRENT, help=f"sessions at a time, 0: all at once (default {CONCURRENT})"
    )
    parser.add_argument("--minutes", type=float, default=30.0, help="no run is begun that would end later")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path, default=None, help="default bench/results/ablation.json")
    args = parser.parse_args()
    where, paths = machine(), models.prepared()
    path = sessions.source(args.trace)
    issues = args.issues or (QUICK_ISSUES if args.quick else ISSUES)
    calls = sessions.read(path, models.NAMES, calls=args.calls or (QUICK_CALLS if args.quick else CALLS), issues=issues)
    print(f"ablation: {len(calls)} calls of {path.name if path else 'generated sessions'}", flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        job = Job(ablation="talaria", paths={n: str(p) for n, p in paths.items()}, context=CONTEXT, kv_tokens=KV_TOKENS)
        profiles = child(msgspec.structs.replace(job, prefix_tokens=args.prefix), folder).profiles
        for model, known in profiles.items():
            print(f"ablation: {model}: decode {known.decode_ms:.1f} ms, prefill {known.prefill_ms:.0f} ms", flush=True)
        how = scale.of(profiles, sessions.median_prefix(calls))
        print(f"ablation: {how}", flush=True)
        fitting, cut = sessions.scaled(calls, how.prompts, how.answers, CONTEXT)
        single = [c for c in fitting if c.model == models.NAMES[0] and c.call < SINGLE_CALLS]
        single = [msgspec.structs.replace(c, session=f"single-{c.session}") for c in single]
        job = msgspec.structs.replace(
            job,
            scale=how.time,
            weights_bytes_per_s=how.weights_bytes_per_s,
            kv_bytes_per_s=how.kv_bytes_per_s,
            slots=how.slots(),
            concurrent=args.concurrent,
            replays={"single": single, "main": fitting},
            starts=sessions.starts(fitting, START_SPREAD_S * how.time)
            | sessions.starts(single, START_SPREAD_S * how.time),
        )
        runs = measure(job, args.runs, args.minutes * 60, folder)
    found = figures.figures(runs) | tokens_figures(runs, fitting, paths)
    found |= how.figures() | {
        "median_prefix": figure([float(args.prefix)], "tokens"),
        "decode_step_ms": figure([how.decode_ms], "ms"),
        "recompute_median_prefix_ms": figure([how.recompute_ms], "ms"),
        "concurrent_sessions": figure([float(args.concurrent)], "sessions"),
        "calls": figure([float(len(fitting))], "calls"),
        "calls_beyond_context": figure([float(cut)], "calls"),
    }
    for key, value in sorted(found.items()):
        print(f"ablation: {key:46} {value['median']:>10} {value['unit']}")
    print(f"ablation: {write('ablation', len(runs), found, args.out, where=where)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
