"""The two-worker experiment (5.3) and four instances at rising load, simulated, over several seeds.

    python -m bench.router_policies [--runs N] [--quick]

Placement policies on the production cores in virtual time (`talaria_replay.sim`): 30 sessions of the paper's shape, ten
on each of three models, 120 calls. Everything is predicted, nothing measured; a seed gives the same figures everywhere.
A run is a seed: another ten issues. LOAD is how far apart sessions start.

avoidable_opens_POLICY_wN_LOAD       calls whose instance had to activate the model although another had it active
ttft_p50_s_…, ttft_p95_s_POLICY_wN_LOAD  time to the first token, with N instances
sct_p50_s_…, sct_p95_s_POLICY_wN_LOAD    session completion time
same_instance_POLICY_wN_LOAD         share of returning calls that stayed where they were
{ttft_p95,sct_p50,sct_p95}_POLICY_over_talaria_wN_LOAD   ratios within a seed
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from typing import NamedTuple

from bench.report import Figure, figure, machine, write
from talaria_replay import workload
from talaria_replay.report.run import ROUTER_CALLS, SMALL_CONTEXT
from talaria_replay.sim.run import simulate
from talaria_replay.sim.scenario import Group, Scenario

MODELS = ("qwen3-32b", "qwen2.5-32b", "qwen3.5-35b-a3b")
POLICIES = ("talaria", "least-pressure", "session-sticky")
TIMES = (("ttft", "p50"), ("ttft", "p95"), ("sct", "p50"), ("sct", "p95"))
RATIOS = ("ttft_p95", "sct_p50", "sct_p95")


class Setup(NamedTuple):
    """So many instances, and sessions that start so many seconds apart, by load."""

    instances: int
    loads: dict[str, float]


SETUPS = (
    Setup(2, {"low": 4.0, "medium": 1.0, "high": 0.25}),
    Setup(4, {"low": 2.0, "medium": 0.5, "high": 0.125}),
)


def scenario(instances: int, policy: str, stagger_s: float) -> Scenario:
    """The paper's two TP=4 workers (Figure 8), or more of them; nothing is refused."""
    groups = (Group(hardware="paper-tp4", models=MODELS, count=instances),)
    return Scenario(groups=groups, calibration="roofline", admission=False, policy=policy, stagger_s=stagger_s)


def run(seed: int, setups: tuple[Setup, ...]) -> dict[str, float]:
    """All setups, loads and policies on one seed's calls."""
    made = workload.generated(MODELS, seed=seed, max_context_tokens=SMALL_CONTEXT)
    calls = workload.first_calls(made, ROUTER_CALLS)
    found: dict[str, float] = {}
    for instances, loads in setups:
        for load, stagger_s in loads.items():
            at = f"w{instances}_{load}"
            for policy in POLICIES:
                summary = simulate(scenario(instances, policy, stagger_s), calls).summary
                name = policy.replace("-", "_")
                found[f"avoidable_opens_{name}_{at}"] = float(summary["avoidable_opens"])
                for what, share in TIMES:
                    found[f"{what}_{share}_s_{name}_{at}"] = float(summary[f"{what}_s"][share])
                found[f"same_instance_{name}_{at}"] = float(summary["same_instance_share"])
            for policy in POLICIES[1:]:
                name = policy.replace("-", "_")
                for time_ in RATIOS:
                    base = found[f"{time_}_s_talaria_{at}"]
                    found[f"{time_}_{name}_over_talaria_{at}"] = found[f"{time_}_s_{name}_{at}"] / base
    return found


def unit(name: str) -> str:
    """A figure's unit, by its name."""
    if "_over_" in name:
        return "x"
    return "calls" if name.startswith("avoidable") else "s" if "_s_" in name else "share"


def main() -> int:
    """Run and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5, help="seeds")
    parser.add_argument("--quick", action="store_true", help="one seed, two instances; the result is not written")
    args = parser.parse_args()
    where = machine()
    values: dict[str, list[float]] = defaultdict(list)
    for seed in range(1 if args.quick else args.runs):
        began = time.monotonic()
        for name, value in run(seed, SETUPS[:1] if args.quick else SETUPS).items():
            values[name].append(value)
        print(f"seed {seed}: {time.monotonic() - began:.0f} s", flush=True)
    figures: dict[str, Figure] = {name: figure(each, unit(name)) for name, each in values.items()}
    for name, each in figures.items():
        print(f"{name} {each['median']:g} ({each['min']:g} to {each['max']:g}) {each['unit']}")
    if not args.quick:
        print(write("router_policies", args.runs, figures, where=where))
    return 0


if __name__ == "__main__":
    sys.exit(main())
