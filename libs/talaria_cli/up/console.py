"""What `talaria up` shows: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from typing import NamedTuple

from rich.console import Console as RichConsole
from rich.live import Live
from rich.table import Table
from rich.text import Text

REMIND_S = 10.0
"""Without a terminal, what is still waited for is said again after this."""

_STYLE = {"ready": "green", "starting": "yellow", "down": "red", "waiting": "dim", "stopping": "dim"}


class Row(NamedTuple):
    """One part as people see it."""

    name: str
    role: str
    state: str
    """waiting, starting, ready, down or stopping."""
    says: str


class Console:
    """The terminal of one `talaria up`."""

    def __init__(self) -> None:
        self._rich = RichConsole(file=sys.stderr if not sys.stdout.isatty() else None, highlight=False)
        self._tty = sys.stdout.isatty()
        self._since = time.monotonic()
        self._live: Live | None = None
        self._shown: dict[str, tuple[str, str]] = {}
        self._reminded = self._since

    def say(self, text: str) -> None:
        """One line, above the table if there is one."""
        if self._live is not None:
            self._live.console.print(text, markup=False, highlight=False)
        else:
            print(text, flush=True)

    def show(self, rows: list[Row]) -> None:
        """The state of all parts, now."""
        if self._tty:
            if self._live is None:
                self._live = Live(console=self._rich, refresh_per_second=4, transient=True)
                self._live.start()
            self._live.update(_table(rows, time.monotonic() - self._since))
            return
        now = time.monotonic()
        for row in rows:
            seen = (row.state, row.says)
            if row.state != "waiting" and self._shown.get(row.name) != seen:
                self._shown[row.name] = seen
                self._line(f"{row.name}: {row.state}{f' - {row.says}' if row.says else ''}")
                self._reminded = now
        open_rows = [r for r in rows if r.state != "ready"]
        if open_rows and now - self._reminded >= REMIND_S:
            self._reminded = now
            self._line("still waiting for " + "; ".join(f"{r.name} ({r.says or r.state})" for r in open_rows))

    def settle(self) -> None:
        """End the table; from here on lines only."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _line(self, text: str) -> None:
        print(f"{time.monotonic() - self._since:6.1f} s  {text}", flush=True)


def _table(rows: list[Row], elapsed_s: float) -> Table:
    table = Table(box=None, pad_edge=False, title=f"starting, {elapsed_s:.0f} s", title_justify="left")
    for column in ("part", "what", "state", ""):
        table.add_column(column, no_wrap=column != "", overflow="fold")
    for row in rows:
        style = _STYLE.get(row.state, "")
        # Text, not markup: reasons contain brackets
        table.add_row(row.name, row.role, Text(row.state, style), Text(row.says))
    return table
