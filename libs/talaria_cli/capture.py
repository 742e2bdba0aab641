"""`talaria capture`: record a live mesh's agent sessions from the bus into a trace."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

import msgspec

from talaria_cli import link
from talaria_cli.up import runfile
from talaria_common import subjects
from talaria_common.bus import Bus, Message
from talaria_common.errors import BusError
from talaria_common.settings import Settings, SettingsError
from talaria_common.wire import FORWARD_HEADER, Completion, Event, ForwardHead, WireError, decode
from talaria_replay.capture import Capture


@dataclass(frozen=True, slots=True)
class CaptureOptions:
    """As on the command line."""

    file: Path
    config: Path | None
    bus: str
    state_dir: Path
    texts: bool
    calls: int | None
    seconds: float | None


def run_capture(options: CaptureOptions) -> int:
    """Record until stopped; the trace appears under its name only when it is whole. Returns the exit code."""
    try:
        running = runfile.read(options.state_dir)
        settings = link.settings_of(options.config, running)
        return asyncio.run(_capture(options, link.bus_url(options.bus, running, settings), settings))
    except (SettingsError, BusError, OSError) as e:
        print(f"talaria capture: {e}", file=sys.stderr)
        return 2


async def _capture(options: CaptureOptions, url: str, settings: Settings | None) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    part = options.file.with_name(options.file.name + ".part")
    zipped = options.file.suffix == ".gz"
    bus = await link.connect(url, settings, "talaria-capture")
    try:
        with cast("IO[bytes]", gzip.open(part, "wb") if zipped else part.open("wb")) as out:
            recorder = _Recorder(Capture(), out, options.calls, stop)
            await recorder.listen(bus, texts=options.texts)
            print(f"capture: listening at {url}", file=sys.stderr, flush=True)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(options.seconds):
                    await stop.wait()
    finally:
        await bus.close()
    capture = recorder.capture
    notes = (
        f"{recorder.written} calls, {capture.failed} failed ones left out, {capture.unseen} begun before the capture"
    )
    if recorder.lost:
        notes += "; the bus was away meanwhile, so calls may be missing"
    if not recorder.written:
        part.unlink()
        print(f"capture: nothing to write: {notes}", file=sys.stderr)
        return 1
    part.replace(options.file)
    print(f"capture: {options.file}: {notes}", file=sys.stderr)
    return 0


class _Recorder:
    """The bus's messages into the capture, its calls into the file."""

    def __init__(self, capture: Capture, out: IO[bytes], limit: int | None, stop: asyncio.Event) -> None:
        self.capture = capture
        self.written = 0
        self.lost = False
        self._out = out
        self._limit = limit
        self._stop = stop

    async def listen(self, bus: Bus, *, texts: bool) -> None:
        bus.on_connection(self._connection)
        await bus.subscribe(f"{subjects.ROOT}.event.route.*", self._route)
        await bus.subscribe(subjects.ALL_COMPLETIONS, self._completion)
        if texts:
            await bus.subscribe(subjects.ALL_FORWARDS, self._forward)
        await bus.flush()

    def _connection(self, up: bool) -> None:
        self.lost = self.lost or not up

    def _route(self, message: Message) -> None:
        with contextlib.suppress(WireError):
            self.capture.routed(time.monotonic(), decode(message.data, Event))

    def _forward(self, message: Message) -> None:
        with contextlib.suppress(WireError, KeyError):
            head = decode(message.headers[FORWARD_HEADER], ForwardHead)
            self.capture.forwarded(time.monotonic(), head, message.data)

    def _completion(self, message: Message) -> None:
        if self._stop.is_set():
            return
        with contextlib.suppress(WireError):
            call = self.capture.completed(time.monotonic(), decode(message.data, Completion))
            if call is not None:
                self._out.write(msgspec.json.encode(call) + b"\n")
                self.written += 1
        if self._limit is not None and self.written >= self._limit:
            self._stop.set()
