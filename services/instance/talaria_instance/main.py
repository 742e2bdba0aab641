"""Composes one instance process."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import sys

import structlog
import uvloop
from prometheus_client import CollectorRegistry

from talaria_common.bus import NatsBus
from talaria_common.clock import SystemClock
from talaria_common.errors import BusError
from talaria_common.settings import Settings, SettingsError, load
from talaria_instance.metrics import InstanceMetrics
from talaria_instance.service import InstanceService

log = structlog.get_logger(__name__)

CONNECT_EVERY_S = 1.0


def engine_command(config: str, iid: str) -> list[str]:
    """What starts the engine process of `iid`."""
    return [sys.executable, "-m", "talaria_gpu.engine.worker", "--config", config, "--id", iid]


async def serve(settings: Settings, config: str, iid: str, stop: asyncio.Event) -> None:
    """Run the instance until `stop` is set."""
    bus = await _connect(settings, iid, stop)
    if bus is None:
        return
    service = InstanceService(
        settings,
        iid,
        bus,
        SystemClock(),
        engine_command=engine_command(config, iid),
        metrics=InstanceMetrics(CollectorRegistry()),
    )
    await service.run(stop)


async def _connect(settings: Settings, iid: str, stop: asyncio.Event) -> NatsBus | None:
    """A connection, however long it takes; None when `stop` was set first."""
    while not stop.is_set():
        try:
            return await NatsBus.connect(
                settings.bus.url, name=iid, user=settings.bus.user, password=settings.bus.password
            )
        except BusError as e:
            log.warning("waiting for the message bus", error=e.message)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), CONNECT_EVERY_S)
    return None


async def _run(settings: Settings, config: str, iid: str) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.set)
    await serve(settings, config, iid, stop)


def main(argv: list[str] | None = None) -> None:
    """Parse arguments, load the configuration, serve. Exits 2 on a configuration mistake."""
    parser = argparse.ArgumentParser(prog="talaria_instance", description="One inference instance.")
    parser.add_argument("--config", required=True, help="talaria.toml")
    parser.add_argument("--id", required=True, help="which of its instances this is")
    args = parser.parse_args(argv)
    try:
        settings = load(args.config)
        settings.instance(args.id)
    except SettingsError as e:
        for problem in e.problems:
            sys.stderr.write(f"{problem}\n")
        sys.exit(2)
    uvloop.run(_run(settings, args.config, args.id))
