"""From samples to figures: latencies added over the direct call, ratios between systems, CPU per request by part.

Names: METRIC_CASE; `talaria` is the subject unless a name says another one. A ratio is of one run's values, and the
figure is the median of the runs' ratios.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from bench.gateway.cases import Case
from bench.gateway.load import Result
from bench.gateway.systems import DIRECT, PACED, TALARIA
from bench.report import Figure, figure, percentile

BEHIND = frozenset({"worker", "engine"})
"""Parts that are not the gateway."""

Run = dict[str, dict[str, Result]]
"""Case name -> system -> what one run measured."""

Value = Callable[[Result], float]


def gateway_cpu_ms(result: Result) -> float:
    """CPU ms per request of everything between the client and the worker or engine."""
    own = sum(s for part, s in result.cpu_s.items() if part not in BEHIND)
    return own * 1e3 / max(1, result.requests)


def whole_cpu_ms(result: Result) -> float:
    """CPU ms per request, worker or engine included: an instance's I/O process does what a worker's HTTP side does."""
    return sum(result.cpu_s.values()) * 1e3 / max(1, result.requests)


def _rps(result: Result) -> float:
    return result.requests / result.wall_s


class _Maker:
    """Collects figures; a run in which a needed sample is missing or empty is left out."""

    def __init__(self, runs: list[Run]) -> None:
        self.runs = runs
        self.out: dict[str, Figure] = {}

    def single(self, name: str, unit: str, where: tuple[str, str], value: Value) -> None:
        """`value` of one system's samples; `where` is (case, system)."""
        case, system = where
        self._add(name, unit, [value(s) for (s,) in self._samples(case, system)])

    def added(self, name: str, case: str, system: str, value: Value) -> None:
        """How much more of it, in ms, a system has than the direct call."""
        self._add(name, "ms", [value(a) - value(b) for a, b in self._samples(case, system, DIRECT)])

    def ratio(self, name: str, case: str, pair: tuple[str, str], value: Value) -> None:
        """The first system's value over the second one's."""
        values = [(value(a), value(b)) for a, b in self._samples(case, *pair)]
        self._add(name, "x", [a / b for a, b in values if b > 0])

    def _samples(self, case: str, *systems: str) -> Iterable[tuple[Result, ...]]:
        for run in self.runs:
            found = tuple(run.get(case, {}).get(s) for s in systems)
            if all(r is not None and r.requests for r in found):
                yield tuple(r for r in found if r is not None)

    def _add(self, name: str, unit: str, values: list[float]) -> None:
        if values:
            self.out[name] = figure(values, unit)


def _subject(system: str) -> str:
    return "" if system == TALARIA else f"{system}_"


def make(cases: list[Case], runs: list[Run]) -> dict[str, Figure]:
    """All figures of `runs`."""
    it = _Maker(runs)
    systems = sorted({s for run in runs for samples in run.values() for s in samples})
    for case in cases:
        if case.bursts:
            for system in (s for s in systems if s != DIRECT):
                it.ratio(f"{case.name}_finish_{_subject(system)}over_direct", case.name, (system, DIRECT), _burst)
            it.single(f"{case.name}_finish_direct_ms", "ms", (case.name, DIRECT), _burst)
        elif case.model == PACED:
            _latency(it, case, systems)
        if not case.bursts:
            for system in systems:
                it.single(f"rps_{system}_{_label(case)}", "requests/s", (case.name, system), _rps)
                if system != TALARIA:
                    it.ratio(f"rps_talaria_over_{system}_{_label(case)}", case.name, (TALARIA, system), _rps)
        _cpu(it, case, systems)
    return it.out


def _label(case: Case) -> str:
    """The case in figures of a load: latencies are of paced cases only, and say no more than the case's name."""
    return f"paced_{case.name}" if case.model == PACED and not case.bursts else case.name


def _burst(result: Result) -> float:
    return percentile(result.burst_ms, 0.5)


def _quantile(series: str, q: int) -> Value:
    def value(result: Result) -> float:
        values: list[float] = getattr(result, series)
        return percentile(values, q / 100)

    return value


def _latency(it: _Maker, case: Case, systems: list[str]) -> None:
    for q in (50, 95):
        for metric in ("ttft", "per_token", "gap"):
            value = _quantile(f"{metric}_ms", q)
            it.single(f"direct_{metric}_p{q}_ms_{case.name}", "ms", (case.name, DIRECT), value)
            for system in (s for s in systems if s != DIRECT):
                it.added(f"added_{metric}_p{q}_ms_{_subject(system)}{case.name}", case.name, system, value)


def _part(part: str) -> Value:
    return lambda result: result.cpu_s.get(part, 0.0) * 1e3 / result.requests


def _cpu(it: _Maker, case: Case, systems: list[str]) -> None:
    label = _label(case)
    it.ratio(f"cpu_with_worker_talaria_over_direct_{label}", case.name, (TALARIA, DIRECT), whole_cpu_ms)
    for system in (s for s in systems if s != DIRECT):
        it.single(f"cpu_ms_per_request_{system}_{label}", "ms", (case.name, system), gateway_cpu_ms)
        if system != TALARIA:
            pair = (TALARIA, system)
            it.ratio(f"cpu_per_request_talaria_over_{system}_{label}", case.name, pair, gateway_cpu_ms)
            it.ratio(f"cpu_with_worker_talaria_over_{system}_{label}", case.name, pair, whole_cpu_ms)
    for part in sorted({p for run in it.runs for p in _parts(run, case)}):
        it.single(f"cpu_ms_per_request_of_{part}_{label}", "ms", (case.name, TALARIA), _part(part))


def _parts(run: Run, case: Case) -> Iterable[str]:
    result = run.get(case.name, {}).get(TALARIA)
    return result.cpu_s if result else ()


class Goal(NamedTuple):
    """What a figure's median should reach."""

    figure: str
    at_least: float | None = None
    at_most: float | None = None


GOALS = (
    Goal("rps_talaria_over_litellm_whole_1kb_c16", at_least=25),
    Goal("rps_talaria_over_litellm_streamed_1kb_c16", at_least=25),
    Goal("rps_talaria_over_litellm_streamed_400kb_c16", at_least=10),
    Goal("cpu_per_request_talaria_over_sglang_router_whole_1kb_c16", at_most=2),
    Goal("cpu_per_request_talaria_over_sglang_router_streamed_1kb_c16", at_most=2),
    Goal("rps_talaria_over_sglang_router_whole_1kb_c16", at_least=0.8),
    Goal("rps_talaria_over_sglang_router_streamed_1kb_c16", at_least=1.5),
    Goal("added_ttft_p50_ms_1kb_c1", at_most=2),
    Goal("added_ttft_p95_ms_1kb_c1", at_most=5),
    Goal("added_ttft_p50_ms_400kb_c1", at_most=4),
    Goal("added_ttft_p95_ms_400kb_c1", at_most=10),
    Goal("paced64_finish_over_direct", at_most=1.06),
)
"""What a sketch of each hop's cost allows; docs/performance.md says which are met, and what the others cost."""


def verdicts(figures: dict[str, Figure]) -> list[str]:
    """One line per goal that was measured."""
    lines = []
    for goal in GOALS:
        got = figures.get(goal.figure)
        if got is None:
            continue
        value = got["median"]
        met = (goal.at_least is None or value >= goal.at_least) and (goal.at_most is None or value <= goal.at_most)
        want = f">= {goal.at_least:g}" if goal.at_least is not None else f"<= {goal.at_most:g}"
        spread = f"{got['min']:g}..{got['max']:g}"
        lines.append(f"{'met ' if met else 'MISS'} {goal.figure} = {value:g} {got['unit']} ({spread}), goal {want}")
    return lines
