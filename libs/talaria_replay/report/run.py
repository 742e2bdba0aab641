"""Runs an experiment: rows of predicted beside published figures, and the curves for its picture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec

from talaria_replay import trace, workload
from talaria_replay.generate import generate
from talaria_replay.measure import percentiles, session_times
from talaria_replay.quantiles import nearest_rank
from talaria_replay.report.spec import Experiment, Spec
from talaria_replay.sim import profiles
from talaria_replay.sim.device import ProfiledDevice
from talaria_replay.sim.profiles import CalibrationName
from talaria_replay.sim.run import SimResult, simulate
from talaria_replay.sim.scenario import Scenario, ScenarioError
from talaria_replay.trace import Call
from talaria_router.policies import POLICIES

MAX_CONTEXT = 190_000
"""Below the shortest context of the paper's models."""
SMALL_CONTEXT = 120_000
ROUTER_CALLS = 4
"""Calls per session of the 120-call subset (30 sessions)."""
METRICS: dict[str, Callable[[dict[str, Any]], float | None]] = {
    "sct_p50": lambda s: s["sct_s"].get("p50"),
    "sct_p95": lambda s: s["sct_s"].get("p95"),
    "ttft_p50": lambda s: s["ttft_s"].get("p50"),
    "ttft_p95": lambda s: s["ttft_s"].get("p95"),
    "return_ttft_p50": lambda s: s["return_ttft_s"].get("p50"),
    "return_ttft_p95": lambda s: s["return_ttft_s"].get("p95"),
    "same_instance": lambda s: s["same_instance_share"],
    "avoidable_opens": lambda s: s["avoidable_opens"],
    "cached_share": lambda s: s["cached_share"],
    "switch_share": lambda s: s["switch_share"],
    "slots": lambda s: s["slots"],
}


@dataclass(frozen=True, slots=True)
class Row:
    """One line: what, the figure's name, predicted, published. None: there is none; `note` may say why."""

    what: str
    metric: str
    predicted: float | None
    published: float | None = None
    note: str = ""

    @property
    def ratio(self) -> float | None:
        """Predicted / published."""
        return self.predicted / self.published if self.predicted is not None and self.published else None


@dataclass(slots=True)
class Outcome:
    """An experiment's result. `curves`: name → values, for a CDF."""

    experiment: Experiment
    rows: list[Row] = field(default_factory=list)
    curves: dict[str, list[float]] = field(default_factory=dict)
    axis: str = ""
    notes: list[str] = field(default_factory=list)


class Runner:
    """Runs the experiments of a spec.

    Args:
        spec: the file.
        calls: a trace to take the ten issues from; None: generated.
        issues: ten as in the paper; fewer for a quick look.
        seed: of what is generated.
        tell: told of each simulation before it begins.
    """

    def __init__(
        self,
        spec: Spec,
        *,
        calls: Sequence[Call] | None = None,
        source: str = "",
        issues: int = workload.ISSUES,
        seed: int = 0,
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._spec = spec
        self._calls = calls
        self._issues = issues
        self._seed = seed
        self._tell = tell
        self.source = source or f"generated: the paper's shape, {issues} issues on each model, seed {seed}"
        if issues < workload.ISSUES:
            self.source += (
                f" (a quick look: the paper's load is {workload.ISSUES} issues, so its figures are not comparable)"
            )
        self._kinds: dict[str, Callable[[Experiment], Outcome]] = {
            "shape": self._shape,
            "ablations": self._ablations,
            "starts": self._starts,
            "router": self._router,
            "tau": self._tau,
            "signals": self._signals,
            "switch": self._switch,
        }

    def run(self, experiment: Experiment) -> Outcome:
        """One experiment."""
        return self._kinds[experiment.kind](experiment)

    # --- what is simulated

    def _models(self, scenario: Scenario) -> list[str]:
        return list(dict.fromkeys(profiles.model(m).name for g in scenario.groups for m in g.models))

    def _workload(self, scenario: Scenario, limit: int) -> list[Call]:
        models = self._models(scenario)
        if self._calls is None:
            return workload.generated(models, seed=self._seed, max_context_tokens=limit, issues=self._issues)
        made = workload.from_trace(self._calls, models, issues=self._issues)
        long = {c.session for c in made if c.prompt_tokens + c.completion_tokens > limit}
        return [c for c in made if c.session not in long]

    def _simulate(self, name: str, scenario: Scenario, calls: Sequence[Call], **changes: Any) -> SimResult | str:
        """The result, or why there is none."""
        self._tell(name)
        try:
            generated = self.source if self._calls is None else ""
            return simulate(msgspec.structs.replace(scenario, **changes), calls, generated=generated)
        except ScenarioError as e:
            return str(e)

    @staticmethod
    def _rows(what: str, result: SimResult | str, names: Sequence[str], published: dict[str, Any]) -> list[Row]:
        if isinstance(result, str):
            return [Row(what, n, None, published.get(n), result) for n in names if n in published]
        return [Row(what, n, METRICS[n](result.summary), published.get(n)) for n in names]

    # --- the kinds

    def _shape(self, e: Experiment) -> Outcome:
        calls = list(generate("paper", sessions=1500, models=["m"], seed=self._seed))
        depth = [float(len(s)) for s in trace.sessions(calls).values()]
        gaps = [c.gap_s for c in calls if c.gap_s is not None]
        prompts = [float(c.prompt_tokens) for c in calls]
        found = {
            "depth_p50": nearest_rank(depth, 50),
            "depth_p95": nearest_rank(depth, 95),
            "depth_max": max(depth),
            "gap_p50_s": nearest_rank(gaps, 50),
            "gap_p95_s": nearest_rank(gaps, 95),
            "prompt_p50": nearest_rank(prompts, 50),
            "prompt_p95": nearest_rank(prompts, 95),
        }
        out = Outcome(e, axis="prompt tokens", curves={"generated": prompts})
        out.rows = [Row("generated sessions", n, v, e.paper.get(n)) for n, v in found.items()]
        out.notes.append(
            "1500 generated sessions; the shape was chosen to meet these quantiles, and gaps are synthetic"
        )
        return out

    def _ablations(self, e: Experiment) -> Outcome:
        scenario = self._spec.scenarios[e.scenario]
        calls = self._workload(scenario, MAX_CONTEXT)
        out = Outcome(e, axis="session completion time, s")
        names = ("sct_p50", "sct_p95", "ttft_p50", "ttft_p95", "switch_share", "slots", "cached_share")
        for calibration in e.calibrations:
            for configuration in e.configurations:
                what = f"{configuration}, {calibration}"
                result = self._simulate(
                    f"{e.id}: {what}",
                    scenario,
                    calls,
                    calibration=cast("CalibrationName", calibration),
                    ablation=configuration,
                )
                out.rows += self._rows(what, result, names, e.paper.get(configuration, {}))
                if not isinstance(result, str):
                    out.curves[what] = list(session_times(result.calls).values())
        prompts = percentiles([c.prompt_tokens for c in calls])
        out.notes.append(f"{len(calls)} calls of {len(trace.sessions(calls))} sessions; {self.source}")
        out.notes.append(
            f"its prompts: p50 {prompts['p50']:,.0f}, p95 {prompts['p95']:,.0f} tokens; the paper gives no quantiles "
            "of its 960 calls, only of the 445-session trace (25K, 105K)"
        )
        return out

    def _starts(self, e: Experiment) -> Outcome:
        scenario = self._spec.scenarios[e.scenario]
        calls = self._workload(scenario, MAX_CONTEXT)
        out = Outcome(e, axis="session completion time, s")
        starts: dict[str, dict[str, Any]] = {
            "all at once": {},
            "10 s apart": {"stagger_s": 10.0},
            "60 s apart": {"stagger_s": 60.0},
            "six at once": {"concurrent": 6},
        }
        for configuration in e.configurations:
            for name, changes in starts.items():
                what = f"{configuration}, {name}"
                result = self._simulate(
                    f"{e.id}: {what}",
                    scenario,
                    calls,
                    ablation=configuration,
                    calibration=cast("CalibrationName", e.calibrations[0]),
                    **changes,
                )
                out.rows += self._rows(what, result, ("sct_p50", "sct_p95", "ttft_p50", "ttft_p95"), {})
                if not isinstance(result, str):
                    out.curves[what] = list(session_times(result.calls).values())
        return out

    def _two_workers(self, e: Experiment) -> tuple[Scenario, list[Call]]:
        scenario = self._spec.scenarios[e.scenario]
        return scenario, workload.first_calls(self._workload(scenario, SMALL_CONTEXT), ROUTER_CALLS)

    def _router(self, e: Experiment) -> Outcome:
        scenario, calls = self._two_workers(e)
        out = Outcome(e, axis="TTFT, s (high load)")
        names = ("sct_p50", "sct_p95", "ttft_p50", "ttft_p95", "avoidable_opens", "same_instance")
        for load, stagger_s in e.loads.items():
            for policy in e.policies:
                what = f"{load}, {policy}"
                result = self._simulate(f"{e.id}: {what}", scenario, calls, policy=policy, stagger_s=stagger_s)
                out.rows += self._rows(what, result, names, e.paper.get(load, {}).get(policy, {}))
                if load == "high" and not isinstance(result, str):
                    out.curves[policy] = [r.ttft_s for r in result.calls]
        out.notes.append(f"{len(calls)} calls; {self.source}")
        return out

    def _tau(self, e: Experiment) -> Outcome:
        scenario, calls = self._two_workers(e)
        out = Outcome(e, axis="TTFT of returns, s")
        for tau in e.taus:
            result = self._simulate(f"{e.id}: tau {tau} s", scenario, calls, tau_s=tau, stagger_s=e.stagger_s)
            names = ("return_ttft_p50", "return_ttft_p95", "same_instance", "sct_p50")
            out.rows += self._rows(f"tau {tau} s", result, names, e.paper.get(str(tau), {}))
            if not isinstance(result, str):
                out.curves[f"tau {tau} s"] = [r.ttft_s for r in result.calls if r.call]
                leases = result.summary["leases"]
                unused = 1 - leases["honoured"] / leases["installed"] if leases["installed"] else 0.0
                out.rows.append(Row(f"tau {tau} s", "unused_leases", round(unused, 4)))
        return out

    def _signals(self, e: Experiment) -> Outcome:
        scenario, calls = self._two_workers(e)
        out = Outcome(e, axis="session completion time, s")
        for policy, system in e.signals.items():
            what = f"{policy} ({system})"
            if policy not in POLICIES:
                out.rows.append(Row(what, "sct_p50", None, note="not simulated: the router has no such policy yet"))
                continue
            result = self._simulate(f"{e.id}: {policy}", scenario, calls, policy=policy, stagger_s=e.stagger_s)
            out.rows += self._rows(what, result, ("sct_p50", "sct_p95", "ttft_p95", "avoidable_opens"), {})
            if not isinstance(result, str):
                out.curves[policy] = list(session_times(result.calls).values())
        return out

    def _switch(self, e: Experiment) -> Outcome:
        scenario = self._spec.scenarios[e.scenario]
        group = scenario.groups[0]
        models = {profiles.model(m).name: profiles.model(m) for m in group.models}
        device = ProfiledDevice(profiles.hardware(group.hardware), models, scenario.calibration)
        out = Outcome(e)
        totals = []
        for name in models:
            phases = device.switch_ms("", name)
            totals.append(sum(phases))
            out.rows += [Row(name, f"P{n}_ms", round(ms, 1)) for n, ms in enumerate(phases, 1)]
            out.rows.append(Row(name, "total_ms", round(sum(phases), 1)))
        middle = percentiles(totals)["p50"]
        out.rows += [Row(f"p50 of the models ({what})", "total_ms", middle, ms) for what, ms in e.paper.items()]
        return out
