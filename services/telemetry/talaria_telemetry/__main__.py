"""`python -m talaria_telemetry --config FILE [--id telemetry-0]`."""

from __future__ import annotations

import sys

from talaria_common.entry import enter
from talaria_common.errors import TalariaError
from talaria_common.metrics import Metrics
from talaria_common.service import Process
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
    try:
        await process.until(shell.failed)
    finally:
        await shell.close()
        await bus.close()
    if not process.stop.is_set():
        raise TalariaError("the telemetry cannot go on: see the lines above")


def main(argv: list[str] | None = None) -> int:
    """Parse arguments, run, and return the exit status: 2 for a configuration mistake."""
    return enter("telemetry", "What is true of the instances.", serve, argv)


if __name__ == "__main__":
    sys.exit(main())
