"""See the package."""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from bench.ablation import scale, sessions
from bench.ablation.__main__ import CONCURRENT, START_SPREAD_S, child
from bench.ablation.job import Job
from bench.compare import check, device, figures, models, systems
from bench.compare.loop import Outcome, Pace, replay, warm_up
from bench.compare.workload import with_bodies
from bench.report import Figure, figure, machine, write
from talaria_gpu.text import HfTokenizer
from talaria_replay.trace import Call

PREFIX_TOKENS = 1024
SESSIONS, QUICK_SESSIONS = 4, 1
CALLS, QUICK_CALLS = 4, 2
ROOM = 256
"""Tokens of the context that lengths may be off by: text is only about as long as asked for."""
CHECKED = 4
"""Calls with different answers that are compared with the reference; each costs a recompute per token."""


def measure(name: str, calls: Sequence[Call], pace: Pace, setup: systems.Setup, folder: Path) -> Outcome:
    """Start the system, replay, stop it. Raises RuntimeError, or a group of them."""
    began = time.monotonic()
    with systems.running(name, setup, folder) as system:
        ready = time.monotonic() - began
        asyncio.run(warm_up(system.urls))
        before = len(system.reloads())
        outcome = asyncio.run(replay(calls, system.urls, pace))
        outcome.reloads_s = system.reloads()[before:]
    shown = figures.values(outcome)
    text = "  ".join(f"{k} {shown[k][0]:.3g}" for k in ("wall_s", "sct_p50_s", "sct_p95_s", "call_p50_s", "ttft_p50_s"))
    print(f"compare: {name:18} {text}  (ready after {ready:.0f} s)", flush=True)
    return outcome


def chosen(text: str) -> list[str]:
    """Systems by name. Raises ValueError with those that there are."""
    names = [name.strip().replace("-", "_") for name in text.split(",")]
    if unknown := [name for name in names if name not in systems.NAMES]:
        raise ValueError(f"no system {unknown[0]!r}; there are: {', '.join(systems.NAMES)}")
    return names


def answers_figures(runs: Sequence[figures.Run], calls: Sequence[Call], setup: systems.Setup) -> dict[str, Figure]:
    """Compare some of the answers that differ with the reference."""
    found: dict[str, list[str]] = {}
    for run in runs[:1]:  # other runs have other bodies
        for system in run:
            if system != systems.TALARIA and systems.TALARIA in run:
                for rid, said in figures.other_answers(run, system).items():
                    found.setdefault(rid, []).extend(a for a in said if a not in found.get(rid, []))
    sample = dict(list(found.items())[:CHECKED])
    wrong = check.unlike_reference(sample, calls, setup.paths) if sample else 0
    return {
        "answers_compared_with_reference": figure([float(sum(map(len, sample.values())))], "answers"),
        "answers_unlike_reference": figure([float(wrong)], "answers"),
    }


def main() -> int:
    """Measure, print and write. 1: a system did not start or failed a call, and is in no figure of that run."""
    parser = argparse.ArgumentParser(prog="bench.compare", description="Talaria beside systems that people run today.")
    parser.add_argument("trace", nargs="?", type=Path, help="default: $TALARIA_TRACES, else generated sessions")
    parser.add_argument(
        "--sessions", type=int, default=0, help=f"per model (default {SESSIONS}, quick {QUICK_SESSIONS})"
    )
    parser.add_argument("--calls", type=int, default=0, help=f"of each session (default {CALLS}, quick {QUICK_CALLS})")
    parser.add_argument("--prefix", type=int, default=PREFIX_TOKENS, help="tokens of the median prefix, scaled")
    parser.add_argument(
        "--concurrent", type=int, default=CONCURRENT, help=f"sessions at a time, 0: all at once (default {CONCURRENT})"
    )
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--systems", type=chosen, default=list(systems.NAMES), help=", ".join(systems.NAMES))
    parser.add_argument(
        "--emulated-switch-s", type=float, default=0.0, help="of sglangmux_emulated; default: as over Talaria's link"
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path, default=None, help="default bench/results/compare.json")
    args = parser.parse_args()
    systems.interrupted()
    where, paths = machine(), models.prepared()
    path = sessions.source(args.trace)
    calls = sessions.read(
        path,
        models.NAMES,
        calls=args.calls or (QUICK_CALLS if args.quick else CALLS),
        issues=args.sessions or (QUICK_SESSIONS if args.quick else SESSIONS),
    )
    print(f"compare: {len(calls)} calls of {path.name if path else 'generated sessions'}", flush=True)
    tokenizer = HfTokenizer(next(iter(paths.values())))
    with tempfile.TemporaryDirectory(prefix="talaria-compare-") as name:
        folder = Path(name)
        job = Job(
            ablation="talaria",
            paths={n: str(p) for n, p in paths.items()},
            context=device.CONTEXT,
            kv_tokens=device.KV_TOKENS,
            prefix_tokens=args.prefix,
        )
        how = scale.of(child(job, folder).profiles, sessions.median_prefix(calls))
        print(f"compare: {how}", flush=True)
        setup = systems.Setup(paths, how, args.emulated_switch_s or scale.RELOAD_S * how.time)
        fitting, cut = sessions.scaled(calls, how.prompts, how.answers, device.CONTEXT - ROOM)
        pace = Pace(how.time, sessions.starts(fitting, START_SPREAD_S * how.time), args.concurrent)
        runs: list[dict[str, Outcome]] = []
        first: list[Call] = []
        whole = True
        for number in range(args.runs):
            bodies = with_bodies(fitting, lambda m: len(tokenizer.encode_chat(m)), f"run {number}")  # type: ignore[arg-type]
            first = first or bodies
            run: dict[str, Outcome] = {}
            turn = number % len(args.systems)
            for system in [*args.systems[turn:], *args.systems[:turn]]:
                try:
                    run[system] = measure(system, bodies, pace, setup, folder / f"{number}-{system}")
                except (RuntimeError, ExceptionGroup) as e:
                    whole = False
                    causes = e.exceptions if isinstance(e, ExceptionGroup) else [e]
                    print(f"compare: {system} left out: {'; '.join(map(str, causes))}", flush=True)
            runs.append(run)
    found = figures.figures(runs) | answers_figures(runs, first, setup)
    found |= how.figures() | {
        "median_prefix": figure([float(args.prefix)], "tokens"),
        "emulated_reload": figure([setup.reload_s], "s"),
        "concurrent_sessions": figure([float(args.concurrent)], "sessions"),
        "calls": figure([float(len(fitting))], "calls"),
        "calls_beyond_context": figure([float(cut)], "calls"),
    }
    for key, value in sorted(found.items()):
        print(f"compare: {key:46} {value['median']:>10} {value['unit']}")
    print(f"compare: {write('compare', len(runs), found, args.out, where=where)}")
    return 0 if whole else 1


if __name__ == "__main__":
    sys.exit(main())
