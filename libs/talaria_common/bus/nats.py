"""The bus on NATS (nats-py). See `talaria_common.bus.interface.Bus` and docs/adr/0002."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar, cast

import nats.errors
import nats.js.errors as js_errors
import stamina
import structlog
from nats.js import api

from talaria_common.bus import names
from talaria_common.bus._nats_errors import NAME_IN_USE, not_ready_or_silent, translate, translated
from talaria_common.bus._nats_kv import NatsKv, NatsWatch, open_bucket
from talaria_common.bus._nats_open import open_client
from talaria_common.bus._nats_silence import PROBE_S, Silence
from talaria_common.bus._nats_stream import read
from talaria_common.bus.faults import FaultReporter
from talaria_common.bus.interface import Handler, Headers, KvBucket, Message
from talaria_common.errors import BusError, BusTimeoutError, NoRespondersError

log = structlog.get_logger(__name__)

MAX_PENDING_MESSAGES = 65_536
MAX_PENDING_BYTES = 128 << 20
"""What one subscription may have waiting before more is dropped and reported."""
MAX_BUFFERED_BYTES = 32 << 20
"""Published while disconnected; more is refused. Above it a connected publisher waits for the socket."""
PING_S = 5.0
MAX_PINGS_OUT = 2
"""A half-open connection is given up after three pings: 15 s, instead of nats-py's 6 minutes."""
JETSTREAM_TIMEOUT_S = 5.0
JETSTREAM_READY_WITHIN_S = 15.0
"""JetStream comes up some time after the server takes connections."""
CLOSE_WITHIN_S = 5.0


T = TypeVar("T")


class _Sub:
    """A subscription that outlives the client object it was made on."""

    def __init__(self, bus: NatsBus, subject: str, queue: str, handler: Handler) -> None:
        self.subject = subject
        self._bus = bus
        self._queue = queue
        self._handler = handler
        self._inner: Any = None

    async def attach(self, client: Any) -> None:
        """Subscribe on `client`."""
        self._inner = await client.subscribe(
            self.subject,
            queue=self._queue,
            cb=self._late,
            pending_msgs_limit=MAX_PENDING_MESSAGES,
            pending_bytes_limit=MAX_PENDING_BYTES,
        )
        client.direct[self._inner._id] = self._deliver  # noqa: SLF001 - the sid has no public name

    def _deliver(self, message: Message) -> bool:
        """In the read loop: handlers return at once, so a queue and a task between would only cost time."""
        try:
            self._handler(message)
        except Exception as e:  # noqa: BLE001 - reported, so that one bad message does not end the subscription
            self._bus.faults.report("handler", self.subject, f"{self.subject}: the handler failed: {e!r}", e)
        return True

    async def _late(self, msg: Any) -> None:
        """What nats-py itself delivers: nothing, unless it came before `direct` was set."""
        self._deliver(Message(msg.subject, msg.data, msg.headers or {}, msg.reply or None))

    async def stop(self) -> None:
        """Unsubscribe now."""
        self._bus.forget(self)
        with contextlib.suppress(nats.errors.Error):  # closed, draining or stopped already: nothing left to stop
            await self._inner.unsubscribe()

    async def drain(self) -> None:
        """Unsubscribe, then wait for what had arrived. Raises BusTimeoutError if the server does not answer."""
        self._bus.forget(self)
        with translated(f"drain of {self.subject}"):
            try:
                await self._inner.drain()
            except (
                nats.errors.ConnectionClosedError,
                nats.errors.ConnectionDrainingError,
                nats.errors.BadSubscriptionError,
            ):
                return  # nothing left to drain


class NatsBus:
    """A connection to NATS; made by `connect`."""

    def __init__(self, connect_options: dict[str, Any]) -> None:
        self.faults = FaultReporter()
        self._options = connect_options
        self._client: Any = None
        self._jetstream: Any = None
        self._subs: list[_Sub] = []
        self._watches: list[NatsWatch] = []
        self._callbacks: list[Callable[[bool], None]] = []
        self._up = False
        self._mute = False
        self._closing = False
        self._listener: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[Any]] = set()

    @classmethod
    async def connect(
        cls,
        url: str,
        *,
        name: str = "",
        user: str = "",
        password: str = "",
        timeout_s: float = 5.0,
        reconnect_wait_s: float = 0.2,
    ) -> NatsBus:
        """Connect to the server at `url` (nats://host:port).

        Once connected it reconnects without limit, whatever ended the connection.

        Args:
            url: the server.
            name: shown in the server's monitoring.
            user: with `password`, if the server asks for them.
            password: see `user`.
            timeout_s: how long to try.
            reconnect_wait_s: between attempts to reconnect.

        Raises:
            BusError: nobody listens there, or the user was refused.
        """
        bus = cls(
            {
                "servers": url,
                "name": name or None,
                "user": user or None,
                "password": password or None,
                "reconnect_time_wait": reconnect_wait_s,
                "max_reconnect_attempts": -1,
                "connect_timeout": 2,
                "ping_interval": PING_S,
                "max_outstanding_pings": MAX_PINGS_OUT,
                "pending_size": MAX_BUFFERED_BYTES,
                "drain_timeout": CLOSE_WITHIN_S,
                "skip_subject_validation": True,  # done here, and more strictly
            }
        )
        bus._adopt(await bus._open(timeout_s))
        bus._listener = asyncio.create_task(bus._listen(), name="bus-listener")
        return bus

    @property
    def connected(self) -> bool:
        """Whether the server can be reached now: the connection stands, and it answers."""
        return self._up and not self._mute and not self._closing

    @property
    def max_payload_bytes(self) -> int:
        """Largest message, headers included, that the server takes."""
        return cast("int", self._client.max_payload)

    async def publish(self, subject: str, data: bytes, *, headers: Headers | None = None) -> None:
        """Send and forget."""
        await self._publish(names.check_subject(subject), data, headers)

    def post(self, to: str | Message, data: bytes, *, within_s: float = 0.0) -> bool:
        """Publish or answer at once, if nothing has to wait."""
        subject = names.check_subject(to) if isinstance(to, str) else to.reply
        if subject is None:
            return True  # nobody waits for this answer
        self._check_room(subject, data, None)
        return bool(self._client.send(subject, "", data, None, within_s=within_s))

    async def request(self, subject: str, data: bytes, *, timeout_s: float, headers: Headers | None = None) -> Message:
        """Send and wait for one answer."""
        self._check_room(names.check_subject(subject), data, headers)
        try:
            answer: Message = await self._client.ask(subject, data, timeout_s, headers)
        except nats.errors.NoRespondersError as e:
            raise NoRespondersError(f"nobody listens on {subject}") from e
        except TimeoutError as e:
            raise BusTimeoutError(f"{subject}: no answer within {timeout_s} s") from e
        except (nats.errors.Error, OSError) as e:
            raise translate(e, subject) from e
        return answer

    async def respond(self, to: Message, data: bytes) -> None:
        """Answer a request; nothing happens if nobody waits."""
        if to.reply is not None:
            await self._publish(to.reply, data, None)

    async def subscribe(self, subject: str, handler: Handler, *, queue: str = "") -> _Sub:
        """Call `handler` for every message on `subject`."""
        sub = _Sub(self, names.check_filter(subject), names.check_queue(queue), handler)
        with translated(subject):
            await sub.attach(self._client)
        self._subs.append(sub)
        return sub

    async def kv(self, bucket: str, *, ttl_s: float | None = None) -> KvBucket:
        """Open `bucket`, made if missing."""
        names.check_bucket(bucket)
        direct = await self._when_ready(f"bucket {bucket}", lambda js: open_bucket(js, bucket, ttl_s))
        return NatsKv(
            bucket,
            direct=direct,
            jetstream=self._js,
            ask=lambda *args: self._client.ask(*args),  # noqa: PLW0108 - a reconnect may bring another client
            max_payload=lambda: self.max_payload_bytes,
            register=self._watches.append,
        )

    async def ensure_stream(self, name: str, subjects: list[str], *, max_age_s: float, max_bytes: int) -> None:
        """Create or update a JetStream stream: on file, the oldest messages leave by age and by size."""
        config = api.StreamConfig(
            name=names.check_bucket(name),
            subjects=[names.check_filter(s) for s in subjects],
            max_age=max_age_s,
            max_bytes=max_bytes,
            discard=api.DiscardPolicy.OLD,
            storage=api.StorageType.FILE,
            retention=api.RetentionPolicy.LIMITS,
            duplicate_window=min(120.0, max_age_s),
            allow_direct=True,
        )

        async def create_or_update(js: Any) -> None:
            try:
                await js.add_stream(config)
            except js_errors.BadRequestError as e:
                if e.err_code != NAME_IN_USE:
                    raise
                await js.update_stream(config)

        await self._when_ready(f"stream {name}", create_or_update)

    async def read_stream(self, name: str, subject: str, *, since_s: float | None = None) -> AsyncIterator[Message]:
        """What stream `name` holds now on `subject`, oldest first."""
        names.check_bucket(name)
        async for raw in read(self._js(), name, names.check_filter(subject), since_s):
            yield Message(raw.subject, raw.data, raw.headers or {}, None)

    def on_connection(self, callback: Callable[[bool], None]) -> None:
        """Call back with False when the connection is lost and True when it is there again."""
        self._callbacks.append(callback)

    def on_error(self, callback: Callable[[Exception], None]) -> None:
        """Call back with asynchronous errors (`BusFaultError`), at most one a second of each kind."""
        self.faults.add(callback)

    async def flush(self, timeout_s: float = 5.0) -> None:
        """Return when everything published before has reached the server."""
        if not self._up:
            raise BusTimeoutError("not connected to the message bus")
        with translated("flush"):
            await self._client.flush(timeout=timeout_s)

    async def close(self) -> None:
        """Drain what is queued, then disconnect."""
        if self._closing:
            return
        self._closing = True
        for watch in self._watches:
            await watch.stop()
        for task in (self._listener, *self._tasks):
            if task is not None:
                task.cancel()
        # RuntimeError: nats-py writes out its backlog on a transport that uvloop knows to be closed.
        try:
            if self._up:
                await self._client.drain()
        except (nats.errors.Error, OSError, RuntimeError) as e:
            log.warning("the bus was not drained", error=str(e))
        try:
            await self._client.close()
        except (nats.errors.Error, OSError, RuntimeError) as e:
            log.warning("the bus was not closed in order", error=str(e))
        finally:
            self.faults.close()

    def forget(self, sub: _Sub) -> None:
        """`sub` has ended."""
        if sub in self._subs:
            self._subs.remove(sub)

    # --- below: the connection's life

    async def _open(self, timeout_s: float) -> Any:
        return await open_client(self._options, timeout_s, hooks=self._hooks, reports=self._reports)

    def _reports(self, client: Any, error: Exception) -> bool:
        """Whether an error of `client` has been reported: it is the current one."""
        if client is not self._client:
            return False
        self._async_error(error)
        return True

    def _hooks(self, client: Any) -> dict[str, Any]:
        """The callbacks of a client's life; they count for the current client only."""

        async def on_disconnected() -> None:
            if client is self._client:
                self._lost()

        async def on_reconnected() -> None:
            if client is self._client:
                self._back()

        async def on_closed() -> None:
            if client is self._client and not self._closing:
                self._spawn(self._replace())

        return {"disconnected_cb": on_disconnected, "reconnected_cb": on_reconnected, "closed_cb": on_closed}

    def _adopt(self, client: Any) -> None:
        self._client = client
        self._jetstream = client.jetstream(timeout=JETSTREAM_TIMEOUT_S)
        self._up = True

    async def _replace(self) -> None:
        """nats-py gives up for good on errors such as 'Slow Consumer' or a refused user; we do not."""
        self._lost()
        self.faults.report("connection", "closed", "the server closed the connection; connecting anew")
        while True:
            try:
                client = await self._open(CLOSE_WITHIN_S)
                with translated("subscribing again"):
                    for sub in list(self._subs):
                        await sub.attach(client)
            except BusError as e:
                self.faults.report("connection", "closed", e.message)
                await asyncio.sleep(self._options["reconnect_time_wait"])
                continue
            if not client.is_closed:  # while it was not ours yet its closing went unnoticed
                self._adopt(client)
                self._back(first=True)
                return

    async def _listen(self) -> None:
        """Find out when the server hangs: it brings nothing, while we could hear it, not even the answer to a ping."""
        loop, silence = asyncio.get_running_loop(), Silence()
        while True:
            client, began = self._client, loop.time()
            client.quiet = True
            await asyncio.sleep(PROBE_S)
            hears_nothing = client.quiet and client is self._client and self._up and not self._mute
            match silence.judge(loop.time() - began, quiet=hears_nothing):
                case "ask":
                    with contextlib.suppress(nats.errors.Error, OSError):
                        await client.ping()
                case "mute":
                    self._mute = True
                    client.on_sound = self._unmute
                    log.warning("the message bus does not answer", url=self._options["servers"])
                    self._tell(False)

    def _unmute(self) -> None:
        if self._mute:
            self._mute = False
            log.info("the message bus answers again", url=self._options["servers"])
            self._tell(True)

    def _lost(self) -> None:
        if self._up and not self._closing:
            told, self._up, self._mute = self._mute, False, False
            log.warning("lost the message bus", url=self._options["servers"])
            if not told:
                self._tell(False)

    def _back(self, *, first: bool = False) -> None:
        if self._closing or (self._up and not first):
            return
        self._up = True
        log.info("the message bus is there again", url=self._options["servers"])
        for watch in self._watches:
            watch.restart()
        self._tell(True)

    def _tell(self, up: bool) -> None:
        if self._closing:
            return
        for callback in self._callbacks:
            try:
                callback(up)
            except Exception:
                log.exception("an on_connection callback failed")

    def _async_error(self, error: Exception) -> None:
        match error:
            case nats.errors.SlowConsumerError():
                subject = error.sub.subject
                self.faults.report("slow_consumer", subject, f"{subject}: slow consumer, messages dropped")
            case nats.errors.Error() if "permissions violation" in str(error).lower():
                self.faults.report("permission", str(error), str(error))
            case nats.errors.StaleConnectionError() | OSError():
                self.faults.report("connection", "", f"connection to the message bus: {error or repr(error)}")
            case _:
                self.faults.report("client", type(error).__name__, f"message bus: {error!r}", error)

    # --- below: small helpers

    async def _publish(self, subject: str, data: bytes, headers: Headers | None) -> None:
        self._check_room(subject, data, headers)
        if self._client.send(subject, "", data, headers):
            return
        try:
            await self._client.publish(subject, data, headers=dict(headers) if headers else None)
        except (nats.errors.Error, OSError) as e:
            raise translate(e, subject) from e

    def _check_room(self, subject: str, data: bytes, headers: Headers | None) -> None:
        size = names.check_size(data, headers, self.max_payload_bytes)
        if not self._up and size + self._client.pending_data_size > MAX_BUFFERED_BYTES:
            raise BusError(f"{subject}: not connected to the message bus, and the send buffer is full")

    def _js(self) -> Any:
        if not self.connected:
            raise BusError("not connected to the message bus")
        return self._jetstream

    async def _when_ready(self, what: str, call: Callable[[Any], Awaitable[T]]) -> T:
        with translated(what):
            async for attempt in stamina.retry_context(
                on=not_ready_or_silent,
                attempts=None,
                timeout=JETSTREAM_READY_WITHIN_S,
                wait_initial=0.05,
                wait_max=0.5,
            ):
                with attempt:
                    return await call(self._js())
        raise AssertionError("unreachable: stamina returns or raises")

    def _spawn(self, coro: Any) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.ensure_future(coro)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
