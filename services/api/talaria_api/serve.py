"""Composes the api and runs it: HTTP from the start, the bus as soon as it can be reached."""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
from collections.abc import Awaitable, Callable, Generator

import structlog
import uvicorn

from talaria_api.app import build
from talaria_api.auth import Authenticator
from talaria_api.cluster import Cluster
from talaria_api.endpoint import Parts
from talaria_api.link import SWEEP_S, Link
from talaria_api.messages import Limits
from talaria_api.metrics import ApiMetrics
from talaria_api.peers import Peers
from talaria_api.protocol import EdgeProtocol
from talaria_api.readiness import Readiness
from talaria_common.bus.interface import Bus
from talaria_common.clock import Clock
from talaria_common.errors import BusError
from talaria_common.settings import Settings
from talaria_common.ticker import every

log = structlog.get_logger(__name__)

Connect = Callable[[], Awaitable[Bus]]
KEEP_ALIVE_S = 75
"""An idle connection is kept for this long: agents come back after their tools have run."""
ATTACH_AGAIN_S = 0.5
OUTAGE_FACTOR = 5
"""While our own bus connection is down, an instance's silence is forgiven this many times longer."""
_EPOCH_LENGTH = 13


class Api:
    """The parts of one api process, composed. `app` may be served by any ASGI server.

    Args:
        epoch: this life of the process; part of its name on the bus, so that an earlier life's frames go nowhere.
    """

    def __init__(self, settings: Settings, clock: Clock, epoch: str) -> None:
        s = settings.api
        self.settings = settings
        self.clock = clock
        name = f"{s.id[: 64 - _EPOCH_LENGTH].rstrip('-_')}-{epoch}"
        heartbeats_s = settings.mesh.heartbeat_s * settings.mesh.missed
        self.cluster = Cluster(stale_after_s=max(heartbeats_s, 1.0))
        peers = Peers(s.silence_s, s.silence_s * OUTAGE_FACTOR)
        metrics = ApiMetrics()
        self.link = Link(name, self.clock, peers, self.cluster, metrics)
        limits = Limits(
            route_timeout_s=s.route_timeout_s,
            route_give_up_s=s.route_give_up_s,
            accept_timeout_s=s.accept_timeout_s,
            alive_grace_s=2 * settings.mesh.heartbeat_s,
            max_attempts=s.max_attempts,
        )
        self.readiness = Readiness(self.link, self.cluster, self.clock)
        self.parts = Parts(
            settings, self.clock, self.link, peers, self.cluster, metrics, Authenticator(settings.auth), limits, epoch
        )
        self.app = build(self.parts, self.readiness)


class Server(uvicorn.Server):
    """uvicorn without its signal handlers: `stop` is called by ours."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leave signals alone."""
        yield

    def stop(self) -> None:
        """Take no new connections, let answers finish within drain_s."""
        self.should_exit = True


def server(api: Api) -> Server:
    """The HTTP server of `api`."""
    return Server(
        uvicorn.Config(
            api.app,
            http=EdgeProtocol,
            ws="none",
            lifespan="off",
            proxy_headers=False,
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
    """Serve until `http.stop()`; then finish what runs, within drain_s, and leave the bus.

    Raises:
        Exception: what the bus side died of; the HTTP side was stopped.
    """
    attaching = asyncio.create_task(_attach(api, connect), name="attach")
    sweeping = asyncio.create_task(every(SWEEP_S, api.link.sweep, clock=api.clock), name="sweep")
    died: list[BaseException] = []

    def ended(task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            died.append(error)
            http.stop()

    for task in (attaching, sweeping):
        task.add_done_callback(ended)
    try:
        await http.serve(sockets=[sock])
    finally:
        attaching.cancel()
        sweeping.cancel()
        await asyncio.gather(attaching, sweeping, return_exceptions=True)
        await api.link.close()
        if api.link.bus is not None:
            await api.link.bus.close()
    if died:
        raise died[0]


async def _attach(api: Api, connect: Connect) -> None:
    """Connect to the bus, however long that takes; from then on the bus reconnects by itself."""
    while True:
        bus = await connect()
        try:
            await api.link.attach(bus)
        except BusError as e:  # lost again at once
            log.warning("could not subscribe", error=e.message)
            await bus.close()
            await asyncio.sleep(ATTACH_AGAIN_S)
        else:
            log.info("attached to the bus", api=api.link.api)
            return
