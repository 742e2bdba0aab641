"""`talaria rounds`: the slots of cold instances as they go by, or a timeline of them from a recorded event log."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from pathlib import Path
from typing import Any

from talaria_cli import link
from talaria_cli.rounds_picture import PHASES, Slot, line, of_event, read_log, svg
from talaria_cli.up import runfile
from talaria_common import subjects
from talaria_common.bus import Message
from talaria_common.errors import BusError
from talaria_common.settings import SettingsError


def run_rounds(  # noqa: PLR0917 - the command's options
    log: Path | None, out: Path | None, ms_per_letter: float, config: Path | None, bus: str, state: Path
) -> int:
    """With `log`: draw it into `out`, or print it; else print live slots until interrupted. Returns the exit code."""
    if log is not None:
        return _recorded(log, out, ms_per_letter)
    try:
        running = runfile.read(state)
        settings = link.settings_of(config, running)
    except (ValueError, SettingsError) as e:
        print(f"talaria rounds: {e}", file=sys.stderr)
        return 2
    try:
        asyncio.run(_live(link.bus_url(bus, running, settings), settings, ms_per_letter))
    except BusError as e:
        print(f"talaria rounds: {e}", file=sys.stderr)
        return 1
    return 0


def _recorded(log: Path, out: Path | None, ms_per_letter: float) -> int:
    try:
        slots = read_log(log)
        if out is not None:
            _draw(slots, out)
            print(f"{out}: {len(slots)} slots")
            return 0
    except ImportError:
        print("talaria rounds: a PNG needs matplotlib (the extra `report`); an SVG needs nothing", file=sys.stderr)
        return 2
    except (OSError, ValueError) as e:
        print(f"talaria rounds: {e}", file=sys.stderr)
        return 2
    for slot in slots:
        print(line(slot, ms_per_letter))
    return 0


def _draw(slots: list[Slot], out: Path) -> None:
    """As the file's name ends: .png, else SVG. Raises ImportError, OSError."""
    if out.suffix.lower() == ".png":
        from talaria_cli.rounds_png import png

        png(slots, out)
    else:
        out.write_text(svg(slots), encoding="utf-8")


async def _live(url: str, settings: Any, ms_per_letter: float) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    bus = await link.connect(url, settings, "talaria-rounds")

    def on_message(message: Message) -> None:
        try:
            slot = of_event(json.loads(message.data))
        except ValueError:
            return
        if slot is not None:
            try:
                print(line(slot, ms_per_letter), flush=True)
            except BrokenPipeError:
                stop.set()

    try:
        await bus.subscribe(f"{subjects.ROOT}.event.round.>", on_message)
        await bus.flush()
        names = ", ".join(f"{letter} {name}" for _, name, letter, _ in PHASES)
        print(f"rounds: {names}; a letter is {ms_per_letter:g} ms; R measured/planned", file=sys.stderr, flush=True)
        await stop.wait()
    finally:
        await bus.close()
