"""Telemetry's shell: feeds the core from the bus, publishes what it says, keeps the event stream there."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine
from typing import Any

import structlog
from prometheus_client import CollectorRegistry

from talaria_common import subjects
from talaria_common.bus import Bus, Message, Subscription
from talaria_common.clock import Clock
from talaria_common.errors import BusError, TalariaError
from talaria_common.settings import Settings
from talaria_common.tasks import end
from talaria_common.ticker import every
from talaria_common.wire import Completion, Presence, Snapshot, WireError, decode, encode
from talaria_telemetry.core import TelemetryCore
from talaria_telemetry.instances import Expected
from talaria_telemetry.messages import Announce, Beat, Input, Present, Publish
from talaria_telemetry.metrics import CompletionMetrics, InstanceCollector
from talaria_telemetry.pages import page_bytes

log = structlog.get_logger(__name__)


class TelemetryShell:
    """One telemetry process's work. `start`, then it runs until `close`.

    Args:
        bus: a connection; it stays the caller's.
        settings: the whole configuration.
        clock: time.
        epoch: this life of telemetry.
        registry: where the metrics go.
    """

    def __init__(self, bus: Bus, settings: Settings, clock: Clock, epoch: str, registry: CollectorRegistry) -> None:
        self.settings = settings
        self.failed = asyncio.Event()
        """A task of ours has died: the process must end, never live on by half."""
        self.core = TelemetryCore(
            settings.telemetry.id,
            epoch,
            heartbeat_s=settings.mesh.heartbeat_s,
            missed=settings.mesh.missed,
            full_every=settings.telemetry.full_every,
            expected=[Expected(i.id, i.pool, i.models) for i in settings.instances],
        )
        self.malformed = 0
        """Messages that did not fit their schema."""
        self.stream_ready = False
        self._bus = bus
        self._clock = clock
        self._completions = CompletionMetrics(registry)
        registry.register(InstanceCollector(self.core, clock))
        self._outbox: deque[tuple[str, bytes]] = deque()
        self._wake = asyncio.Event()
        self._unsaid = False
        """A view was held back because the bus was away: the next one has to be full."""
        self._tasks: set[asyncio.Task[Any]] = set()
        self._subs: list[Subscription] = []

    async def start(self) -> None:
        """Subscribe and begin. The event stream is made in the background: it must not hold up the view."""
        self._subs.append(await self._bus.subscribe(subjects.ALL_SNAPSHOTS, self._on_snapshot))
        self._subs.append(await self._bus.subscribe(subjects.ALL_COMPLETIONS, self._on_completion))
        self._bus.on_connection(self._on_connection)
        self._spawn(self._send())
        self._spawn(every(self.settings.mesh.heartbeat_s, self._beat, clock=self._clock))
        self._spawn(self._keep_stream())
        self._spawn(self._watch_presence())

    def not_ready(self) -> list[str]:
        """Why telemetry does not work now, for people; [] when it does."""
        why = []
        if not self._bus.connected:
            why.append("the message bus is away")
        if not self.stream_ready:
            why.append(f"the stream {subjects.EVENTS_STREAM} is not there yet")
        return why

    async def close(self) -> None:
        """Stop."""
        await asyncio.gather(*(sub.drain() for sub in self._subs), return_exceptions=True)
        await end(list(self._tasks))
        await self._send_all()

    def _on_snapshot(self, message: Message) -> None:
        try:
            snapshot = decode(message.data, Snapshot)
        except WireError as e:
            self._bad(message, e)
            return
        if message.subject == subjects.snapshot(snapshot.iid):
            self._handle(snapshot)
        else:
            self._bad(message, WireError(f"says it is of {snapshot.iid!r}"))

    def _on_completion(self, message: Message) -> None:
        try:
            self._completions.add(decode(message.data, Completion))
        except WireError as e:
            self._bad(message, e)

    def _on_connection(self, connected: bool) -> None:
        if connected:
            self._handle(Announce())
            self.stream_ready = False
            self._spawn(self._keep_stream())

    def _bad(self, message: Message, error: WireError) -> None:
        self.malformed += 1
        log.warning("malformed message", subject=message.subject, error=str(error))

    async def _keep_stream(self) -> None:
        """The stream's filter covers events and nothing else: over an RPC subject it would answer the RPC."""
        bus = self.settings.bus
        while not self.stream_ready:
            try:
                await self._bus.ensure_stream(
                    subjects.EVENTS_STREAM,
                    [subjects.ALL_EVENTS],
                    max_age_s=bus.events_max_age_s,
                    max_bytes=bus.events_max_bytes,
                )
                self.stream_ready = True
            except BusError as e:
                log.warning("the event stream is not there", error=e.message)
                await asyncio.sleep(self.settings.mesh.heartbeat_s)

    async def _watch_presence(self) -> None:
        while True:
            try:
                watch = await (await self._bus.kv(subjects.KV_INSTANCES)).watch()
                try:
                    async for key, entry in watch:
                        self._present(key, None if entry is None else entry.value)
                finally:
                    await watch.stop()
            except BusError as e:
                log.info("the watch on instances ended", error=e.message)
            await asyncio.sleep(self.settings.mesh.heartbeat_s)

    def _present(self, key: str, value: bytes | None) -> None:
        try:
            presence = None if value is None else decode(value, Presence)
        except WireError as e:
            log.warning("malformed presence", iid=key, error=str(e))
            return
        self._handle(Present(key, presence))

    def _beat(self) -> None:
        if self._bus.connected:
            self._handle(Beat(page_bytes(self._bus.max_payload_bytes)))
        else:
            # Nobody can be heard, so nobody is judged; and a view would be delivered later, with ages that are lies.
            self._unsaid = True

    def _handle(self, message: Input) -> None:
        if self._unsaid and self._bus.connected:  # a beat may come before the connection's own callback
            self._unsaid = False
            self.core.handle(self._clock.now(), Announce())
        for effect in self.core.handle(self._clock.now(), message):
            if isinstance(effect, Publish):
                self._outbox.append((subjects.CLUSTER, encode(effect.view)))
            else:
                event = effect.event
                log.info("instance", **event.data)
                self._outbox.append((subjects.event(event.kind, event.source), encode(event)))
        if self._outbox:
            self._wake.set()

    async def _send(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            await self._send_all()

    async def _send_all(self) -> None:
        while self._outbox:
            subject, data = self._outbox.popleft()
            try:
                await self._bus.publish(subject, data)
            except BusError as e:
                log.debug("not sent", subject=subject, error=e.message)
            except TalariaError as e:
                log.warning("not sent", subject=subject, bytes=len(data), error=e.message)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.critical("a task of telemetry died", exc_info=task.exception())
            self.failed.set()
