"""What simulating costs: time and memory of `talaria simulate`, on one core.

    python -m bench.simulate [--runs N] [--quick] [--calls N --instances M]

The cases run in processes of their own, one after the other, so that each says its own peak memory. Nothing here is a
prediction about a cluster: it is the simulator that is measured.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bench.report import ROOT, Figure, figure, machine, write
from talaria_replay import trace, workload
from talaria_replay.generate import generate
from talaria_replay.sim.catalog import Catalog
from talaria_replay.sim.run import simulate, simulate_sessions
from talaria_replay.sim.scenario import Group, Scenario

RUNS = 3
BIG = ("qwen3-235b", "glm-5-nvfp4", "qwen3.5-122b")
SMALL = ("qwen3-32b", "qwen2.5-32b", "qwen3.5-35b-a3b")
CALLS_PER_SESSION = 10
MODELS_PER_INSTANCE = 3
SESSIONS_PER_INSTANCE_S = 0.1
"""Starts: a load that the instances carry."""
UNITS = {"s": "s CPU", "mib": "MiB, peak", "events": "events", "ms_per_call": "ms CPU", "calls": "calls"}


def replay960(issues: int) -> dict[str, float]:
    """The paper's fixed replay under `talaria` and aic, all sessions at once (960 calls with ten issues)."""
    calls = workload.generated(BIG, seed=0, max_context_tokens=190_000, issues=issues)
    scenario = Scenario(groups=(Group(hardware="paper-tp8", models=BIG),), calibration="aic", admission=False)
    began = time.process_time()
    summary = simulate(scenario, calls).summary
    return {"s": time.process_time() - began, "events": summary["events"], "calls": len(calls)}


def cluster(calls: int, instances: int) -> dict[str, float]:
    """So many calls of a Zipf catalog on so many instances, three models for ten of them."""
    of = Catalog(hardware="paper-tp4", base=SMALL, size=max(3, instances * 3 // 10), per_instance=MODELS_PER_INSTANCE)
    scenario = Scenario(
        groups=of.groups(instances),
        calibration="roofline",
        page_tokens=512,
        kv_block_tokens=512,
        heartbeat_s=2.0,
        overload="queue",
        sessions_per_s=SESSIONS_PER_INSTANCE_S * instances,
        detail=False,
    )
    made = generate(
        "mini-swe-agent",
        sessions=max(1, calls // CALLS_PER_SESSION),
        models=of.models,
        seed=0,
        max_calls=CALLS_PER_SESSION,
        max_context_tokens=120_000,
        shares=of.shares,
    )
    began = time.process_time()
    summary = simulate_sessions(scenario, trace.grouped(made)).summary
    took, done = time.process_time() - began, summary["calls"]
    return {"s": took, "events": summary["events"], "calls": done, "ms_per_call": took / done * 1000}


def measured(case: list[str]) -> dict[str, float]:
    """A case in a process of its own. Raises CalledProcessError."""
    done = subprocess.run(
        [sys.executable, "-m", "bench.simulate", "--case", *case],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found: dict[str, float] = json.loads(done.stdout)
    return found


def case(name: str, numbers: list[int]) -> dict[str, Any]:
    """Run a case here, with the peak memory of this process."""
    found = replay960(numbers[0]) if name == "replay" else cluster(numbers[0], numbers[1])
    return found | {"mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


def main() -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(prog="bench.simulate", description="What simulating costs.")
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--quick", action="store_true", help="one run of one issue, and a small cluster")
    parser.add_argument("--calls", type=int, default=10_000, help="of the cluster; 0: no cluster")
    parser.add_argument("--instances", type=int, default=100)
    parser.add_argument("--out", type=Path, default=None, help="default bench/results/simulate.json")
    parser.add_argument("--case", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        print(json.dumps(case(args.case[0], [int(n) for n in args.case[1:]])))
        return 0
    where = machine()
    runs, issues = (1, 1) if args.quick else (args.runs, 10)
    calls, instances = (500, 10) if args.quick else (args.calls, args.instances)
    replays = []
    for n in range(runs):
        replays.append(measured(["replay", str(issues)]))
        print(f"simulate: run {n + 1}: {replays[-1]}", flush=True)
    name = "replay960" if issues == 10 else f"replay{round(replays[0]['calls'])}"
    found: dict[str, Figure] = {
        f"{name}_{key}": figure([r[key] for r in replays], UNITS[key]) for key in ("s", "mib", "events")
    }
    if calls:
        one = measured(["cluster", str(calls), str(instances)])
        print(f"simulate: {instances} instances: {one}", flush=True)
        tag = f"cluster_{calls}_calls_{instances}_instances"
        found |= {f"{tag}_{key}": figure([value], UNITS[key]) for key, value in one.items()}
    for key, value in sorted(found.items()):
        print(f"simulate: {key:52} {value['median']:>10} {value['unit']}")
    print(f"simulate: {write('simulate', runs, found, args.out, where=where)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
