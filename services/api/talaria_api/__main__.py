"""`python -m talaria_api --config FILE [--id api-0]`."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys

import structlog
import uvloop

from talaria_api.serve import Api, listen, run, server
from talaria_common.bus import NatsBus
from talaria_common.ids import check_name
from talaria_common.settings import Settings, SettingsError, load

log = structlog.get_logger(__name__)


async def main(settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT."""
    s = settings.api
    sock = listen(s.host, s.port)
    api = Api(settings)
    http = server(api)

    def stop() -> None:
        log.info("stopping", in_flight=api.link.in_flight)
        api.readiness.draining = True
        http.stop()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)

    async def connect() -> NatsBus:
        b = settings.bus
        return await NatsBus.connect(b.url, name=s.id, user=b.user, password=b.password)

    host, port = sock.getsockname()[:2]
    log.info("serving", url=f"http://{host}:{port}", api=api.link.api)
    await run(api, http, sock, connect)


def with_id(settings: Settings, name: str) -> Settings:
    """The settings with another api.id. Raises ValueError if the name cannot be one."""
    return settings.model_copy(update={"api": settings.api.model_copy(update={"id": check_name(name, "--id")})})


def cli(argv: list[str] | None = None) -> int:
    """Parse arguments, run, and return the exit status."""
    parser = argparse.ArgumentParser(prog="talaria_api", description=__doc__)
    parser.add_argument("--config", help="talaria.toml; default: $TALARIA_CONFIG, else ./talaria.toml")
    parser.add_argument("--id", help="this api's name; default: api.id of the configuration")
    args = parser.parse_args(argv)
    try:
        settings = load(args.config)
        if args.id:
            settings = with_id(settings, args.id)
    except (SettingsError, ValueError) as e:
        sys.stderr.write(f"{e}\n")
        return 2
    try:
        uvloop.run(main(settings))
    except OSError as e:
        sys.stderr.write(f"cannot listen on {settings.api.host}:{settings.api.port}: {e}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(cli())
