"""`python -m talaria_api --config FILE [--id api-0]`."""

from __future__ import annotations

import asyncio
import logging
import sys

import structlog

from talaria_api.serve import Api, Server, listen, run, server
from talaria_common.entry import enter
from talaria_common.errors import TalariaError
from talaria_common.service import Process

log = structlog.get_logger(__name__)


async def serve(process: Process) -> None:
    """Serve HTTP until the process is told to stop.

    Raises:
        TalariaError: the port is taken.
    """
    s = process.settings.api
    try:
        sock = listen(s.host, s.port)
    except OSError as e:
        raise TalariaError(f"cannot listen on {s.host}:{s.port}: {e.strerror or e}") from e
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    api = Api(process.settings, process.clock, process.epoch)
    http = server(api)
    stopping = asyncio.create_task(_stop(process, api, http))
    host, port = sock.getsockname()[:2]
    log.info("serving", url=f"http://{f'[{host}]' if ':' in host else host}:{port}")
    try:
        await run(api, http, sock, process.connect_bus)
    finally:
        stopping.cancel()


async def _stop(process: Process, api: Api, http: Server) -> None:
    await process.stop.wait()
    log.info("stopping", in_flight=api.link.in_flight)
    api.readiness.draining = True
    http.stop()


def main(argv: list[str] | None = None) -> int:
    """Parse arguments, run, and return the exit status: 2 for a configuration mistake."""
    return enter("api", "The HTTP edge.", serve, argv)


if __name__ == "__main__":
    sys.exit(main())
