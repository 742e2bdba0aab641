"""`python -m talaria_telemetry --config FILE [--id telemetry-0]`."""

from __future__ import annotations

import argparse
import asyncio
import sys

from talaria_common.errors import TalariaError
from talaria_common.ids import check_name
from talaria_common.metrics import Metrics
from talaria_common.service import Process, run
from talaria_common.settings import Settings, SettingsError, load
from talaria_telemetry.shell import TelemetryShell


async def serve(process: Process) -> None:
    """Run until the process is told to stop.

    Raises:
        TalariaError: it cannot go on; said in the message.
    """
    bus = await process.connect_bus()
    metrics = Metrics("telemetry")
    shell = TelemetryShell(bus, process.settings, process.clock, process.epoch, metrics.registry)
    await process.observe(metrics.registry, shell.not_ready)
    await shell.start()
    ends = [process.stop.wait(), shell.failed.wait()]
    waits = [asyncio.ensure_future(end) for end in ends]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
        await shell.close()
        await bus.close()
    if not process.stop.is_set():
        raise TalariaError("the telemetry cannot go on: see the lines above")


def with_id(settings: Settings, name: str) -> Settings:
    """The settings with another telemetry.id. Raises ValueError if the name cannot be one."""
    part = settings.telemetry.model_copy(update={"id": check_name(name, "--id")})
    return settings.model_copy(update={"telemetry": part})


def main(argv: list[str] | None = None) -> int:
    """Parse arguments, run, and return the exit status."""
    parser = argparse.ArgumentParser(prog="talaria_telemetry", description="What is true of the instances.")
    parser.add_argument("--config", help="talaria.toml; default: $TALARIA_CONFIG, else ./talaria.toml")
    parser.add_argument("--id", help="this telemetry's name; default: telemetry.id of the configuration")
    args = parser.parse_args(argv)
    try:
        settings = load(args.config)
        if args.id:
            settings = with_id(settings, args.id)
    except (SettingsError, ValueError) as e:
        sys.stderr.write(f"{e}\n")
        return 2
    return run(serve, settings.telemetry.id, settings)


if __name__ == "__main__":
    sys.exit(main())
