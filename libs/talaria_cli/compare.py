"""`talaria compare`: two results of `talaria replay`, side by side."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from talaria_replay.live import results
from talaria_replay.live.compare import compare

_ROWS = {
    "sct_s": "session completion time, s",
    "ttft_s": "TTFT, schedule-aware, s",
    "ttft_request_local_s": "TTFT, request-local, s",
    "return_ttft_s": "TTFT of returns, s",
    "call_s": "call, s",
}


def run_compare(first: Path, second: Path, *, as_json: bool) -> int:
    """Compare; 0: done, 2: a file is no result, or no session was finished in both."""
    try:
        a, b = results.read(first), results.read(second)
    except results.ResultError as e:
        print(f"talaria compare: {e}", file=sys.stderr)
        return 2
    found = compare(a, b)
    if not found["sessions"]:
        print(f"talaria compare: no session was finished in both {first} and {second}", file=sys.stderr)
        return 2
    if as_json:
        print(json.dumps(found))
        return 0
    console = Console()
    console.print(_table(found, escape(f"A: {first}, B: {second}")))
    same = f"{found['same_bodies']:.1%} with the same body"
    console.print(f"{found['calls']} calls of {found['sessions']} sessions, {same}")
    if found["left_out"]:
        console.print(f"{found['left_out']} sessions were not finished in both and are left out", style="bold red")
    for path, run in ((first, a), (second, b)):
        for note in run.notes if run.complete else ["the run is not complete", *run.notes]:
            console.print(f"{path}: {note}", style="bold red", markup=False)
    for name in found["differs"]:
        console.print(f"{name}: {a.plan.get(name)!r} and {b.plan.get(name)!r}", markup=False)
    return 0


def _table(found: dict[str, Any], title: str) -> Table:
    out = Table(title=title)
    for column in ("", "p50 A", "B", "B/A", "p95 A", "B", "B/A", "median of B/A", "n"):
        out.add_column(column, justify="right" if column else "left")
    for key, name in _ROWS.items():
        figure = found["figures"][key]
        cells = [
            cell
            for p in ("p50", "p95")
            for cell in (_number(figure["a"].get(p)), _number(figure["b"].get(p)), _number(figure["ratio"].get(p)))
        ]
        out.add_row(name, *cells, _number(figure["paired_p50"]), str(figure["a"]["n"]))
    return out


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
