"""What an experiment gives: rows of predicted beside published figures, and what its picture shows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from talaria_replay.measure import session_times
from talaria_replay.report.spec import Curve, Experiment
from talaria_replay.sim.run import SimResult

SMOOTH = 11
"""Rounds of the moving average, as in the paper's Figure 14."""


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
    """An experiment's result. `curves`: name → values, shown as `curve` says."""

    experiment: Experiment
    rows: list[Row] = field(default_factory=list)
    curves: dict[str, list[float]] = field(default_factory=dict)
    curve: Curve = ""
    notes: list[str] = field(default_factory=list)

    def add(self, what: str, result: SimResult | str, metrics: Sequence[str], published: Mapping[str, Any]) -> None:
        """A simulation's metrics, or why there are none; published values without a metric of their own as well."""
        names = list(dict.fromkeys([*metrics, *published]))
        if isinstance(result, str):
            names = list(published) or names[:1]
            self.rows += [Row(what, name, None, published.get(name), result) for name in names]
        else:
            self.rows += [Row(what, name, metric(result.summary, name), published.get(name)) for name in names]

    def compare(self, what: str, result: SimResult | str, base: SimResult | str, paper: Mapping[str, float]) -> None:
        """The experiment's relative metrics, over those of `base`; `paper`: the same ratios as published."""
        if isinstance(result, str) or isinstance(base, str):
            return
        for name in self.experiment.relative:
            above, below = metric(result.summary, name), metric(base.summary, name)
            if above is not None and below:
                name_over = f"{name} over {base.scenario.ablation}'s"
                self.rows.append(Row(what, name_over, round(above / below, 4), paper.get(name)))

    def pair(self, what: str, first: SimResult | str, other: SimResult | str, published: float) -> None:
        """How many sessions of both `first` completes sooner."""
        if isinstance(first, str) or isinstance(other, str):
            return
        mine, theirs = session_times(first.calls), session_times(other.calls)
        both = mine.keys() & theirs.keys()
        sooner = sum(mine[session] < theirs[session] for session in both)
        name = f"sessions of {len(both)} that {first.scenario.ablation} completes sooner"
        self.rows.append(Row(what, name, sooner, published))

    def top(self, what: str, results: Sequence[SimResult | str]) -> None:
        """The experiment's highest metrics of all `results`."""
        for name, published in self.experiment.highest.items():
            found = [metric(r.summary, name) for r in results if not isinstance(r, str)]
            self.rows.append(Row(what, name, max((v for v in found if v is not None), default=None), published))

    def draw(self, what: str, result: SimResult | str) -> None:
        """Its curve."""
        if not isinstance(result, str):
            self.curve = self.experiment.curve
            values = curve(result, self.curve)
            if values:
                self.curves[what] = values


def metric(summary: Mapping[str, Any], path: str) -> float | None:
    """The value at a dotted path; None where the result has no such figure (a switch path that never came)."""
    at: Any = summary
    for part in path.split("."):
        if isinstance(at, Mapping):
            at = at.get(part)
        elif isinstance(at, list) and part.isdigit() and int(part) < len(at):
            at = at[int(part)]
        else:
            return None
    return float(at) if isinstance(at, int | float) else None


def curve(result: SimResult, kind: Curve) -> list[float]:
    """What a picture of `kind` shows of a result."""
    return _CURVES[kind](result)


def _rounds(result: SimResult) -> list[tuple[float, float]]:
    """(active, switch) ms of each round, in order."""
    found: dict[tuple[str, int], list[float]] = {}
    for s in result.slots:
        at = found.setdefault((s["iid"], s["round"]), [0.0, 0.0])
        at[0] += s["active_ms"]
        at[1] += s["switch_ms"]
    return [(a, b) for a, b in found.values()]


def smooth(values: Sequence[float]) -> list[float]:
    """A moving average over `SMOOTH` values."""
    half = SMOOTH // 2
    out = []
    for n in range(len(values)):
        window = values[max(0, n - half) : n + half + 1]
        out.append(sum(window) / len(window))
    return out


_CURVES: dict[Curve, Callable[[SimResult], list[float]]] = {
    "": lambda _: [],
    "sct": lambda r: list(session_times(r.calls).values()),
    "ttft": lambda r: [c.ttft_s for c in r.calls if not c.error],
    "return_ttft": lambda r: [c.ttft_s for c in r.calls if c.call and not c.error],
    "switch": lambda r: [s["total_ms"] for s in r.switches],
    "rounds": lambda r: smooth([active + switch for active, switch in _rounds(r)]),
    "hbm": lambda r: smooth([s["hbm_gib"] for s in r.slots]),
    "composition": lambda r: [r.summary["slot_active_s"], r.summary["switch_s"]],
}
