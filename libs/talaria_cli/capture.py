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
from talaria_common.bus.faults import BusFaultError
from talaria_common.errors import BusError
from talaria_common.settings import Settings, SettingsError
from talaria_common.wire import FORWARD_HEADER, Completion, Event, ForwardHead, WireError, decode
from talaria_replay import trace
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
    except (SettingsError, BusError, OSError, trace.TraceError) as e:
        print(f"talaria capture: {e}", file=sys.stderr)
        return 2


async def _capture(options: CaptureOptions, url: str, settings: Settings | None) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    zipped = options.file.suffix == ".gz"
    part = options.file.with_name(f"{options.file.name}.part{'.gz' if zipped else ''}")
    bus = await link.connect(url, settings, "talaria-capture")
    try:
        with cast("IO[bytes]", gzip.open(part, "wb") if zipped else part.open("wb")) as out:
            recorder = _Recorder(Capture(), out, options.calls, stop)
            await recorder.listen(bus, texts=options.texts)
            if recorder.problem is None:
                rpc = ", to RPC subjects too: callers wait for a dead part instead of failing" if options.texts else ""
                print(f"capture: listening at {url}{rpc}", file=sys.stderr, flush=True)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(options.seconds):
                        await stop.wait()
            stop.set()
    finally:
        await bus.close()
    return _finish(recorder, part, options.file)


def _finish(recorder: _Recorder, part: Path, file: Path) -> int:
    """Give the trace its name if it is whole; returns the exit code."""
    capture = recorder.capture
    notes = (
        f"{recorder.written} calls, {capture.failed} failed ones left out, {capture.unseen} begun before the capture"
    )
    if recorder.lost:
        notes += "; the bus was away or dropped messages, so calls may be missing"
    if not recorder.written:
        part.unlink()
    if recorder.problem is not None:
        kept = f"; {part}: {notes}" if recorder.written else ""
        print(f"talaria capture: {recorder.problem}{kept}", file=sys.stderr)
        return 2
    if not recorder.written:
        print(f"capture: nothing to write: {notes}", file=sys.stderr)
        return 1
    trace.read(part)
    part.replace(file)
    print(f"capture: {file}: {notes}", file=sys.stderr)
    return 0


class _Recorder:
    """The bus's messages into the capture, its calls into the file.

    Attributes:
        written: calls in the file.
        lost: the bus was away or dropped messages.
        problem: why it stopped by itself, before its time: the file is not what was asked for.
    """

    def __init__(self, capture: Capture, out: IO[bytes], limit: int | None, stop: asyncio.Event) -> None:
        self.capture = capture
        self.written = 0
        self.lost = False
        self.problem: str | None = None
        self._out = out
        self._limit = limit
        self._stop = stop

    async def listen(self, bus: Bus, *, texts: bool) -> None:
        bus.on_connection(self._connection)
        bus.on_error(self._fault)
        await bus.subscribe(f"{subjects.ROOT}.event.route.*", self._route)
        await bus.subscribe(subjects.ALL_COMPLETIONS, self._completion)
        if texts:
            await bus.subscribe(subjects.ALL_FORWARDS, self._forward)
        await bus.flush()

    def _connection(self, up: bool) -> None:
        self.lost = self.lost or not up

    def _fault(self, error: Exception) -> None:
        if isinstance(error, BusFaultError) and error.fault == "permission":
            self._fail(str(error))
        else:
            self.lost = True
            print(f"capture: {error}", file=sys.stderr)

    def _fail(self, problem: str) -> None:
        self.problem = self.problem or problem
        self._stop.set()

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
        try:
            call = self.capture.completed(time.monotonic(), decode(message.data, Completion))
            if call is not None:
                self._out.write(msgspec.json.encode(call) + b"\n")
                self.written += 1
        except WireError:
            return
        except OSError as e:
            self._fail(f"the trace could not be written: {e}")
        if self._limit is not None and self.written >= self._limit:
            self._stop.set()
