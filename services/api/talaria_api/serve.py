"""Composes the api and runs it: HTTP from the start, the bus as soon as it can be reached."""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
from collections.abc import Awaitable, Callable, Generator

import structlog
import uvicorn
from fastapi import FastAPI

from talaria_api.app import build
from talaria_api.auth import Authenticator
from talaria_api.call import Limits
from talaria_api.cluster import Cluster
from talaria_api.endpoint import Parts
from talaria_api.link import Link
from talaria_api.metrics import ApiMetrics
from talaria_api.peers import Peers
from talaria_api.protocol import EdgeProtocol
from talaria_api.readiness import Readiness
from talaria_common.bus.interface import Bus
from talaria_common.clock import Clock, SystemClock
from talaria_common.errors import BusError
from talaria_common.ids import new_epoch
from talaria_common.settings import Settings

log = structlog.get_logger(__name__)

Connect = Callable[[], Awaitable[Bus]]
KEEP_ALIVE_S = 75
"""An idle connection is kept for this long: agents come back after their tools have run."""
RECONNECT_S = 0.5
OUTAGE_FACTOR = 5
"""While our own bus connection is down, an instance's silence is forgiven this many times longer."""
_EPOCH_LENGTH = 13


class Api:
    """The parts of one api process, composed. `app` may be served by any ASGI server."""

    def __init__(self, settings: Settings, *, clock: Clock | None = None) -> None:
        s = settings.api
        self.settings = settings
        self.clock = clock or SystemClock()
        epoch = new_epoch()
        name = f"{s.id[: 64 - _EPOCH_LENGTH].rstrip('-_')}-{epoch}"
        heartbeats_s = settings.mesh.heartbeat_s * settings.mesh.missed
        self.cluster = Cluster(stale_after_s=max(heartbeats_s, 1.0))
        peers = Peers(s.silence_s, s.silence_s * OUTAGE_FACTOR)
        metrics = ApiMetrics()
        self.link = Link(name, self.clock, peers, self.cluster, metrics)
        limits = Limits(
            route_timeout_s=s.route_timeout_s,
            # A router that queues calls keeps its answer back until there is room: then silence tells nothing.
            route_give_up_s=s.route_give_up_s if settings.router.overload == "reject" else math.inf,
            accept_timeout_s=s.accept_timeout_s,
            alive_grace_s=2 * settings.mesh.heartbeat_s,
            max_attempts=s.max_attempts,
        )
        self.readiness = Readiness(self.link, self.cluster, self.clock)
        self.parts = Parts(
            settings, self.clock, self.link, peers, self.cluster, metrics, Authenticator(settings.auth), limits, epoch
        )
        self.app: FastAPI = build(self.parts, self.readiness)


class Server(uvicorn.Server):
    """uvicorn without its signal handlers: `stop` is called by ours."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leave signals alone."""
        yield

    def stop(self) -> None:
        """Take no new connections, let answers finish; the second time: do not wait for them."""
        self.force_exit = self.should_exit
        self.should_exit = True


def server(api: Api) -> Server:
    """The HTTP server of `api`."""
    return Server(
        uvicorn.Config(
            api.app,
            http=EdgeProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            backlog=2048,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=math.ceil(api.settings.api.drain_s),
        )
    )


def listen(host: str, port: int) -> socket.socket:
    """A bound socket. Raises OSError."""
    family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[
        0
    ]
    sock = socket.socket(family, kind, proto)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError:
        sock.close()
        raise
    sock.set_inheritable(False)
    return sock


async def run(api: Api, http: Server, sock: socket.socket, connect: Connect) -> None:
    """Serve until `http.stop()`; then finish what runs, within drain_s, and leave the bus."""
    attaching = asyncio.create_task(_attach(api, connect))
    try:
        await http.serve(sockets=[sock])
    finally:
        attaching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await attaching
        await api.link.close()
        if api.link.bus is not None:
            await api.link.bus.close()


async def _attach(api: Api, connect: Connect) -> None:
    """Connect to the bus, however long that takes; from then on the bus reconnects by itself."""
    while True:
        try:
            bus = await connect()
            try:
                await api.link.attach(bus)
            except BaseException:
                await bus.close()
                raise
        except BusError as e:
            log.warning("the bus cannot be reached yet", error=e.message)
            await asyncio.sleep(RECONNECT_S)
        else:
            log.info("attached to the bus", api=api.link.api)
            return
