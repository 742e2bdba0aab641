"""`python -m talaria_router --config FILE [--id router-0]`."""

from __future__ import annotations

import sys

from talaria_common.entry import enter
from talaria_common.errors import TalariaError
from talaria_common.metrics import Metrics
from talaria_common.service import Process
from talaria_router.metrics import RouterCollector
from talaria_router.policies import policy
from talaria_router.shell import RouterShell


async def serve(process: Process) -> None:
    """Run until the process is told to stop.

    Raises:
        TalariaError: it cannot go on; said in the message.
    """
    bus = await process.connect_bus()
    shell = RouterShell(bus, process.settings, process.clock, process.epoch)
    metrics = Metrics("router")
    metrics.registry.register(RouterCollector(shell, process.clock))
    await process.observe(metrics.registry, shell.not_ready)
    await shell.start()
    try:
        await process.until(shell.failed, shell.claims.superseded)
    finally:
        await shell.close()
        await bus.close()
    if not process.stop.is_set():
        raise TalariaError("the router cannot go on: see the lines above")


def main(argv: list[str] | None = None) -> int:
    """Parse arguments, run, and return the exit status: 2 for a configuration mistake."""
    return enter("router", "Where a call goes.", serve, argv, lambda settings: policy(settings.router.policy))


if __name__ == "__main__":
    sys.exit(main())
