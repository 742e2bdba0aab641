"""See the package."""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from bench.ablation import figures, models, scale, sessions
from bench.ablation.check import Checker
from bench.ablation.job import Answer, Job, Replay
from bench.ablation.process import answer
from bench.report import Figure, figure, machine, write
from talaria_gpu.sched.ablation import NAMES, Name
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
CHECKED = 6
"""Calls per model that are compared with the reference whatever the configurations say."""
CHECKED_DIFFERENT = 12
MAIN, SINGLE = "main", "single"
"""The replays: of all models' sessions, and of those of one."""


def child(job: Job, folder: Path) -> Answer:
    """The job, done in a process of its own. Raises RuntimeError."""
    return answer("bench.ablation.child", job, Answer, folder)


def measure(
    job: Job, names: Sequence[Name], runs: int, budget_s: float, folder: Path
) -> list[dict[str, dict[str, Replay]]]:
    """`runs` runs of `names`, in another order each time; no run is begun that would outlast the budget."""
    out: list[dict[str, dict[str, Replay]]] = []
    began = time.monotonic()
    for number in range(runs):
        spent = time.monotonic() - began
        if number and spent + spent / number > budget_s:
            print("ablation: time is over", flush=True)
            break
        order = [*names[number % len(names) :], *names[: number % len(names)]]
        run: dict[str, dict[str, Replay]] = {}
        for name in order:
            answer = child(msgspec.structs.replace(job, ablation=name), folder)
            run[name] = answer.replays
            shown = figures.values(answer.replays[MAIN if MAIN in answer.replays else SINGLE])
            text = "  ".join(f"{k} {shown[k][0]:.3g}" for k in ("wall_s", "sct_p50_s", "sct_p95_s", "ttft_p50_s"))
            print(f"ablation: run {number + 1} {name:10} {text}", flush=True)
        out.append(run)
    return out


def tokens_figures(
    runs: list[dict[str, dict[str, Replay]]], part: str, calls: list[Call], paths: dict[str, Path]
) -> dict[str, Figure]:
    """Compare the answers of one replay with each other and with the reference."""
    checker = Checker(trace.sessions(calls), paths)
    said = {f"{i}/{name}": run[name][part].tokens for i, run in enumerate(runs) for name in run}
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


def of_one_model(calls: Sequence[Call]) -> list[Call]:
    """The first model's sessions."""
    return [c for c in calls if c.model == models.NAMES[0]]


def main() -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(prog="bench.ablation", description="The five configurations side by side.")
    parser.add_argument("trace", nargs="?", type=Path, help="default: $TALARIA_TRACES, else generated sessions")
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--calls", type=int, default=0, help=f"of each session (default {CALLS}, quick {QUICK_CALLS})")
    parser.add_argument(
        "--skip", type=int, default=sessions.SKIP, help=f"sessions begin after so many calls (default {sessions.SKIP})"
    )
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES, help="of the configurations")
    parser.add_argument("--single", action="store_true", help="one model's sessions alone, into ablation_single.json")
    parser.add_argument("--prefix", type=int, default=PREFIX_TOKENS, help="tokens of the median prefix, scaled")
    parser.add_argument("--issues", type=int, default=0, help=f"sessions per model (default {ISSUES})")
    parser.add_argument(
        "--concurrent", type=int, default=CONCURRENT, help=f"sessions at a time, 0: all at once (default {CONCURRENT})"
    )
    parser.add_argument("--minutes", type=float, default=30.0, help="no run is begun that would end later")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path, default=None, help="default bench/results/ablation[_single].json")
    args = parser.parse_args()
    where, paths = machine(), models.prepared()
    path = sessions.source(args.trace)
    calls = sessions.read(
        path,
        models.NAMES,
        calls=args.calls or (QUICK_CALLS if args.quick else CALLS),
        issues=args.issues or (QUICK_ISSUES if args.quick else ISSUES),
        skip=args.skip,
    )
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
        replays = {SINGLE: of_one_model(fitting)} if args.single else {MAIN: fitting}
        job = msgspec.structs.replace(
            job,
            scale=how.time,
            weights_bytes_per_s=how.weights_bytes_per_s,
            kv_bytes_per_s=how.kv_bytes_per_s,
            slots=how.slots(),
            concurrent=args.concurrent,
            replays=replays,
            starts={
                name: at
                for each in replays.values()
                for name, at in sessions.starts(each, START_SPREAD_S * how.time).items()
            },
        )
        runs = measure(job, args.only, args.runs, args.minutes * 60, folder)
    part = SINGLE if args.single else MAIN
    found = figures.figures(runs) | tokens_figures(runs, part, replays[part], paths)
    found |= how.figures() | {
        "median_prefix": figure([float(args.prefix)], "tokens"),
        "decode_step_ms": figure([how.decode_ms], "ms"),
        "recompute_median_prefix_ms": figure([how.recompute_ms], "ms"),
        "concurrent_sessions": figure([float(args.concurrent)], "sessions"),
        "calls": figure([float(len(replays[part]))], "calls"),
        "calls_beyond_context": figure([float(cut)], "calls"),
    }
    for key, value in sorted(found.items()):
        print(f"ablation: {key:46} {value['median']:>10} {value['unit']}")
    name = "ablation_single" if args.single else "ablation"
    print(f"ablation: {write(name, len(runs), found, args.out, where=where)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
