"""`talaria up` from options to exit code."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from talaria_cli import link
from talaria_cli.up import health, nats, plan, ports, runfile, watch
from talaria_cli.up.console import Console, Row
from talaria_cli.up.models import ModelsError, prepare_all, wanted
from talaria_cli.up.plan import Part, stop_order
from talaria_cli.up.supervisor import PartFailedError, Supervisor
from talaria_common.bus import Bus
from talaria_common.settings import DEFAULT_FILE, Settings, SettingsError, load

TICK_S = 0.2
EXTERNAL_BUS_S = 10.0
"""How long a NATS server that is not ours may be away before `up` gives up."""


@dataclass(frozen=True, slots=True)
class UpOptions:
    """The command line."""

    config: Path | None
    models_only: bool
    port: int | None
    external_nats: bool
    state_dir: Path


class UpError(Exception):
    """`up` cannot go on; the message says why and what to do."""


def run_up(options: UpOptions) -> int:
    """Run until stopped; returns the exit code: 0 after Ctrl-C, 130 after two, 1 when something cannot start."""
    try:
        config = Path(options.config or os.environ.get("TALARIA_CONFIG") or DEFAULT_FILE).resolve()
        settings = load(config)
    except SettingsError as e:
        print("\n".join(f"error: {p}" for p in e.problems), file=sys.stderr)
        return 1
    (options.state_dir / "logs").mkdir(parents=True, exist_ok=True)
    held = runfile.lock(options.state_dir)
    if held is None:
        other = runfile.read(options.state_dir)
        where = f" (process {other.pid}, {other.url})" if other else ""
        print(f"error: `talaria up` is already running here{where}; stop it, or give --state-dir", file=sys.stderr)
        return 1
    with held:
        return asyncio.run(_start(options, config, settings))


async def _start(options: UpOptions, config: Path, settings: Settings) -> int:
    return await _Up(options, config, settings).run()


class _Up:
    """One run. Made inside the event loop."""

    def __init__(self, options: UpOptions, config: Path, settings: Settings) -> None:
        self._options = options
        self._config = config
        self._settings = settings
        self._state_dir = options.state_dir.resolve()
        self._console = Console()
        self._facts = health.Facts()
        self._signals = 0
        self._stop = asyncio.Event()
        self._running: runfile.Running | None = None
        stale_after_s = settings.mesh.heartbeat_s * settings.mesh.missed + 1.0
        self._supervisor = Supervisor(
            self._facts,
            self._state_dir / "logs",
            self._console.say,
            self._write_run_file,
            stale_after_s=stale_after_s,
            stop_order=stop_order(settings),
        )
        self._background: list[asyncio.Task[None]] = []

    async def run(self) -> int:
        """Start, watch, stop."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._on_signal)
        code = 0
        try:
            await self._unless_stopped(self._serve())
        except (UpError, ModelsError, PartFailedError, OSError) as e:
            self._console.settle()
            print(f"error: {e}", file=sys.stderr, flush=True)
            code = 1
        finally:
            self._console.settle()
            await self._shut_down()
        return 130 if self._signals > 1 else code

    def _on_signal(self) -> None:
        self._signals += 1
        self._stop.set()
        if self._signals > 1:
            self._supervisor.kill()

    async def _unless_stopped(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` until it ends, a part fails for good (raises its PartFailedError), or a signal comes."""
        task = asyncio.ensure_future(work)
        stop = asyncio.ensure_future(self._stop.wait())
        failure = asyncio.ensure_future(self._supervisor.failure())
        done, pending = await asyncio.wait({task, stop, failure}, return_when=asyncio.FIRST_COMPLETED)
        for other in pending:
            other.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        for finished in done - {stop}:
            finished.result()

    async def _serve(self) -> None:
        api_port = 0 if self._options.models_only else self._api_port()
        if wanted(self._settings):
            self._console.say("preparing models (some are made once, which takes up to a minute)")
            await prepare_all(self._config, self._state_dir / "logs" / "models.log", self._console.say)
        if self._options.models_only:
            return
        bus = nats.choose(self._settings.bus, external=self._options.external_nats)
        if bus.says:
            self._console.say(bus.says)
        where = plan.Where(sys.executable, self._config, bus.url, api_port, self._metrics_ports())
        parts = plan.parts(self._settings, where)
        self._running = runfile.Running(
            pid=os.getpid(),
            config=str(self._config),
            url=parts[-1].http or "",
            bus_url=bus.url,
            started_ms=int(time.time() * 1000),
        )
        await self._start_bus(bus, parts)
        for part in parts:
            self._supervisor.add(part)
        while any(row.state != "ready" for row in self._rows(parts)):  # noqa: ASYNC110 - each look also redraws
            await asyncio.sleep(TICK_S)
        self._console.settle()
        self._announce()
        await self._report_changes()

    def _rows(self, parts: list[Part]) -> list[Row]:
        rows = self._supervisor.rows(parts)
        self._console.show(rows)
        return rows

    async def _start_bus(self, bus: nats.Choice, parts: list[Part]) -> None:
        connect = self._connector(bus.url)
        self._background = [
            asyncio.create_task(watch.poll_http(self._facts, self._supervisor.running)),
            asyncio.create_task(watch.listen(self._facts, connect)),
        ]
        if bus.embedded:
            try:
                part = nats.part(self._settings.bus, bus.url, self._state_dir)
            except ValueError as e:
                raise UpError(f"[bus]: {e}") from e
            self._supervisor.add(part)
        elif self._settings.bus.tap_password:
            self._console.say(f"bus.tap_password changes nothing: the server at {bus.url} is not ours")
        deadline = time.monotonic() + EXTERNAL_BUS_S
        while not self._facts.bus:
            self._rows(parts)
            if not bus.embedded and time.monotonic() > deadline:
                raise UpError(f"no NATS server answers at {bus.url} ([bus] url, or TALARIA_BUS__URL)")
            await asyncio.sleep(TICK_S)

    def _connector(self, url: str) -> Callable[[], Awaitable[Bus]]:
        return lambda: link.connect(url, self._settings, "talaria-up")

    def _api_port(self) -> int:
        """The api's port. Raises UpError when it is taken."""
        host = self._settings.api.host
        port = self._options.port if self._options.port is not None else self._settings.api.port
        if port == 0:
            return ports.free_port(host)
        if not ports.is_free(host, port):
            raise UpError(
                f"port {port} on {host} is taken by another program; stop it, or choose another: "
                f'`talaria up --port {port + 80}` (make up ARGS="--port {port + 80}"), or [api] port in {self._config}'
            )
        return port

    def _metrics_ports(self) -> dict[str, int]:
        """Replacements for configured metrics ports that are taken."""
        host, replaced = self._settings.mesh.metrics_host, {}
        for part, port in self._settings.mesh.metrics_ports.items():
            if port and not ports.is_free(host, port):
                replaced[part] = ports.free_port(host)
                self._console.say(f"metrics port {port} of {part} is taken: it gets {replaced[part]}")
        return replaced

    def _announce(self) -> None:
        assert self._running is not None
        url, model = self._running.url, next(iter(self._settings.models), "MODEL")
        body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Why is the sky blue?"}]})
        key = " -H 'Authorization: Bearer YOUR_KEY'" if self._settings.auth.keys else ""
        self._console.say(
            f"\nready on {url}\n\n"
            f"  curl {url}/v1/chat/completions{key} -H 'Content-Type: application/json' -d '{body}'\n\n"
            f"  talaria chat | talaria tap | talaria status     (in .venv/bin; logs in {self._state_dir / 'logs'})\n"
            "  Ctrl-C stops everything.\n"
        )

    async def _report_changes(self) -> None:
        """Say which part stops and starts being ready, forever."""
        last = {row.name: row.state for row in self._supervisor.rows()}
        while True:
            await asyncio.sleep(TICK_S)
            for row in self._supervisor.rows():
                if row.state == last.get(row.name):
                    continue
                last[row.name] = row.state
                if row.state != "down":  # the supervisor said that, with the reason
                    self._console.say(f"{row.name}: {row.state}{f' - {row.says}' if row.says else ''}")

    async def _shut_down(self) -> None:
        if self._supervisor.running():
            self._console.say("stopping (Ctrl-C again to kill)")
        since = time.monotonic()
        for task in self._background:
            task.cancel()
        if self._background:
            await asyncio.wait(self._background, timeout=1.0)
        await self._supervisor.stop()
        if self._running is not None:
            runfile.remove(self._state_dir)
            self._console.say(f"stopped after {time.monotonic() - since:.1f} s")

    def _write_run_file(self) -> None:
        if self._running is None:
            return
        rows = {
            name: runfile.RunningPart(role=part.role, pid=pid, log=str(log), http=part.http, restarts=restarts)
            for name, (part, pid, log, restarts) in self._supervisor.pids().items()
        }
        self._running = runfile.Running(
            pid=self._running.pid,
            config=self._running.config,
            url=self._running.url,
            bus_url=self._running.bus_url,
            started_ms=self._running.started_ms,
            parts=rows,
        )
        runfile.write(self._state_dir, self._running)
