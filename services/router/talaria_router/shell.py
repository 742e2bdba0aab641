"""The router's shell: feeds the core from the bus and carries out what it says. No policy here."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Coroutine
from typing import Any

import structlog

from talaria_common import subjects
from talaria_common.bus import Bus, KvBucket, Message, Subscription
from talaria_common.clock import Clock, to_ms
from talaria_common.errors import BusError
from talaria_common.ids import PARTITIONS
from talaria_common.settings import Settings
from talaria_common.tasks import end
from talaria_common.ticker import every
from talaria_common.wire import (
    ClusterView,
    Completion,
    ControlReply,
    ControlRequest,
    RouteRequest,
    SessionRecord,
    Snapshot,
    WireError,
    decode,
    encode,
)
from talaria_router.claims import Claims, Hooks
from talaria_router.config import PROBE_WAIT_S, RouterConfig
from talaria_router.core import RouterCore
from talaria_router.messages import (
    Ask,
    Control,
    Controlled,
    Dirty,
    Effect,
    Emit,
    Follow,
    Gained,
    Heard,
    Load,
    Lost,
    Probe,
    Probed,
    Reply,
    Restored,
    Tick,
)
from talaria_router.writer import SessionWriter

log = structlog.get_logger(__name__)

TICK_S = 0.05
EVENT_WITHIN_S = 0.02
"""Events wait so long for something to leave with."""
READS_AT_ONCE = 64
CONTROL_WAIT_S = 5.0
"""Instances answer commands at once; what they start may take longer and shows in their snapshots."""


class RouterShell:
    """One router process's work. `start`, then it runs until `close`.

    Args:
        bus: a connection; it stays the caller's.
        settings: the whole configuration.
        clock: time.
        epoch: this life of the router.
    """

    def __init__(self, bus: Bus, settings: Settings, clock: Clock, epoch: str) -> None:
        self.settings = settings
        self.epoch = epoch
        self.failed = asyncio.Event()
        """A task of ours has died: the process must end, never live on by half."""
        self.name = settings.router.id
        self.core = RouterCore(RouterConfig.of(settings), self.name, self.epoch)
        self.malformed = 0
        """Messages that did not fit their schema."""
        self._bus = bus
        self._clock = clock
        self._outbox: deque[tuple[Message | str, bytes]] = deque()
        self._sending = False
        self._wake = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._subs: list[Subscription] = []
        self._routes: dict[int, Subscription] = {}
        self._route_changes: asyncio.Queue[Gained | Lost] = asyncio.Queue()
        self._follow_sub: Subscription | None = None
        self._follow = False
        self._follow_lock = asyncio.Lock()
        self._reads = asyncio.Semaphore(READS_AT_ONCE)
        self._sessions: KvBucket
        self._writer = SessionWriter(self.core.record, self._ours)
        hooks = Hooks(self._owns, self._writer.hand_over, self._done)
        self.claims = Claims(lambda: bus.kv(subjects.KV_PARTITIONS), settings, clock, epoch, hooks)
        """This router's partitions."""

    async def start(self) -> None:
        """Open the buckets, subscribe, and begin to claim partitions."""
        bus = self._bus
        self._sessions = await bus.kv(subjects.KV_SESSIONS, ttl_s=self.settings.router.session_idle_s)
        self._subs.append(await bus.subscribe(subjects.ALL_COMPLETIONS, self._on_completion))
        self._subs.append(await bus.subscribe(subjects.CLUSTER, self._on_view))
        self.spawn(self._send())
        self.spawn(every(TICK_S, lambda: self._handle(Tick()), clock=self._clock))
        self.spawn(self._writer.run(self._sessions))
        self.spawn(self._follow_routes())
        await self.claims.start()
        bus.on_connection(self._on_connection)

    @property
    def dirty(self) -> int:
        """Sessions not yet written behind."""
        return len(self._writer)

    def not_ready(self) -> list[str]:
        """Why this router cannot serve now, for people; [] when it can."""
        why = []
        if not self._bus.connected:
            why.append("the message bus is away")
        if not self.core.state.owned and len(self.claims.ownership.live) <= 1:
            why.append(f"no partition is claimed yet ({self.claims.ownership.unowned} of {PARTITIONS} have no owner)")
        if not any(True for _ in self.core.state.cluster.instances()):
            why.append("no snapshot of any instance has come yet")
        return why

    async def close(self) -> None:
        """Give the partitions back, write what is dirty, stop."""
        await self.claims.stop()
        with contextlib.suppress(BusError):
            await self._writer.flush()
        await self.claims.leave()
        subs = [*self._subs, *self._routes.values()]
        await asyncio.gather(*(sub.drain() for sub in subs), return_exceptions=True)
        await end(list(self._tasks))
        await self._send_all()

    # --- from the bus into the core

    def _on_connection(self, connected: bool) -> None:
        self._handle(Heard(connected))
        if connected:
            self.claims.connected()
            self.spawn(self._open_sessions())

    async def _open_sessions(self) -> None:
        """The bucket may be gone with the server's store; nobody else makes it, and without it nothing is written."""
        while self._bus.connected:
            try:
                self._sessions = await self._bus.kv(subjects.KV_SESSIONS, ttl_s=self.settings.router.session_idle_s)
            except BusError as e:
                log.warning("the sessions' bucket is not there", error=e.message)
                await asyncio.sleep(self.settings.mesh.heartbeat_s)
            else:
                self._writer.bucket = self._sessions
                return

    def _on_route(self, message: Message) -> None:
        try:
            request = decode(message.data, RouteRequest)
        except WireError as e:
            self._bad(message, e)
            return
        self._handle(Ask(request, message))
        self.core.settle(request.model)

    def _on_completion(self, message: Message) -> None:
        try:
            completion = decode(message.data, Completion)
        except WireError as e:
            self._bad(message, e)
            return
        self._handle(completion)

    def _on_view(self, message: Message) -> None:
        try:
            view = decode(message.data, ClusterView)
        except WireError as e:
            self._bad(message, e)
            return
        self._handle(view)

    def _on_snapshot(self, message: Message) -> None:
        try:
            snapshot = decode(message.data, Snapshot)
        except WireError as e:
            self._bad(message, e)
            return
        self._handle(snapshot)

    def _bad(self, message: Message, error: WireError) -> None:
        self.malformed += 1
        log.warning("malformed message", subject=message.subject, error=str(error))

    def _handle(self, message: Any) -> None:
        self._carry_out(self.core.handle(self._clock.now(), message))

    # --- from the core to the bus

    def _carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Reply):
                assert isinstance(effect.to, Message)
                self._say(effect.to, encode(effect.reply))
            elif isinstance(effect, Emit):
                self._say(subjects.event(effect.event.kind, self.name), encode(effect.event), EVENT_WITHIN_S)
            elif isinstance(effect, Dirty):
                self._writer.mark(effect.key)
            elif isinstance(effect, Load):
                self.spawn(self._load(effect.key))
            elif isinstance(effect, Probe):
                self.spawn(self._probe(effect.iid))
            elif isinstance(effect, Control):
                self.spawn(self._control(effect))
            else:
                assert isinstance(effect, Follow)
                self._follow = effect.on
                self.spawn(self._follow_snapshots())

    def _say(self, to: Message | str, data: bytes, within_s: float = 0.0) -> None:
        """Send at once if nothing waits, else in turn. What cannot be sent is lost: asks are asked again."""
        if not self._outbox and not self._sending:
            try:
                if self._bus.post(to, data, within_s=within_s):
                    return
            except BusError as e:
                self._unsent(to, e)
                return
        self._outbox.append((to, data))
        self._wake.set()

    async def _send(self) -> None:
        """What could not go out at once, in order."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            await self._send_all()

    async def _send_all(self) -> None:
        while self._outbox:
            to, data = self._outbox.popleft()
            self._sending = True
            try:
                if isinstance(to, Message):
                    await self._bus.respond(to, data)
                else:
                    await self._bus.publish(to, data)
            except BusError as e:
                self._unsent(to, e)
            finally:
                self._sending = False

    @staticmethod
    def _unsent(to: Message | str, error: BusError) -> None:
        log.debug("not sent", to=to if isinstance(to, str) else to.subject, error=error.message)

    async def _load(self, key: str) -> None:
        record: SessionRecord | None = None
        try:
            async with self._reads:
                entry = await self._sessions.get(key)
            if entry is not None:
                record = decode(entry.value, SessionRecord)
        except (BusError, WireError) as e:
            log.warning("session not read", key=key, error=str(e))
        self._handle(Restored(key, record))

    async def _probe(self, iid: str) -> None:
        request = ControlRequest(deadline_ms=to_ms(self._clock.now() + PROBE_WAIT_S))
        ok, epoch = False, ""
        try:
            answer = await self._bus.request(subjects.control(iid, "health"), encode(request), timeout_s=PROBE_WAIT_S)
            reply = decode(answer.data, ControlReply)
            ok, epoch = reply.ok and reply.iid == iid and reply.status in {"", "ready"}, reply.epoch
        except (BusError, ValueError) as e:  # ValueError: unreadable, or the id is no name for a subject
            log.info("health probe failed", iid=iid, error=str(e))
        self._handle(Probed(iid, ok, epoch))

    async def _control(self, control: Control) -> None:
        iid, verb, model = control
        request = ControlRequest(model=model, deadline_ms=to_ms(self._clock.now() + CONTROL_WAIT_S))
        ok = False
        try:
            answer = await self._bus.request(subjects.control(iid, verb), encode(request), timeout_s=CONTROL_WAIT_S)
            reply = decode(answer.data, ControlReply)
            ok = reply.ok
            log.info(
                "replica command", iid=iid, verb=verb, model=model, ok=ok, error=reply.error and reply.error.message
            )
        except (BusError, ValueError) as e:
            log.warning("replica command failed", iid=iid, verb=verb, model=model, error=str(e))
        self._handle(Controlled(control, ok))

    async def _follow_snapshots(self) -> None:
        async with self._follow_lock:
            try:
                if self._follow and self._follow_sub is None:
                    log.warning("the cluster view is silent: following the instances' snapshots")
                    self._follow_sub = await self._bus.subscribe(subjects.ALL_SNAPSHOTS, self._on_snapshot)
                elif not self._follow and self._follow_sub is not None:
                    log.info("the cluster view is back")
                    sub, self._follow_sub = self._follow_sub, None
                    await sub.stop()
            except BusError as e:
                log.warning("cannot follow snapshots", error=e.message)

    # --- partitions

    def _owns(self, change: Gained | Lost) -> None:
        """A partition came or went: the core knows at once, the subscription follows."""
        self._handle(change)
        self._route_changes.put_nowait(change)

    async def _follow_routes(self) -> None:
        while True:
            change = await self._route_changes.get()
            partition = change.partition
            try:
                if isinstance(change, Gained) and partition not in self._routes:
                    self._routes[partition] = await self._bus.subscribe(subjects.route(partition), self._on_route)
                elif isinstance(change, Lost) and partition in self._routes:
                    await self._routes.pop(partition).stop()
            except BusError as e:
                log.warning("cannot follow a partition", partition=partition, error=e.message)
                await asyncio.sleep(self.settings.mesh.heartbeat_s)
                self._route_changes.put_nowait(change)

    def _ours(self, key: str) -> bool:
        return int(key[:8], 16) % PARTITIONS in self.core.state.owned

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` until it ends or the shell closes."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.critical("a task of the router died", exc_info=task.exception())
            self.failed.set()
