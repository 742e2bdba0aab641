"""Outcomes as one Markdown page: predicted beside published, and what each is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from talaria_replay.report.outcome import Outcome, Row
from talaria_replay.sim.profiles import CALIBRATIONS

INTRODUCTION = """\
Every figure in the column *simulated* is a prediction: production cores of api, router, telemetry, instance and slot
scheduler in virtual time, on component figures (sizes, link, prefill and decode times). Nothing end-to-end is fitted.
The column *paper, measured* is what the paper reports. A figure's name is its place in a result's summary: `sct_s.p50`
is the median of session completion times in seconds."""


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _line(row: Row) -> str:
    ratio = "-" if row.ratio is None else f"{row.ratio:.2f}"
    return f"| {row.what} | {row.metric} | {_number(row.predicted)} | {_number(row.published)} | {ratio} | {row.note} |"


def section(outcome: Outcome, figure: str | None) -> str:
    """One experiment."""
    e = outcome.experiment
    parts = [f"## {e.id}: {e.title} (paper, {e.section})", ""]
    if figure:
        parts += [f"![{e.title}, simulated]({figure})", ""]
    parts += ["| what | figure | simulated | paper, measured | ratio | note |", "|---|---|---|---|---|---|"]
    parts += [_line(row) for row in outcome.rows]
    parts += ["", *(f"- {note}" for note in outcome.notes)]
    if e.why:
        parts += ["", f"Where they part: {e.why}"]
    return "\n".join(parts) + "\n"


def page(outcomes: Sequence[Outcome], figures: Mapping[str, str], source: str, gaps: str) -> str:
    """The whole report; `source` and `gaps` say where the workload and its gaps come from."""
    head = [
        "# The paper's figures and tables, simulated",
        "",
        INTRODUCTION,
        "",
        f"Workload: {source}; {gaps}.",
        "",
        "Calibrations:",
        *(f"- {name}: {about}" for name, about in CALIBRATIONS.items()),
        "",
    ]
    body = [section(o, figures.get(o.experiment.id)) for o in outcomes]
    return "\n".join([*head, *body])
