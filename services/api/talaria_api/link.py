"""The bus side of the api: carries out the effects of all calls and feeds back what the bus brings.

One subscription for the frames of all calls, one for the cluster view, one timer that ticks every call. A call has at
most one request on its way, in at most one task.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Protocol

import structlog

from talaria_api.call import Call
from talaria_api.cluster import Cluster
from talaria_api.errors import SlowClientError
from talaria_api.messages import (
    Absent,
    Answered,
    Arrived,
    Ask,
    Begin,
    Effect,
    Emit,
    Event,
    Finish,
    Forward,
    ForwardFailed,
    Gone,
    Replaced,
    Routed,
    RouteFailed,
    SendCancel,
    SlowClient,
    Tick,
)
from talaria_api.metrics import ApiMetrics
from talaria_api.peers import Peers
from talaria_common import subjects
from talaria_common.bus.interface import Bus, Message, Subscription
from talaria_common.clock import Clock
from talaria_common.errors import BusError, EngineError, TalariaError
from talaria_common.wire import (
    FORWARD_HEADER,
    TRACE_HEADER,
    ClusterView,
    ForwardReply,
    Frame,
    RouteReply,
    TokenBatch,
    WireError,
    decode,
    encode,
)

log = structlog.get_logger(__name__)

SWEEP_S = 0.05
"""How often calls are ticked: the resolution of every time-out."""
STOOD_STILL_S = 0.5
"""A sweep that comes this late means that this process did not run, and heard nothing for that reason."""


class Sink(Protocol):
    """Where a call's frames go: the HTTP side. Both methods return at once."""

    def put(self, frame: Frame) -> bool:
        """Take a frame; False if there is no room for it."""
        ...

    def finish(self, error: TalariaError | None) -> None:
        """The call has ended; nothing follows."""
        ...


@dataclass(slots=True, eq=False)
class LiveCall:
    """A call with what its shell needs."""

    call: Call
    sink: Sink
    body: bytes
    trace: str
    io: asyncio.Task[None] | None = None
    next_io: Ask | Forward | None = None
    in_io: bool = False


class Link:
    """All calls of this api.

    Args:
        api: this process's name on the bus, unique to this life of it: frames for an earlier life never come here.
    """

    def __init__(self, api: str, clock: Clock, peers: Peers, cluster: Cluster, metrics: ApiMetrics) -> None:
        self.api = api
        self.cluster = cluster
        self.route_answered_at: float | None = None
        self._clock = clock
        self._peers = peers
        self._metrics = metrics
        self._bus: Bus | None = None
        self._subs: list[Subscription] = []
        self._calls: dict[str, LiveCall] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._swept_at = clock.now()

    # --- life

    async def attach(self, bus: Bus) -> None:
        """Subscribe on `bus` and serve from now on."""
        bus.on_connection(self._on_connection)
        self._subs = [
            await bus.subscribe(subjects.tokens(self.api), self._on_tokens),
            await bus.subscribe(subjects.CLUSTER, self._on_cluster),
        ]
        await bus.flush()
        self._bus = bus
        self._metrics.bus(bus.connected)

    async def close(self) -> None:
        """Stop listening. Calls must have ended."""
        for sub in self._subs:
            with contextlib.suppress(BusError):
                await sub.stop()
        if self._tasks:
            await asyncio.wait(list(self._tasks), timeout=1.0)

    @property
    def bus(self) -> Bus | None:
        """The bus, once there was a connection."""
        return self._bus

    @property
    def connected(self) -> bool:
        """Whether the bus can be reached now."""
        return self._bus is not None and self._bus.connected

    @property
    def in_flight(self) -> int:
        """Calls that have not ended."""
        return len(self._calls)

    # --- calls

    def open(self, live: LiveCall) -> None:
        """Start a call. Its sink hears how it ends, whatever happens."""
        self._calls[live.call.facts.rid] = live
        self.feed(live, Begin())

    def feed(self, live: LiveCall, event: Event) -> None:
        """Give a call an event and carry out what follows."""
        self._apply(live, live.call.handle(self._clock.now(), event))

    def _apply(self, live: LiveCall, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Emit(frame):
                    if not self._pass_on(live, frame):
                        return
                case Ask() | Forward():
                    self._start_io(live, effect)
                case SendCancel(iid, cancel):
                    self._spawn(self._publish(subjects.cancel(iid), encode(cancel)))
                case Replaced(iid, reason):
                    self._metrics.replaced(reason)
                    log.warning("call is placed again", rid=live.call.facts.rid, instance=iid, reason=reason)
                case Finish(error):
                    self._end(live)
                    live.sink.finish(error)

    def _pass_on(self, live: LiveCall, frame: Frame) -> bool:
        if live.sink.put(frame):
            return True
        self.feed(live, SlowClient(SlowClientError("the client reads too slowly; the stream was cut")))
        return False

    def _end(self, live: LiveCall) -> None:
        self._calls.pop(live.call.facts.rid, None)
        live.next_io = None
        if live.io is not None and not live.in_io:
            live.io.cancel()

    # --- requests

    def _start_io(self, live: LiveCall, effect: Ask | Forward) -> None:
        if live.in_io:
            live.next_io = effect
            return
        if live.io is not None:
            live.io.cancel()
        live.io = self._spawn(self._drive(live, effect))

    async def _drive(self, live: LiveCall, first: Ask | Forward) -> None:
        effect: Ask | Forward | None = first
        while effect is not None:
            attempt = live.call.attempt
            try:
                event = await (self._ask(live, effect) if isinstance(effect, Ask) else self._forward(live, effect))
            except Exception as e:
                log.exception("a request on the bus failed in an unexpected way", rid=live.call.facts.rid)
                failed = RouteFailed if isinstance(effect, Ask) else ForwardFailed
                event = failed(attempt, TalariaError(f"an unexpected error happened: {type(e).__name__}"))
            live.next_io, live.in_io = None, True
            try:
                self.feed(live, event)
            finally:
                live.in_io = False
            effect = live.next_io
        live.io = None

    async def _ask(self, live: LiveCall, effect: Ask) -> Event:
        attempt = effect.request.attempt
        subject = subjects.route(effect.partition)
        headers = {TRACE_HEADER: live.trace} if live.trace else None
        try:
            answer = await self._request(subject, encode(effect.request), effect.timeout_s, headers)
            self.route_answered_at = self._clock.now()
            return Routed(attempt, decode(answer.data, RouteReply))
        except WireError as e:
            return RouteFailed(attempt, EngineError(f"the router's answer cannot be read: {e}"))
        except TalariaError as e:
            return RouteFailed(attempt, e)

    async def _forward(self, live: LiveCall, effect: Forward) -> Event:
        placement = effect.head.placement
        attempt = placement.fence.attempt
        headers = {FORWARD_HEADER: encode(effect.head).decode()}
        if live.trace:
            headers[TRACE_HEADER] = live.trace
        try:
            answer = await self._request(subjects.forward(placement.iid), live.body, effect.timeout_s, headers)
            reply = decode(answer.data, ForwardReply)
        except (WireError, ValueError) as e:
            return ForwardFailed(live.call.attempt, EngineError(f"instance {placement.iid!r}: {e}"))
        except TalariaError as e:
            return ForwardFailed(live.call.attempt, e)
        if reply.accepted and reply.epoch:
            self._peers.hear(self._clock.now(), placement.iid, reply.epoch)
        return Answered(attempt, reply)

    async def _request(self, subject: str, data: bytes, timeout_s: float, headers: dict[str, str] | None) -> Message:
        if self._bus is None:
            raise BusError("not connected to the message bus yet")
        return await self._bus.request(subject, data, timeout_s=timeout_s, headers=headers)

    async def _publish(self, subject: str, data: bytes) -> None:
        if self._bus is None:
            return
        try:
            await self._bus.publish(subject, data)
        except BusError as e:
            # The instance's own deadline ends the call then.
            log.warning("cancel was not sent", subject=subject, error=e.message)

    async def probe_router(self, partition: int, data: bytes, timeout_s: float) -> bool:
        """Whether the router of `partition` answers anything at all."""
        try:
            await self._request(subjects.route(partition), data, timeout_s, None)
        except TalariaError:
            return False
        self.route_answered_at = self._clock.now()
        return True

    # --- what the bus brings

    def _on_tokens(self, message: Message) -> None:
        try:
            batch = decode(message.data, TokenBatch)
        except WireError as e:
            self._metrics.unreadable()
            log.warning("a batch of frames cannot be read", error=str(e))
            return
        now = self._clock.now()
        self._metrics.batch(len(batch.frames), len(message.data))
        iid, epoch = batch.iid, batch.epoch
        if not self._peers.hear(now, iid, epoch):
            return
        for frame in batch.frames:
            live = self._calls.get(frame.rid)
            if live is None:
                continue
            if live.call.follows(iid, epoch, frame):
                self._pass_on(live, frame)
            else:
                self._apply(live, live.call.handle(now, Arrived(iid, epoch, frame)))
        if batch.alive is not None:
            here = set(batch.alive)
            self._feed_all(Absent(iid, epoch), [c for c in self._calls.values() if c.call.facts.rid not in here])

    def _on_cluster(self, message: Message) -> None:
        try:
            view = decode(message.data, ClusterView)
        except WireError as e:
            self._metrics.unreadable()
            log.warning("a cluster view cannot be read", error=str(e))
            return
        for gone in self.cluster.update(self._clock.now(), view):
            self._feed_all(Gone(gone.snapshot.iid, gone.snapshot.epoch), list(self._calls.values()))

    def _on_connection(self, connected: bool) -> None:
        self._peers.connection(self._clock.now(), connected)
        self._metrics.bus(connected)

    def _feed_all(self, event: Absent | Gone, calls: list[LiveCall]) -> None:
        for live in calls:
            if live.call.iid == event.iid:
                self.feed(live, event)

    def sweep(self) -> None:
        """Tick every call; called every SWEEP_S. Without it no wait would end, so its death must end the process."""
        now = self._clock.now()
        if now - self._swept_at > STOOD_STILL_S:
            self._peers.forgive(now)
        self._swept_at = now
        for live in list(self._calls.values()):
            self._apply(live, live.call.handle(now, Tick()))

    def _spawn(self, coro: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.create_task(coro)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
