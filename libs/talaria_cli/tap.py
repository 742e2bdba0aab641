"""`talaria tap`: what happens on the bus, line by line.

A plain subscriber on the subjects of events, completions and snapshots. It never subscribes to an RPC subject unless a
raw filter asks for that: any subscriber there hides "nobody listens" from callers (NATS trap 1).
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

from talaria_cli import link, tap_lines
from talaria_cli.up import runfile
from talaria_common import subjects
from talaria_common.bus import Message
from talaria_common.errors import BusError
from talaria_common.settings import SettingsError

KINDS: dict[str, str] = {
    **{kind: f"{subjects.ROOT}.event.{kind}.>" for kind in subjects.EVENT_KINDS},
    "completion": subjects.ALL_COMPLETIONS,  # the hook itself: richer than the event of that name
    "snapshot": subjects.ALL_SNAPSHOTS,
    "cluster": subjects.CLUSTER,
}
DEFAULT = tuple(kind for kind in KINDS if kind != "cluster")


def filters(kinds: str, subject: str) -> list[str]:
    """The subject filters to listen on. Raises ValueError naming an unknown kind."""
    if subject:
        return [subject]
    chosen = [k.strip() for k in kinds.split(",") if k.strip()] or list(DEFAULT)
    unknown = [k for k in chosen if k not in KINDS]
    if unknown:
        raise ValueError(f"unknown kind {unknown[0]!r}; there are: {', '.join(KINDS)}")
    return [KINDS[k] for k in chosen]


def touches_rpc(subject_filter: str) -> bool:
    """Whether a filter may match RPC subjects (or a client's inbox)."""
    mine = f"{subjects.ROOT}.rpc".split(".")
    for i, part in enumerate(subject_filter.split(".")):
        if part == ">" or i >= len(mine):
            return True
        if part not in {"*", mine[i]}:
            return False
    return False


def run_tap(kinds: str, subject: str, config: Path | None, bus: str, state_dir: Path, as_json: bool) -> int:  # noqa: PLR0917 - the command's options
    """Print until interrupted; returns the exit code."""
    try:
        chosen = filters(kinds, subject)
        running = runfile.read(state_dir)
        settings = link.settings_of(config, running)
    except (ValueError, SettingsError) as e:
        print(f"talaria tap: {e}", file=sys.stderr)
        return 2
    if subject and touches_rpc(subject):
        print(
            "tap: this filter sees RPC subjects; callers then wait for a dead part instead of failing", file=sys.stderr
        )
    try:
        asyncio.run(_listen(link.bus_url(bus, running, settings), settings, chosen, as_json))
    except BusError as e:
        print(f"talaria tap: {e}", file=sys.stderr)
        return 1
    return 0


async def _listen(url: str, settings: Any, chosen: list[str], as_json: bool) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    bus = await link.connect(url, settings, "talaria-tap")
    lines = tap_lines.Lines()

    def on_message(message: Message) -> None:
        now = time.time()
        text = _json(message, now) if as_json else lines.render(message.subject, message.data, now)
        if text is None:
            return
        try:
            print(text, flush=True)
        except BrokenPipeError:
            stop.set()

    bus.on_connection(lambda up: print(f"tap: bus {'is back' if up else 'lost'}", file=sys.stderr))
    bus.on_error(lambda error: print(f"tap: {error}", file=sys.stderr))
    try:
        for each in chosen:
            await bus.subscribe(each, on_message)
        await bus.flush()
        print(f"tap: listening at {url}", file=sys.stderr, flush=True)
        await stop.wait()
    finally:
        await bus.close()


def _json(message: Message, now: float) -> str:
    try:
        data = json.loads(message.data)
    except ValueError:
        data = message.data.decode("utf-8", "replace")
    row: dict[str, Any] = {"seen_ms": round(now * 1000), "subject": message.subject, "data": data}
    if message.headers:
        row["headers"] = dict(message.headers)
    return json.dumps(row, ensure_ascii=False)
