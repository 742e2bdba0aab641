"""See the package."""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from bench.ablation import models, scale, sessions
from bench.ablation.__main__ import KV_TOKENS, PREFIX_TOKENS, START_SPREAD_S, child
from bench.ablation.figures import PHASES, values
from bench.ablation.job import Job, Replay
from bench.ablation.process import answer
from bench.agree import simulated
from bench.agree.child import Components
from bench.agree.simulated import steps_ms
from bench.report import Figure, figure, machine, write
from talaria_gpu.sched.ablation import NAMES
from talaria_replay import trace
from talaria_replay.measure import session_times
from talaria_replay.quantiles import nearest_rank
from talaria_replay.sim.device import Times
from talaria_replay.sim.run import SimResult
from talaria_replay.trace import Call

ISSUES, QUICK_ISSUES = 6, 3
CALLS, QUICK_CALLS = 5, 3
GENERATED = "generated"
APART = 1.1
"""Measured session times of two configurations differ by at least this, or their order is chance."""


class Pair(NamedTuple):
    """Of one configuration."""

    real: dict[str, tuple[float, str]]
    """Measured: value, unit."""
    sim: dict[str, float]
    curves: dict[str, float] = {}
    """See `curves`."""


Run = dict[str, Pair]
"""By configuration."""


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
        **{f"in_{phase}_s": result.summary["in_slots_s"][phase] for phase in PHASES if phase != "switch"},
        "in_switch_s": result.summary["switch_s"],
    }


def real_values(replay: Replay) -> dict[str, tuple[float, str]]:
    """The same, measured."""
    phases = {f"in_{phase}_s": (sum(s[f"{phase}_ms"] for s in replay.slots) / 1000, "s") for phase in PHASES}
    return values(replay) | phases


def curves(replay: Replay, of: Mapping[str, Times]) -> dict[str, float]:
    """What the components' curves say of the steps that the real engine made, over what they took."""
    said = {name: steps_ms(of[name], work) for name, work in replay.work.items()}
    prefill = sum(w.prefill_ms for w in replay.work.values())
    decode = sum(sum(w.decode_ms.values()) for w in replay.work.values())
    return {
        "prefill": sum(p for p, _ in said.values()) / max(1e-9, prefill),
        "decode": sum(d for _, d in said.values()) / max(1e-9, decode),
    }


def order(of: dict[str, float]) -> list[str]:
    """Configurations, the best first."""
    return sorted(of, key=lambda name: of[name])


def pairs_in_order(real: Mapping[str, float], said: Mapping[str, float]) -> float:
    """Share of the pairs of configurations that come in the same order, of those that `APART` sets apart."""
    pairs = [(a, b) for a, b in itertools.permutations(real, 2) if real[b] >= APART * real[a]]
    return sum(said[a] < said[b] for a, b in pairs) / len(pairs) if pairs else 1.0


class Given(NamedTuple):
    """Sessions that are replayed on both sides."""

    name: str
    path: Path | None
    """None: generated."""
    held_out: bool
    """Not looked at while the simulator was built."""


def rotated(calls: Sequence[Call], number: int, runs: int) -> list[Call]:
    """The sessions in another order for each of `runs` runs: who begins first decides much of who waits for whom."""
    of = list(trace.sessions(calls).values())
    at = number * len(of) // runs
    return list(itertools.chain.from_iterable(of[at:] + of[:at]))


def both(given: Given, calls: Sequence[Call], runs: int, folder: Path, paths: dict[str, Path]) -> list[Run]:
    """`runs` runs of every configuration on the real engine, each with the simulated one beside it."""
    job = Job(
        ablation="talaria",
        paths={n: str(p) for n, p in paths.items()},
        context=models.CONTEXT,
        kv_tokens=KV_TOKENS,
        unmeasured=True,
    )
    known = child(msgspec.structs.replace(job, prefix_tokens=PREFIX_TOKENS), folder).profiles
    how = scale.of(known, sessions.median_prefix(calls))
    print(f"agree: {given.name}: {how}", flush=True)
    fitting, _ = sessions.scaled(calls, how.prompts, how.answers, models.CONTEXT)
    out: list[Run] = []
    for number in range(runs):
        begun = rotated(fitting, number, runs)
        starts = sessions.starts(begun, START_SPREAD_S * how.time)
        stagger_s = sorted(starts.values())[1] if len(starts) > 1 else 0.0
        job = msgspec.structs.replace(
            job,
            scale=how.time,
            weights_bytes_per_s=how.weights_bytes_per_s,
            kv_bytes_per_s=how.kv_bytes_per_s,
            slots=how.slots(),
            replays={"main": begun},
            starts=starts,
        )
        parts = answer("bench.agree.child", job, Components, folder)
        scenario = simulated.profiles(parts, how.weights_bytes_per_s, how.kv_bytes_per_s, folder)
        times = simulated.times_of(scenario)
        run: Run = {}
        for ablation in NAMES:
            replay = child(msgspec.structs.replace(job, ablation=ablation), folder).replays["main"]
            said = simulated_values(simulated.run(scenario, ablation, how, begun, stagger_s))
            pair = run[ablation] = Pair(real_values(replay), said, curves(replay, times))
            measured, predicted = pair.real["sct_p50_s"][0], pair.sim["sct_p50_s"]
            print(
                f"agree: {given.name}, run {number + 1} {ablation:11} SCT p50 real {measured:.2f} s, simulated "
                f"{predicted:.2f} s ({predicted / measured:.2f}); wall "
                f"{pair.sim['wall_s'] / pair.real['wall_s'][0]:.2f}; the real steps by the curves: "
                f"{', '.join(f'{kind} {ratio:.2f}' for kind, ratio in pair.curves.items())}",
                flush=True,
            )
        out.append(run)
    return out


def figures(runs: Sequence[Run], prefix: str = "") -> dict[str, Figure]:
    """Over runs and traces: both sides' figures, their ratios, and whether configurations come in the same order."""
    found: dict[str, list[tuple[float, str]]] = {}
    for run in runs:
        for ablation, (real, said, by_curves) in run.items():
            tag = ablation.replace("-", "_")
            for kind, ratio in by_curves.items():
                found.setdefault(f"{prefix}curve_{kind}_over_real_{tag}", []).append((ratio, "x"))
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
        found.setdefault(f"{prefix}pairs_in_same_order", []).append((pairs_in_order(*sct), "of pairs"))
    return {name: figure([value for value, _ in rows], rows[0][1]) for name, rows in found.items()}


def _real_sct(pair: Pair) -> float:
    return pair.real["sct_p50_s"][0]


def _sim_sct(pair: Pair) -> float:
    return pair.sim["sct_p50_s"]


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
