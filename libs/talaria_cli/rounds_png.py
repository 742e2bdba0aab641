"""The timeline of slots as a PNG: the SVG's lanes and colours. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from talaria_cli.rounds_picture import INFEASIBLE, PHASES, Slot, lanes

_DPI = 120
_WIDTH_IN, _LANE_IN, _MARGIN_IN = 12.0, 0.3, 1.2


def png(slots: Sequence[Slot], out: Path) -> None:
    """Draw `slots` into `out`. Raises ImportError without matplotlib, OSError if `out` cannot be written."""
    from matplotlib.figure import Figure

    rows = lanes(slots)
    first = min(slot.start_ms for slot in slots)
    figure = Figure(figsize=(_WIDTH_IN, _MARGIN_IN + _LANE_IN * len(rows)), dpi=_DPI, layout="constrained")
    axes = figure.subplots()
    for field, name, _, colour in PHASES:
        axes.broken_barh([], (0, 0), facecolors=colour, label=name)  # for the legend, whatever the slots hold
        for row, lane in enumerate(rows):
            spans = [span for slot in slots if slot.lane == lane for span in _spans(slot, field, first)]
            axes.broken_barh(spans, (row - 0.4, 0.8), facecolors=colour)
    missed = [(slot.end_ms - first) / 1000 for slot in slots if slot.data.get("infeasible")]
    at = [rows.index(slot.lane) for slot in slots if slot.data.get("infeasible")]
    axes.plot(missed, at, "o", color=INFEASIBLE, markersize=3, label="infeasible target")
    axes.set_yticks(range(len(rows)), [" ".join(lane) for lane in rows])
    axes.invert_yaxis()
    axes.set_xlabel("s")
    axes.set_xlim(left=0)
    figure.legend(loc="outside upper center", ncols=len(PHASES) + 1, fontsize="small")
    figure.savefig(out, format="png")


def _spans(slot: Slot, wanted: str, first_ms: float) -> list[tuple[float, float]]:
    """(start, length) of one phase in a slot, s; empty if it has none."""
    at = slot.start_ms
    for field, *_ in PHASES:
        ms = float(slot.data.get(field, 0.0))
        if field == wanted:
            return [((at - first_ms) / 1000, ms / 1000)] if ms > 0 else []
        at += ms
    return []
