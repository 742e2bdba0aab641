"""Pictures of outcomes, as PNG. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path

from talaria_replay.report.run import Outcome


def draw(outcome: Outcome, path: Path) -> bool:
    """The CDFs of an outcome's curves; False if it has none. Raises ImportError without matplotlib."""
    if not outcome.curves:
        return False
    from matplotlib.figure import Figure  # noqa: PLC0415 - only those who draw need it

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for name, values in outcome.curves.items():
        ordered = sorted(values)
        axes.step(ordered, [(i + 1) / len(ordered) for i in range(len(ordered))], where="post", label=name)
    values = [v for curve in outcome.curves.values() for v in curve if v > 0]
    if values and max(values) > 50 * min(values):
        axes.set_xscale("log")
    axes.set_xlabel(outcome.axis)
    axes.set_ylabel("CDF")
    axes.set_ylim(0, 1)
    axes.grid(alpha=0.3)
    axes.set_title(f"{outcome.experiment.id}: SIMULATED" if outcome.experiment.kind != "shape" else "GENERATED")
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)
    return True
