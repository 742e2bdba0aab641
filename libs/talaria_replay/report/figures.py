"""Pictures of outcomes, as PNG. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from talaria_replay.report.outcome import Outcome
from talaria_replay.report.spec import Curve

AXES: dict[Curve, tuple[str, str]] = {
    "sct": ("session completion time, s", "CDF"),
    "ttft": ("TTFT, s", "CDF"),
    "return_ttft": ("TTFT of returns, s", "CDF"),
    "switch": ("switch, ms", "CDF"),
    "rounds": ("round", "ms, moving average of 11"),
    "hbm": ("slot", "GiB per GPU in use, moving average of 11"),
    "composition": ("", "s"),
}
"""(x, y) by what is shown."""
INSIDE_MAX, LEGEND_COLUMNS, ROW_INCHES = 10, 3, 0.17
"""A legend of more curves stands below the picture, which grows by its rows."""


def draw(outcome: Outcome, path: Path) -> bool:
    """The curves of an outcome; False if it has none. Raises ImportError without matplotlib."""
    if not outcome.curves or not outcome.curve:
        return False
    from cycler import cycler  # noqa: PLC0415 - only those who draw need it, and matplotlib
    from matplotlib.colors import TABLEAU_COLORS  # noqa: PLC0415
    from matplotlib.figure import Figure  # noqa: PLC0415

    rows = -(-len(outcome.curves) // LEGEND_COLUMNS) if len(outcome.curves) > INSIDE_MAX else 0
    figure = Figure(figsize=(8, 4.5 + ROW_INCHES * rows), layout="constrained")
    axes = figure.subplots()
    axes.set_prop_cycle(cycler(linestyle=["-", "--", ":", "-."]) * cycler(color=list(TABLEAU_COLORS)))
    x, y = AXES[outcome.curve]
    if outcome.experiment.kind == "shape":
        x = next(iter(outcome.curves))
    if outcome.curve == "composition":
        _bars(axes, outcome.curves)
    elif outcome.curve in {"rounds", "hbm"}:
        for name, values in outcome.curves.items():
            axes.plot(range(len(values)), values, label=name)
    else:
        _distributions(axes, outcome.curves)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.3)
    axes.set_title(f"{outcome.experiment.id}: {'GENERATED' if outcome.experiment.kind == 'shape' else 'SIMULATED'}")
    if rows and outcome.curve != "composition":
        figure.legend(loc="outside lower center", ncols=LEGEND_COLUMNS, fontsize="x-small")
    else:
        axes.legend(fontsize="x-small")
    figure.savefig(path, dpi=120)
    return True


def _distributions(axes: Any, curves: dict[str, list[float]]) -> None:
    for name, values in curves.items():
        ordered = sorted(values)
        axes.step(ordered, [(i + 1) / len(ordered) for i in range(len(ordered))], where="post", label=name)
    values = [v for curve in curves.values() for v in curve if v > 0]
    if values and max(values) > 50 * min(values):
        axes.set_xscale("log")
    axes.set_ylim(0, 1)


def _bars(axes: Any, curves: dict[str, list[float]]) -> None:
    active = [values[0] for values in curves.values()]
    axes.bar(range(len(curves)), active, label="active")
    axes.bar(range(len(curves)), [values[1] for values in curves.values()], bottom=active, label="switch")
    axes.set_xticks(range(len(curves)), list(curves), rotation=20, ha="right", fontsize="x-small")
