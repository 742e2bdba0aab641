"""Runs an experiment of a spec."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from talaria_replay import trace, workload
from talaria_replay.generate import generate
from talaria_replay.measure import percentiles
from talaria_replay.quantiles import nearest_rank
from talaria_replay.report.cost import cost
from talaria_replay.report.outcome import Outcome, Row
from talaria_replay.report.spec import Experiment, Spec
from talaria_replay.sim import profiles
from talaria_replay.sim.capacity import search
from talaria_replay.sim.run import SimResult
from talaria_replay.sim.scenario import Scenario, ScenarioError
from talaria_replay.sim.store import ResultStore
from talaria_replay.trace import Call
from talaria_router.policies import POLICIES

MAX_CONTEXT = 190_000
"""Below the shortest context of the paper's models."""
SMALL_CONTEXT = 120_000
ROUTER_CALLS = 4
"""Calls per session of the 120-call subset (30 sessions)."""


class Runner:
    """Runs the experiments of a spec.

    Args:
        spec: the file.
        calls: a trace to take the ten issues from; None: generated.
        issues: ten as in the paper; fewer for a quick look.
        seed: of what is generated.
        tell: told of each simulation before it begins.
        keep: folder for the results of single simulations, from which a stopped report goes on; None: none.
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
        keep: Path | None = None,
    ) -> None:
        self._spec = spec
        self._calls = calls
        self._issues = issues
        self._seed = seed
        self._tell = tell
        self._store = ResultStore(keep)
        self._made: dict[tuple[bytes, bytes], SimResult | str] = {}
        """Figures share simulations."""
        self.source = source or f"generated: the paper's shape, {issues} issues on each model, seed {seed}"
        if issues < workload.ISSUES:
            self.source += (
                f" (a quick look: the paper's load is {workload.ISSUES} issues, so its figures are not comparable)"
            )
        self.gaps = "all gaps are synthetic" if calls is None else _gaps(trace.gap_sources(calls))
        """Where the workload's gaps come from."""
        self._kinds: dict[str, Callable[[Experiment], Outcome]] = {
            "shape": self._shape,
            "compare": self._compare,
            "router": self._router,
            "tau": self._tau,
            "signals": self._signals,
            "sweep": self._sweep,
            "cost": self._cost,
            "capacity": self._capacity,
            "catalog": self._catalog,
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
        calls = [c for c in made if c.session not in long]
        if not calls:
            raise ScenarioError(f"no session of the trace stays within {limit} tokens")
        return calls

    def _simulate(self, name: str, scenario: Scenario, calls: Sequence[Call], *, source: str = "") -> SimResult | str:
        """The result, or why there is none. `source`: how the calls were made, if not as the workload."""
        known = msgspec.json.encode(scenario, order="deterministic"), hashlib.blake2b(_encode(calls)).digest()
        if known not in self._made:
            self._tell(name)
            generated = source or (self.source if self._calls is None else "")
            try:
                self._made[known] = self._store.simulate(scenario, calls, generated=generated)
            except (ScenarioError, profiles.ProfileError) as e:
                self._made[known] = str(e)
        return self._made[known]

    # --- the kinds

    def _shape(self, e: Experiment) -> Outcome:
        calls = list(generate("paper", sessions=1500, models=["m"], seed=self._seed))
        depth = [float(len(s)) for s in trace.sessions(calls).values()]
        gaps = [c.gap_s for c in calls if c.gap_s is not None]
        prompts = [float(c.prompt_tokens) for c in calls]
        returns = [(a, b) for a, b in itertools.pairwise(calls) if a.session == b.session]
        reused = [b.reusable_tokens / (a.prompt_tokens + a.completion_tokens) for a, b in returns]
        found = {
            "depth_p50": nearest_rank(depth, 50),
            "depth_p95": nearest_rank(depth, 95),
            "depth_max": max(depth),
            "gap_p50_s": nearest_rank(gaps, 50),
            "gap_p95_s": nearest_rank(gaps, 95),
            "prompt_p50": nearest_rank(prompts, 50),
            "prompt_p95": nearest_rank(prompts, 95),
            "reused_over_half_share": sum(share > 0.5 for share in reused) / len(reused),
        }
        out = Outcome(e, curves={"prompt tokens": prompts}, curve="sct")
        out.rows = [Row("generated sessions", n, v, e.paper.get(n)) for n, v in found.items()]
        out.notes.append(
            "1500 generated sessions; the shape was chosen to meet these quantiles, and gaps are synthetic"
        )
        return out

    def _compare(self, e: Experiment) -> Outcome:
        """Configurations under each calibration and start."""
        scenario = self._spec.scenarios[e.scenario]
        calls = self._workload(scenario, MAX_CONTEXT)
        out = Outcome(e)
        for calibration in e.calibrations or [scenario.calibration]:
            for start in e.starts or ["all at once"]:
                base: SimResult | str = ""
                results = []
                for configuration in e.configurations:
                    what = ", ".join([configuration, calibration] + ([start] if len(e.starts) > 1 else []))
                    changed = _with(
                        scenario, {"calibration": calibration, "ablation": configuration} | _start(self._spec, start)
                    )
                    result = self._simulate(what, changed, calls)
                    published, first = e.paper.get(configuration, {}), e.configurations[0]
                    out.add(what, result, e.metrics, published)
                    base = base or result
                    results.append(result)
                    if configuration != first:
                        own = {n: value for n, value in e.paper.get(first, {}).items() if value}
                        out.compare(what, result, base, {n: published[n] / own[n] for n in published.keys() & own})
                    if configuration in e.paired:
                        out.pair(what, base, result, e.paired[configuration])
                    out.draw(what, result)
                out.top(", ".join(["all of these", calibration] + ([start] if len(e.starts) > 1 else [])), results)
        out.notes.append(f"{len(calls)} calls of {len(trace.sessions(calls))} sessions; {self.source}")
        return out

    def _sweep(self, e: Experiment) -> Outcome:
        """Changes of one scenario."""
        scenario = self._spec.scenarios[e.scenario]
        calls = self._workload(scenario, MAX_CONTEXT)
        out = Outcome(e)
        for calibration in e.calibrations or [scenario.calibration]:
            for name, change in e.changes.items():
                what = f"{name}, {calibration}"
                result = self._simulate(what, _with(scenario, {"calibration": calibration} | change), calls)
                out.add(what, result, e.metrics, {})
                out.draw(what, result)
        return out

    def _two_workers(self, e: Experiment) -> tuple[Scenario, list[Call]]:
        scenario = self._spec.scenarios[e.scenario]
        return scenario, workload.first_calls(self._workload(scenario, SMALL_CONTEXT), ROUTER_CALLS)

    def _router(self, e: Experiment) -> Outcome:
        scenario, calls = self._two_workers(e)
        out = Outcome(e)
        for load, stagger_s in e.loads.items():
            for policy in e.policies:
                what = f"{load}, {policy}"
                result = self._simulate(what, _with(scenario, {"policy": policy, "stagger_s": stagger_s}), calls)
                out.add(what, result, e.metrics, e.paper.get(load, {}).get(policy, {}))
                if load == "high":
                    out.draw(what, result)
        out.notes.append(f"{len(calls)} calls; {self.source}")
        return out

    def _tau(self, e: Experiment) -> Outcome:
        scenario, calls = self._two_workers(e)
        out = Outcome(e)
        for tau in e.taus:
            what = f"tau {tau} s"
            result = self._simulate(what, _with(scenario, {"tau_s": tau, "stagger_s": e.stagger_s}), calls)
            out.add(what, result, e.metrics, e.paper.get(str(tau), {}))
            out.draw(what, result)
        out.notes.append(f"{len(calls)} calls; {self.source}")
        return out

    def _signals(self, e: Experiment) -> Outcome:
        scenario, calls = self._two_workers(e)
        out = Outcome(e)
        for policy, system in e.signals.items():
            what = f"{policy} ({system})"
            if policy not in POLICIES:
                out.rows.append(Row(what, e.metrics[0], None, note="not simulated: the router has no such policy"))
                continue
            result = self._simulate(what, _with(scenario, {"policy": policy, "stagger_s": e.stagger_s}), calls)
            out.add(what, result, e.metrics, {})
            out.draw(what, result)
        return out

    def _capacity(self, e: Experiment) -> Outcome:
        """How many instances keep p95 SCT under each bound."""
        scenario = self._spec.scenarios[e.scenario]
        calls, source = self._catalog_calls(e) if e.catalog else (self._workload(scenario, MAX_CONTEXT), "")
        out = Outcome(e)
        for calibration in e.calibrations or [scenario.calibration]:
            base = _with(scenario, {"calibration": calibration})

            def run(sized: Scenario, calibration: str = calibration) -> SimResult:
                count = sum(g.count for g in sized.groups)
                result = self._simulate(f"{count} instances, {calibration}", sized, calls, source=source)
                if isinstance(result, str):
                    raise ScenarioError(result)
                return result

            for bound_s in e.bounds:
                what = f"p95 SCT under {bound_s:g} s, {calibration}"
                try:
                    found = search(base, bound_s, run, most=e.most, **_sizes(e, base))
                except (ScenarioError, profiles.ProfileError) as error:
                    out.rows.append(Row(what, "instances", None, note=str(error)))
                    continue
                tried = ", ".join(f"{t.instances}: {t.sct_p95_s:.0f} s" for t in found.tried)
                note = f"p95 by number tried: {tried}" + ("" if found.instances else "; none is enough")
                out.rows.append(Row(what, "instances", found.instances, note=note))
                if found.result is not None:
                    out.add(what, found.result, e.metrics, {})
        out.notes.append(f"{len(calls)} calls of {len(trace.sessions(calls))} sessions; {source or self.source}")
        return out

    def _catalog(self, e: Experiment) -> Outcome:
        """Many models of uneven popularity, under changes of the scenario."""
        assert e.catalog is not None
        scenario = self._spec.scenarios[e.scenario]
        calls, source = self._catalog_calls(e)
        out = Outcome(e)
        for calibration in e.calibrations or [scenario.calibration]:
            placed = _with(scenario, {"calibration": calibration})
            placed = msgspec.structs.replace(placed, groups=e.catalog.groups(e.instances))
            for name, change in (e.changes or {"as it is": {}}).items():
                what = f"{name}, {calibration}"
                result = self._simulate(what, _with(placed, change), calls, source=source)
                out.add(what, result, e.metrics, {})
                out.draw(what, result)
        out.notes.append(f"{len(calls)} calls on {e.instances} instances; {source}")
        return out

    def _catalog_calls(self, e: Experiment) -> tuple[list[Call], str]:
        """The catalog's sessions, and how they were made."""
        assert e.catalog is not None
        calls = generate(
            e.shape,
            sessions=max(1, e.sessions * self._issues // workload.ISSUES),
            models=e.catalog.models,
            seed=self._seed,
            max_calls=e.max_calls,
            max_context_tokens=SMALL_CONTEXT,
            shares=e.catalog.shares,
        )
        source = (
            f"generated: shape {e.shape!r}, {e.catalog.size} models, Zipf {e.catalog.exponent:g}, seed {self._seed}"
        )
        return list(calls), source

    def _cost(self, e: Experiment) -> Outcome:
        scenario = self._spec.scenarios[e.scenario]
        calls = self._workload(scenario, MAX_CONTEXT)
        out = Outcome(e)
        out.rows, notes = cost(scenario, calls, self._simulate, list(e.calibrations) or [scenario.calibration])
        out.notes += notes
        prompts = percentiles([c.prompt_tokens for c in calls])
        out.notes.append(f"{len(calls)} calls, prompts p50 {prompts['p50']:,.0f} tokens; {self.source}")
        return out


def _encode(calls: Sequence[Call]) -> bytes:
    return b"".join(map(msgspec.json.Encoder().encode, calls))


def _sizes(e: Experiment, scenario: Scenario) -> dict[str, Any]:
    """How the capacity question grows a catalog."""
    of = e.catalog
    if of is None:
        return {}
    return {"size": lambda n: msgspec.structs.replace(scenario, groups=of.groups(n)), "least": of.least}


def _gaps(sources: dict[str, int]) -> str:
    """Of a trace, in words."""
    known = [f"{n} {source}" for source, n in sources.items() if source != "none"]
    missing = trace.missing_gaps(sources)
    return "; ".join([f"gaps: {', '.join(known)}"] * bool(known) + [missing] * bool(missing)) or "no gaps"


def _with(scenario: Scenario, changes: Mapping[str, Any]) -> Scenario:
    """The scenario, changed; the values are checked as in a file."""
    return msgspec.convert(msgspec.to_builtins(scenario) | dict(changes), Scenario)


def _start(spec: Spec, name: str) -> dict[str, Any]:
    start = spec.starts.get(name)
    return {} if start is None else {"stagger_s": start.stagger_s, "concurrent": start.concurrent}
