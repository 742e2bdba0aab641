"""The instance's shell: bus subscriptions, heartbeat, presence and shutdown around the core."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Sequence

import structlog

from talaria_common import subjects, tracing
from talaria_common.bus import Bus, Message, Subscription
from talaria_common.clock import Clock, to_ms
from talaria_common.errors import BadRequestError, BusError, TalariaError
from talaria_common.settings import Settings
from talaria_common.tasks import end
from talaria_common.ticker import every
from talaria_common.wire import (
    FORWARD_HEADER,
    TRACE_HEADER,
    Cancel,
    ControlReply,
    ControlRequest,
    ForwardHead,
    ForwardReply,
    Presence,
    TokenBatch,
    WireError,
    decode,
    encode,
)
from talaria_common.wire.error import info_of
from talaria_instance import messages as m
from talaria_instance.claim import refuse_twin, stands
from talaria_instance.core import InstanceCore
from talaria_instance.metrics import InstanceMetrics
from talaria_instance.orphans import Orphans
from talaria_instance.preparer import Preparer
from talaria_instance.sender import Sender
from talaria_instance.supervisor import Supervisor

log = structlog.get_logger(__name__)

ORPHANS_EVERY_S = 2.0


class InstanceService:
    """One instance on `bus`; `run` is its life.

    Args:
        settings: the whole configuration.
        iid: which of its instances this is.
        bus: connected; closed by `run`.
        clock: the process's.
        epoch: of this process's life.
        engine_command: starts the engine process.
        metrics: counts what goes out.
    """

    def __init__(
        self,
        settings: Settings,
        iid: str,
        bus: Bus,
        clock: Clock,
        *,
        epoch: str,
        engine_command: Sequence[str],
        metrics: InstanceMetrics,
    ) -> None:
        self._mesh = settings.mesh
        self._settings = settings.instance(iid)
        self._iid = iid
        self._bus = bus
        self._clock = clock
        self._metrics = metrics
        self._preparer = Preparer(self._feed, metrics.tokenising)
        self.core = InstanceCore(
            self._settings,
            epoch,
            self._preparer.tokenizers,
            skew_s=self._mesh.skew_tolerance_s,
            heartbeat_s=self._mesh.heartbeat_s,
        )
        self.supervisor = Supervisor(engine_command, self._settings.models, self._preparer, self._feed)
        self._sender = Sender(bus, lambda kind: metrics.lost.labels(kind).inc())
        self._record = Presence(
            iid=iid,
            epoch=epoch,
            pool=self._settings.pool,
            models=self._settings.models,
            host=socket.gethostname(),
            pid=os.getpid(),
            started_ms=to_ms(clock.now()),
        )
        self._presence_due = asyncio.Event()
        self._present = asyncio.Event()
        self._idle = asyncio.Event()

    def not_ready(self) -> list[str]:
        """For /readyz: why it takes no calls; empty when it does."""
        reasons = [] if self._bus.connected else ["the message bus is away"]
        return reasons + ([f"{self.core.status}: {self.core.reason}"] if self.core.status != "ready" else [])

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop` is set, then shut down in order.

        Raises:
            BusError: the bus went away before the subscriptions stood.
            TwinError: another process has this id.
        """
        tasks = [asyncio.create_task(self._sender.run(), name="sender")]
        try:
            await refuse_twin(self._bus, self._iid)
            subscriptions = await self._subscribe()
            self._bus.on_connection(self._connection)
            self._presence_due.set()
            announcing = [asyncio.create_task(work()) for work in (self._presence, self._watch_presence)]
            beating = asyncio.create_task(every(self._mesh.heartbeat_s, self._beat, clock=self._clock))
            nobody = TokenBatch(iid=self._iid, epoch=self.core.epoch, frames=[])
            orphans = Orphans(self._bus, nobody, self._apis, lambda api: self._feed(m.ApiGone(api)))
            tasks += [beating, *announcing, asyncio.create_task(every(ORPHANS_EVERY_S, orphans.look))]
            self._do(self.core.start())
            log.info("instance up", iid=self._iid, epoch=self.core.epoch, pool=self._settings.pool)
            await self._until(stop, tasks)
            await self._shut_down(subscriptions, announcing)
        finally:
            await end(tasks)
            await self.supervisor.stop()
            self._preparer.close()
            try:
                await self._bus.close()
            except TalariaError as e:
                log.warning("the bus was not closed in order", error=str(e))

    @staticmethod
    async def _until(stop: asyncio.Event, tasks: list[asyncio.Task[None]]) -> None:
        """Wait for `stop`; a task of ours that ends first has failed, and so have we."""
        stopped = asyncio.create_task(stop.wait())
        try:
            done, _ = await asyncio.wait([stopped, *tasks], return_when=asyncio.FIRST_COMPLETED)
            for task in done - {stopped}:
                await task
        finally:
            stopped.cancel()

    async def _shut_down(self, subscriptions: list[Subscription], announcing: list[asyncio.Task[None]]) -> None:
        """NATS.md's order: not ready, unsubscribe, finish streams, then close."""
        log.info("shutting down", calls=len(self.core.calls))
        self._feed(m.Shutdown())
        for subscription in subscriptions:
            with contextlib.suppress(BusError):
                await subscription.drain()
        if self.core.calls:
            self._idle.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), self._settings.shutdown_s)
        self._feed(m.Shutdown(now=True))
        await self._sender.flush()
        await end(announcing)  # or our entry would be written again as soon as it is gone
        with contextlib.suppress(BusError):
            await (await self._bus.kv(subjects.KV_INSTANCES)).delete(self._iid)
            await self._bus.flush()

    def _apis(self) -> set[str]:
        return {call.head.api for call in self.core.calls.values()}

    # --- in

    async def _subscribe(self) -> list[Subscription]:
        iid = self._iid
        # Cancels first: one must never find its call here and nobody listening.
        handlers = [(subjects.cancel(iid), self._on_cancel)]
        handlers += [(subjects.control(iid, verb), self._on_control) for verb in subjects.CONTROL_VERBS]
        handlers += [(subjects.forward(iid), self._on_forward)]
        return [await self._bus.subscribe(subject, handler) for subject, handler in handlers]

    def _on_forward(self, message: Message) -> None:
        trace = message.headers.get(TRACE_HEADER, "")
        try:
            head = decode(message.headers.get(FORWARD_HEADER, ""), ForwardHead)
        except WireError as e:
            error = info_of(BadRequestError(f"{FORWARD_HEADER}: {e}"))
            log.warning("a forward without a usable head", error=str(e), trace=trace)
            self._sender.put(message, ForwardReply(accepted=False, epoch=self.core.epoch, error=error))
            return
        fence = head.placement.fence
        with tracing.under(tracing.of_message(message.headers)):  # what is logged for this call names its trace
            log.debug("forward", rid=fence.rid, attempt=fence.attempt, model=head.model)
            self._feed(m.Forward(message, head, message.data, trace))

    def _on_cancel(self, message: Message) -> None:
        try:
            self._feed(m.CancelCall(decode(message.data, Cancel)))
        except WireError as e:
            log.warning("a cancel that cannot be read", error=str(e))

    def _on_control(self, message: Message) -> None:
        verb = message.subject.rpartition(".")[2]
        try:
            request = decode(message.data or b"{}", ControlRequest)
        except WireError as e:
            reply = ControlReply(
                ok=False,
                iid=self._iid,
                epoch=self.core.epoch,
                status=self.core.status,
                error=info_of(BadRequestError(str(e))),
            )
            self._sender.put(message, reply)
            return
        self._feed(m.Control(message, verb, request))

    def _connection(self, up: bool) -> None:
        if up:
            self._presence_due.set()
            self._feed(m.Announce())

    def _beat(self) -> None:
        self._feed(m.Tick(self.supervisor.cpu_s()))
        if self.core.engine.status is not None:
            self._metrics.spent(self.core.engine.status)

    async def _presence(self) -> None:
        """Keep our entry in the presence bucket; written anew after every reconnect, retried until it stands."""
        while True:
            await self._presence_due.wait()
            self._presence_due.clear()
            try:
                await (await self._bus.kv(subjects.KV_INSTANCES)).put(self._iid, encode(self._record))
                self._present.set()
            except BusError as e:
                log.warning("presence not written", error=e.message)
                await asyncio.sleep(self._mesh.heartbeat_s)
                self._presence_due.set()

    async def _watch_presence(self) -> None:
        """Keep to one process per id, as long as the process lives. Raises TwinError.

        Not before our entry is there: what stands in its place until then is of an earlier life.
        """
        await self._present.wait()
        while True:
            try:
                watch = await (await self._bus.kv(subjects.KV_INSTANCES)).watch()
                async for key, entry in watch:
                    if key == self._iid and not stands(self._record, entry):
                        self._presence_due.set()
            except BusError as e:
                log.warning("presence is not watched", error=e.message)
            await asyncio.sleep(self._mesh.heartbeat_s)

    # --- through the core, and out

    def _feed(self, message: m.Message) -> None:
        self._do(self.core.handle(self._clock.now(), message))
        if not self.core.calls:
            self._idle.set()

    def _do(self, effects: list[m.Effect]) -> None:
        for effect in effects:
            match effect:
                case m.Publish(subject, message):
                    self._metrics.observe(message)
                    self._sender.put(subject, message)
                case m.Answer(handle, message):
                    self._metrics.observe(message)
                    self._sender.put(handle, message)
                case m.Tell(command):
                    self.supervisor.tell(command)
                case m.Prepare():
                    self._preparer.prepare(effect)
                case m.StartEngine(generation, delay_s):
                    self.supervisor.start(generation, delay_s)
                case m.KillEngine(generation):
                    self.supervisor.kill(generation)
