"""The api's peers on a real bus, scripted: a router, instances and telemetry that do what a test says.

And the api itself under a real uvicorn server on a free port.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from talaria_api.serve import Api, Server, listen, run, server
from talaria_common import subjects
from talaria_common.bus.interface import Bus, Message
from talaria_common.clock import SystemClock, to_ms
from talaria_common.ids import new_epoch
from talaria_common.settings import Settings, parse
from talaria_common.wire import (
    FORWARD_HEADER,
    Cancel,
    ClusterView,
    Fence,
    ForwardHead,
    ForwardReply,
    Frame,
    InstanceView,
    ModelState,
    Placement,
    RouteReply,
    RouteRequest,
    Snapshot,
    TokenBatch,
    TokenLogprob,
    Usage,
    Verdict,
    decode,
    encode,
)
from talaria_common.wire.error import ErrorInfo

CLOCK = SystemClock()
QUICK = {"route_timeout_s": 0.3, "accept_timeout_s": 1.0, "silence_s": 1.0}
"""For `api`, where somebody falls silent on purpose."""
EARLY = {"early_headers_s": 0.3}
"""For `api`, where headers go out before a token."""
Connect = Callable[[], Awaitable[Bus]]


def settings(**sections: Any) -> Settings:
    """Settings, one model with a known context and one without.

    Comments and heartbeats come often; who waits for another has patience, whatever else the machine does. A test of
    somebody's silence, or of headers before a token, names the time that it is to take (`QUICK`, `EARLY`).
    """
    api = {
        "port": 0,
        "early_headers_s": 5.0,
        "keepalive_s": 0.2,
        "request_timeout_s": 20.0,
        "route_timeout_s": 5.0,
        "accept_timeout_s": 5.0,
        "silence_s": 5.0,
        "drain_s": 3.0,
    }
    raw = {
        "models": {"m": {"source": "tiny-qwen3", "context_tokens": 100}, "org/free": {"source": "tiny-qwen3"}},
        "mesh": {"heartbeat_s": 0.1},
    }
    return parse(raw | sections | {"api": api | sections.get("api", {})})


def place(request: RouteRequest, iid: str, **extra: Any) -> RouteReply:
    """A placement of `request` on `iid`."""
    now = to_ms(CLOCK.now())
    fence = Fence(partition=0, owner_rev=1, rid=request.rid, attempt=request.attempt)
    given: dict[str, Any] = {"via": "cost", "accept_by_ms": now + 5000, "deadline_ms": request.deadline_ms}
    return RouteReply(placement=Placement(iid=iid, fence=fence, router="router-0", seq=1, **(given | extra)))


def refuse(reason: Any, code: str, message: str = "no", **extra: Any) -> RouteReply:
    """A verdict."""
    return RouteReply(verdict=Verdict(reason=reason, error=ErrorInfo(code, message, **extra)))


class FakeRouter:
    """Owns all partitions. By default it takes the first instance that is not excluded."""

    def __init__(self, bus: Bus, iids: list[str]) -> None:
        self.bus = bus
        self.iids = iids
        self.asked: list[RouteRequest] = []
        self.decide: Callable[[RouteRequest], RouteReply | None] = self.first_free
        self.came = asyncio.Event()

    def first_free(self, request: RouteRequest) -> RouteReply | None:
        for iid in self.iids:
            if iid not in request.exclude:
                return place(request, iid, via="retry" if request.attempt else "cost")
        return refuse("no_instance", "unavailable", "every instance is excluded")

    async def start(self) -> FakeRouter:
        await self.bus.subscribe("talaria.v1.rpc.route.*", self._on_ask)
        return self

    def _on_ask(self, message: Message) -> None:
        request = decode(message.data, RouteRequest)
        if request.model == "readyz":
            reply: RouteReply | None = refuse("expired", "deadline_exceeded")
        else:
            self.asked.append(request)
            self.came.set()
            reply = self.decide(request)
        if reply is not None:
            spawn(self.bus.respond(message, encode(reply)))


_tasks: set[asyncio.Task[Any]] = set()


def spawn(coro: Any) -> asyncio.Task[Any]:
    task: asyncio.Task[Any] = asyncio.ensure_future(coro)
    _tasks.add(task)
    task.add_done_callback(_tasks.discard)
    return task


@dataclass
class Held:
    """One call as an instance holds it."""

    instance: FakeInstance
    message: Message
    head: ForwardHead
    body: bytes
    seq: int = 0
    cancelled: asyncio.Future[Cancel] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    @property
    def rid(self) -> str:
        return self.head.placement.fence.rid

    @property
    def attempt(self) -> int:
        return self.head.placement.fence.attempt

    async def accept(self, epoch: str | None = None) -> None:
        reply = ForwardReply(accepted=True, epoch=self.instance.epoch if epoch is None else epoch)
        await self.instance.bus.respond(self.message, encode(reply))

    async def reject(self, code: str, *, retryable: bool, message: str = "no", **extra: Any) -> None:
        error = ErrorInfo(code, message, **extra)
        await self.instance.bus.respond(
            self.message, encode(ForwardReply(accepted=False, error=error, retryable=retryable))
        )
        self.instance.alive.discard(self.rid)

    def frame(self, kind: Any, **content: Any) -> Frame:
        frame = Frame(rid=self.rid, attempt=self.attempt, seq=self.seq, kind=kind, **content)
        self.seq += 1
        return frame

    async def send(self, *frames: Frame, epoch: str | None = None, alive: list[str] | None = None) -> None:
        batch = TokenBatch(
            iid=self.instance.iid,
            epoch=self.instance.epoch if epoch is None else epoch,
            frames=list(frames),
            alive=alive,
        )
        await self.instance.bus.publish(subjects.tokens(self.head.api), encode(batch))

    async def delta(self, text: str, **content: Any) -> None:
        await self.send(self.frame("delta", text=text, **content))

    async def final(self, text: str = "", reason: Any = "stop", **counts: Any) -> None:
        usage = Usage(**({"prompt_tokens": 7, "completion_tokens": 3} | counts))
        self.instance.alive.discard(self.rid)
        await self.send(self.frame("final", text=text, finish_reason=reason, usage=usage))

    async def error(self, code: str, *, retryable: bool, message: str = "broke") -> None:
        self.instance.alive.discard(self.rid)
        await self.send(self.frame("error", error=ErrorInfo(code, message), retryable=retryable))


Behaviour = Callable[[Held], Awaitable[None]]


class FakeInstance:
    """Takes calls and does with each what `behave` says; beats while it is `beating`."""

    def __init__(self, bus: Bus, iid: str, behave: Behaviour) -> None:
        self.bus = bus
        self.iid = iid
        self.epoch = new_epoch()
        self.behave = behave
        self.held: list[Held] = []
        self.alive: set[str] = set()
        self.apis: set[str] = set()
        self.beating = True
        self.took = asyncio.Event()
        self._beat: asyncio.Task[None] | None = None

    async def start(self) -> FakeInstance:
        await self.bus.subscribe(subjects.forward(self.iid), self._on_forward)
        await self.bus.subscribe(subjects.cancel(self.iid), self._on_cancel)
        self._beat = spawn(self._beats())
        return self

    def stop(self) -> None:
        if self._beat is not None:
            self._beat.cancel()

    async def _beats(self) -> None:
        while True:
            if self.beating:
                for api in self.apis:
                    batch = TokenBatch(iid=self.iid, epoch=self.epoch, alive=sorted(self.alive))
                    await self.bus.publish(subjects.tokens(api), encode(batch))
            await asyncio.sleep(0.1)

    def _on_forward(self, message: Message) -> None:
        head = decode(message.headers[FORWARD_HEADER], ForwardHead)
        held = Held(self, message, head, message.data)
        self.held.append(held)
        self.alive.add(held.rid)
        self.apis.add(head.api)
        self.took.set()
        spawn(self.behave(held))

    def _on_cancel(self, message: Message) -> None:
        cancel = decode(message.data, Cancel)
        for held in self.held:
            if (held.rid, held.attempt) == (cancel.rid, cancel.attempt) and not held.cancelled.done():
                held.cancelled.set_result(cancel)


async def until(holds: Callable[[], bool], timeout_s: float = 5.0) -> None:
    """Returns when `holds()`."""
    async with asyncio.timeout(timeout_s):
        while not holds():
            await asyncio.sleep(0.01)


async def answers(held: Held) -> None:
    """The usual behaviour: three deltas and a final frame."""
    await held.accept()
    await held.delta("Hello", token_ids=[1], prompt_token_ids=[9, 8, 7], cache_source="device", logprobs=[_lp("Hello")])
    await held.delta(", ", token_ids=[2], logprobs=[_lp(", ")])
    await held.delta("wörld", token_ids=[3], logprobs=[_lp("wörld")])
    await held.final(cached_tokens=4, cache_source="device")


def _lp(token: str) -> TokenLogprob:
    other = TokenLogprob(token="x", logprob=-1e30, bytes=[120])
    return TokenLogprob(token=token, logprob=-0.5, bytes=list(token.encode()), top=[other])


def view(*instances: InstanceView, version: int = 1, full: bool = True, epoch: str = "t1") -> ClusterView:
    """A cluster view."""
    return ClusterView(telemetry="telemetry-0", epoch=epoch, version=version, at_ms=0, full=full, instances=instances)


def instance_view(
    iid: str = "i-0",
    *,
    status: Any = "ready",
    health: Any = "ok",
    models: tuple[str, ...] = ("m", "org/free"),
    state: Any = "host",
    context: int = 100,
    epoch: str = "e1",
) -> InstanceView:
    """One instance in a view."""
    states = tuple(ModelState(name=m, state=state, context_tokens=context) for m in models)
    snapshot = Snapshot(iid=iid, epoch=epoch, version=1, at_ms=0, pool="cold", status=status, models=states)
    return InstanceView(snapshot=snapshot, age_ms=0, health=health)


class FakeTelemetry:
    """Publishes a view regularly."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.instances: tuple[InstanceView, ...] = (instance_view(),)
        self.version = 0
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> FakeTelemetry:
        self._task = spawn(self._publish())
        return self

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _publish(self) -> None:
        while True:
            self.version += 1
            await self.bus.publish(subjects.CLUSTER, encode(view(*self.instances, version=self.version)))
            await asyncio.sleep(0.1)


@dataclass
class Edge:
    """A served api with its scripted peers."""

    api: Api
    http: httpx.AsyncClient
    url: str
    server: Server
    router: FakeRouter
    instances: list[FakeInstance]
    telemetry: FakeTelemetry
    api_bus: Bus

    @property
    def instance(self) -> FakeInstance:
        return self.instances[0]

    async def chat(self, headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
        payload = {"model": "m", "messages": [{"role": "user", "content": "hi"}]} | body
        return await self.http.post("/v1/chat/completions", json=payload, headers=headers)

    async def idle(self) -> None:
        """Returns when no call is in flight: every one has had its terminal outcome."""
        await until(lambda: not self.api.link.in_flight)

    async def ready(self, wanted: bool = True, timeout_s: float = 10.0) -> None:
        """Returns when /readyz says so."""
        async with asyncio.timeout(timeout_s):
            while ((await self.http.get("/readyz")).status_code == 200) is not wanted:
                await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def edge(
    connect: Connect, *behaviours: Behaviour, config: Settings | None = None, api_bus: Bus | None = None
) -> AsyncIterator[Edge]:
    """The api on a free port, with a router and an instance `i-N` for each behaviour."""
    peers = await connect()
    router = await FakeRouter(peers, [f"i-{n}" for n in range(len(behaviours))]).start()
    instances = [await FakeInstance(peers, f"i-{n}", b).start() for n, b in enumerate(behaviours)]
    telemetry = await FakeTelemetry(peers).start()
    await peers.flush()
    api = Api(config or settings(), SystemClock(), new_epoch())
    own = api_bus or await connect()

    async def ready_bus() -> Bus:
        return own

    sock = listen("127.0.0.1", 0)
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    http_server = server(api)
    serving = asyncio.create_task(run(api, http_server, sock, ready_bus))
    try:
        async with httpx.AsyncClient(base_url=url, timeout=20) as http:
            await until(lambda: http_server.started and api.link.connected and api.cluster.seen)
            yield Edge(api, http, url, http_server, router, instances, telemetry, own)
    finally:
        telemetry.stop()
        for instance in instances:
            instance.stop()
        http_server.stop()
        async with asyncio.timeout(10):
            await serving
