"""`talaria explain RID`: why a call went where it went, from the events that the mesh keeps."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path

import msgspec

from talaria_cli import explain_text, link
from talaria_cli.up import runfile
from talaria_common import subjects
from talaria_common.bus import Bus
from talaria_common.errors import BusError
from talaria_common.ids import RID_LENGTH
from talaria_common.settings import Settings, SettingsError
from talaria_common.wire import Event, WireError, decode

SHORTEST = 6
"""Digits of a request id that are needed at least."""


async def find(bus: Bus, rid: str, since_s: float | None = None) -> dict[str, list[Event]]:
    """Events of the calls whose id begins with `rid`, by id, as they happened. Raises BusError."""
    needle = f'"{rid}'.encode()
    found: dict[str, list[Event]] = {}
    async for message in bus.read_stream(subjects.EVENTS_STREAM, subjects.ALL_EVENTS, since_s=since_s):
        if needle not in message.data:  # most are of other calls: not worth decoding
            continue
        try:
            event = decode(message.data, Event)
        except WireError:
            continue
        whose = event.data.get("rid")
        if event.kind in explain_text.KINDS and isinstance(whose, str) and whose.startswith(rid):
            found.setdefault(whose, []).append(event)
    return {whose: explain_text.order(events) for whose, events in found.items()}


def run_explain(rid: str, since_s: float | None, config: Path | None, bus: str, state_dir: Path, as_json: bool) -> int:  # noqa: PLR0917 - the command's options
    """Print it; 1 if nothing is known of the call, 2 if it cannot be asked."""
    if not re.fullmatch(rf"[0-9a-f]{{{SHORTEST},{RID_LENGTH}}}", rid):
        print(f"talaria explain: {rid!r} is not a request id: {SHORTEST} to {RID_LENGTH} hex digits", file=sys.stderr)
        return 2
    try:
        running = runfile.read(state_dir)
        settings = link.settings_of(config, running)
        found = asyncio.run(_find(link.bus_url(bus, running, settings), settings, rid, since_s))
    except (SettingsError, BusError) as e:
        print(f"talaria explain: {e}", file=sys.stderr)
        return 2
    if len(found) > 1:
        print(f"talaria explain: {rid} begins {len(found)} ids: {', '.join(sorted(found)[:8])}", file=sys.stderr)
        return 2
    if not found:
        print(f"talaria explain: no event of {rid} is kept (bus.events_max_age_s bounds how long)", file=sys.stderr)
        return 1
    (events,) = found.values()
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(events)).decode())
    else:
        show(events)
    return 0


async def _find(url: str, settings: Settings | None, rid: str, since_s: float | None) -> dict[str, list[Event]]:
    bus = await link.connect(url, settings, "talaria-explain")
    try:
        return await find(bus, rid, since_s)
    finally:
        await bus.close()


def show(events: list[Event]) -> None:
    """Print one call's events for a person."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    print(explain_text.title(events))
    for event in events:
        print(explain_text.line(event))
        if event.kind != "route":
            continue
        for fact in explain_text.facts(event.data):
            print(f"    {fact}")
        rows = explain_text.rows(event.data)
        if rows:
            table = Table(*explain_text.HEAD, box=None, pad_edge=False)
            for row in rows:
                table.add_row(*row)
            console.print(table)
