"""The bus within one process: `MemoryHub` is the server, `MemoryBus` a connection to it.

The same semantics as NATS as far as the mesh can see them (one test suite runs on both), so that several services can
be composed in one event loop without a server. Messages are delivered by `loop.call_soon`: a handler never runs inside
a publish.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from talaria_common.bus import names
from talaria_common.bus.faults import FaultReporter
from talaria_common.bus.interface import Handler, Headers, KvBucket, KvEntry, KvWatch, Message
from talaria_common.bus.latest import LatestPerKey
from talaria_common.errors import BusError, BusTimeoutError, NoRespondersError, RevisionError

DEFAULT_MAX_PAYLOAD = 8 << 20
MAX_PENDING_MESSAGES = 65_536
"""Messages one subscription may have waiting before more are dropped and reported."""
MAX_BUFFERED_BYTES = 32 << 20
"""Published while disconnected; more is refused."""


@dataclass(slots=True)
class _Stream:
    filters: list[str]
    max_age_s: float
    max_bytes: int
    seq: int = 0
    messages: deque[tuple[float, Message]] = field(default_factory=deque)
    size: int = 0

    def append(self, message: Message) -> int:
        now = time.monotonic()
        self.seq += 1
        self.messages.append((now, message))
        self.size += len(message.data)
        while self.messages and (self.size > self.max_bytes or self.messages[0][0] < now - self.max_age_s):
            self.size -= len(self.messages.popleft()[1].data)
        return self.seq


class _Sub:
    """One subscription."""

    def __init__(self, bus: MemoryBus, pattern: str, queue: str, handler: Handler) -> None:
        self.bus = bus
        self.pattern = pattern
        self.queue = queue
        self._handler = handler
        self._waiting = 0
        self._stopped = False

    def push(self, message: Message) -> None:
        """Deliver soon."""
        if self._waiting >= MAX_PENDING_MESSAGES:
            self.bus.faults.report("slow_consumer", self.pattern, f"{self.pattern}: slow consumer, messages dropped")
            return
        self._waiting += 1
        asyncio.get_running_loop().call_soon(self._deliver, message)

    def _deliver(self, message: Message) -> None:
        self._waiting -= 1
        if self._stopped:
            return
        try:
            self._handler(message)
        except Exception as e:  # noqa: BLE001 - reported, so that one bad message does not end the subscription
            self.bus.faults.report("handler", self.pattern, f"{self.pattern}: the handler failed: {e!r}", e)

    async def stop(self) -> None:
        """Unsubscribe now."""
        self._stopped = True
        self.bus.hub.remove(self)

    async def drain(self) -> None:
        """Unsubscribe, then wait for what had arrived."""
        self.bus.hub.remove(self)
        while self._waiting and not self._stopped:  # noqa: ASYNC110 - deliveries are call_soon: one turn each
            await asyncio.sleep(0)
        self._stopped = True


class MemoryHub:
    """The server: subscriptions, streams and buckets of all its connections.

    Args:
        max_payload_bytes: largest message, headers included.
    """

    def __init__(self, *, max_payload_bytes: int = DEFAULT_MAX_PAYLOAD) -> None:
        self.max_payload_bytes = max_payload_bytes
        self.streams: dict[str, _Stream] = {}
        self.buckets: dict[str, MemoryKv] = {}
        self._exact: dict[str, list[_Sub]] = defaultdict(list)
        self._wild: list[_Sub] = []
        self._turn = itertools.count()

    def connect(self, name: str = "") -> MemoryBus:
        """A new connection."""
        return MemoryBus(self, name)

    def disconnect(self, bus: MemoryBus) -> None:
        """Cut `bus` off, as a network fault would: it hears nothing, what it publishes waits for `reconnect`."""
        bus.set_connected(False)

    def reconnect(self, bus: MemoryBus) -> None:
        """Let `bus` in again; what it published meanwhile is sent now."""
        bus.set_connected(True)

    def add(self, sub: _Sub) -> None:
        """Start a subscription."""
        wild = any(t in ("*", ">") for t in sub.pattern.split("."))
        (self._wild if wild else self._exact[sub.pattern]).append(sub)

    def remove(self, sub: _Sub) -> None:
        """End a subscription; no error if it has ended."""
        subs = self._exact.get(sub.pattern, self._wild)
        if sub in subs:
            subs.remove(sub)
        if not self._exact.get(sub.pattern, True):
            del self._exact[sub.pattern]

    def deliver(self, message: Message) -> int:
        """Hand `message` to whoever listens; returns how many did, streams included."""
        groups: dict[str, list[_Sub]] = {}
        count = 0
        wild = [s for s in self._wild if names.matches(message.subject, s.pattern)]
        for sub in [*self._exact.get(message.subject, ()), *wild]:
            if not sub.bus.connected:
                continue
            if sub.queue:
                groups.setdefault(sub.queue, []).append(sub)
            else:
                sub.push(message)
                count += 1
        for members in groups.values():
            members[next(self._turn) % len(members)].push(message)
            count += 1
        for name, stream in self.streams.items():
            if any(names.matches(message.subject, f) for f in stream.filters):
                seq = stream.append(message)
                count += 1
                if message.reply:  # as JetStream does: the reason why its filter must not cover an RPC (trap 2)
                    ack = json.dumps({"stream": name, "seq": seq}).encode()
                    self.deliver(Message(message.reply, ack, {}, None))
        return count


class MemoryBus:
    """A connection to a `MemoryHub`. See `talaria_common.bus.interface.Bus`."""

    def __init__(self, hub: MemoryHub, name: str = "") -> None:
        self.hub = hub
        self.name = name
        self.faults = FaultReporter()
        self._connected = True
        self._closed = False
        self._subs: list[_Sub] = []
        self._watches: list[_Watch] = []
        self._callbacks: list[Callable[[bool], None]] = []
        self._outbox: list[Message] = []
        self._outbox_bytes = 0
        self._inboxes = itertools.count()

    @property
    def connected(self) -> bool:
        """Whether the hub can be reached now."""
        return self._connected and not self._closed

    @property
    def max_payload_bytes(self) -> int:
        """Largest message, headers included."""
        return self.hub.max_payload_bytes

    def set_connected(self, connected: bool) -> None:
        """The hub's side of a disconnect or reconnect."""
        if connected == self._connected or self._closed:
            return
        self._connected = connected
        if connected:
            outbox, self._outbox, self._outbox_bytes = self._outbox, [], 0
            for message in outbox:
                self.hub.deliver(message)
            for watch in self._watches:
                watch.catch_up()
        for callback in self._callbacks:
            asyncio.get_running_loop().call_soon(callback, connected)

    def require_connected(self) -> None:
        """Raise BusError unless connected."""
        if not self.connected:
            raise BusError("the message bus is closed" if self._closed else "not connected to the message bus")

    async def publish(self, subject: str, data: bytes, *, headers: Headers | None = None) -> None:
        """Send and forget."""
        self._send(Message(names.check_subject(subject), data, dict(headers or {}), None))

    def post(self, to: str | Message, data: bytes, *, within_s: float = 0.0) -> bool:
        """Publish or answer at once, whatever `within_s` would allow."""
        del within_s
        if isinstance(to, str):
            self._send(Message(names.check_subject(to), data, {}, None))
        elif to.reply is not None:
            self._send(Message(to.reply, data, {}, None))
        return True

    async def request(self, subject: str, data: bytes, *, timeout_s: float, headers: Headers | None = None) -> Message:
        """Send and wait for one answer."""
        answer: asyncio.Future[Message] = asyncio.get_running_loop().create_future()

        def on_answer(message: Message) -> None:
            if not answer.done():
                answer.set_result(message)

        inbox = f"_INBOX.{id(self):x}.{next(self._inboxes)}"
        sub = _Sub(self, inbox, "", on_answer)
        self.hub.add(sub)
        try:
            if self._send(Message(names.check_subject(subject), data, dict(headers or {}), inbox)) == 0:
                await asyncio.sleep(0)
                raise NoRespondersError(f"nobody listens on {subject}")
            return await asyncio.wait_for(answer, timeout_s)
        except TimeoutError as e:
            raise BusTimeoutError(f"{subject}: no answer within {timeout_s} s") from e
        finally:
            await sub.stop()

    async def respond(self, to: Message, data: bytes) -> None:
        """Answer a request; nothing happens if nobody waits."""
        if to.reply is not None:
            self._send(Message(to.reply, data, {}, None))

    async def subscribe(self, subject: str, handler: Handler, *, queue: str = "") -> _Sub:
        """Call `handler` for every message on `subject`."""
        if self._closed:
            raise BusError("the message bus is closed")
        sub = _Sub(self, names.check_filter(subject), names.check_queue(queue), handler)
        self._subs.append(sub)
        self.hub.add(sub)
        return sub

    async def kv(self, bucket: str, *, ttl_s: float | None = None) -> KvBucket:  # noqa: ARG002 - see below
        """Open `bucket`, made if missing. Nothing is collected here: `ttl_s` is accepted for the interface."""
        self.require_connected()
        shared = self.hub.buckets.setdefault(names.check_bucket(bucket), MemoryKv())
        return _BucketHandle(self, shared)

    async def ensure_stream(self, name: str, subjects: list[str], *, max_age_s: float, max_bytes: int) -> None:
        """Create or update a bounded stream; read it as `hub.streams[name].messages`."""
        self.require_connected()
        filters = [names.check_filter(s) for s in subjects]
        stream = self.hub.streams.setdefault(names.check_bucket(name), _Stream(filters, max_age_s, max_bytes))
        stream.filters, stream.max_age_s, stream.max_bytes = filters, max_age_s, max_bytes

    async def read_stream(self, name: str, subject: str, *, since_s: float | None = None) -> AsyncIterator[Message]:
        """What stream `name` holds now on `subject`, oldest first."""
        pattern = names.check_filter(subject)
        self.require_connected()
        stream = self.hub.streams.get(names.check_bucket(name))
        if stream is None:
            raise BusError(f"stream {name}: there is none")
        oldest = float("-inf") if since_s is None else time.monotonic() - since_s
        for at, message in list(stream.messages):
            if at >= oldest and names.matches(message.subject, pattern):
                yield message._replace(reply=None)

    def on_connection(self, callback: Callable[[bool], None]) -> None:
        """Call back with False when the connection is lost and True when it is there again."""
        self._callbacks.append(callback)

    def on_error(self, callback: Callable[[Exception], None]) -> None:
        """Call back with asynchronous errors."""
        self.faults.add(callback)

    async def flush(self, timeout_s: float = 5.0) -> None:
        """Return when everything published before has reached the hub. Raises BusTimeoutError while disconnected."""
        if self._closed:
            raise BusError("the message bus is closed")
        if not self._connected:
            raise BusTimeoutError(f"not connected to the message bus; gave up the flush of {timeout_s} s")
        await asyncio.sleep(0)

    async def close(self) -> None:
        """Drain what is queued, then disconnect."""
        if self._closed:
            return
        for sub in list(self._subs):
            await sub.drain()
        await asyncio.sleep(0)  # tasks that the last handlers started may send their answers
        self._closed = True
        for watch in list(self._watches):
            await watch.stop()
        self.faults.close()

    def add_watch(self, watch: _Watch) -> None:
        """Keep `watch` with this connection."""
        self._watches.append(watch)

    def remove_watch(self, watch: _Watch) -> None:
        """Forget `watch`."""
        if watch in self._watches:
            self._watches.remove(watch)

    def _send(self, message: Message) -> int:
        """Deliver now, or later if disconnected; the number of listeners, 1 where unknown."""
        if self._closed:
            raise BusError("the message bus is closed")
        size = names.check_size(message.data, message.headers, self.max_payload_bytes)
        if self._connected:
            return self.hub.deliver(message)
        if self._outbox_bytes + size > MAX_BUFFERED_BYTES:
            raise BusError("not connected to the message bus, and the send buffer is full")
        self._outbox.append(message)
        self._outbox_bytes += size
        return 1


class MemoryKv:
    """A bucket's contents, shared by all connections."""

    def __init__(self) -> None:
        self.entries: dict[str, KvEntry] = {}
        self.revision = 0
        self.watches: list[_Watch] = []

    def write(self, key: str, value: bytes) -> int:
        """Set `key`; returns the revision, which only rises across keys."""
        self.revision += 1
        entry = self.entries[key] = KvEntry(key, value, self.revision)
        self._tell(key, entry)
        return self.revision

    def remove(self, key: str) -> None:
        """Remove `key`, if it is there."""
        self.revision += 1
        if self.entries.pop(key, None) is not None:
            self._tell(key, None)

    def _tell(self, key: str, entry: KvEntry | None) -> None:
        for watch in self.watches:
            watch.push(key, entry)


class _Watch:
    def __init__(self, bus: MemoryBus, kv: MemoryKv) -> None:
        self._bus = bus
        self._kv = kv
        self._latest = LatestPerKey()
        kv.watches.append(self)
        bus.add_watch(self)
        self.catch_up()

    def push(self, key: str, entry: KvEntry | None) -> None:
        if self._bus.connected:
            self._latest.put(key, entry)

    def catch_up(self) -> None:
        """After a reconnect: what changed and what went meanwhile."""
        for key in self._latest.known - self._kv.entries.keys():
            self._latest.put(key, None)
        for key, entry in self._kv.entries.items():
            self._latest.put(key, entry)

    def __aiter__(self) -> AsyncIterator[tuple[str, KvEntry | None]]:
        return self._latest.__aiter__()

    async def stop(self) -> None:
        """End it; the iteration stops."""
        self._latest.stop()
        self._bus.remove_watch(self)
        if self in self._kv.watches:
            self._kv.watches.remove(self)


class _BucketHandle:
    """A bucket seen through one connection."""

    def __init__(self, bus: MemoryBus, kv: MemoryKv) -> None:
        self._bus = bus
        self._kv = kv

    def _check(self, key: str, value: bytes | None = None) -> None:
        names.check_key(key)
        if value is not None:
            names.check_size(names.check_value(value), None, self._bus.max_payload_bytes)
        self._bus.require_connected()

    async def get(self, key: str) -> KvEntry | None:
        """The entry, or None."""
        self._check(key)
        return self._kv.entries.get(key)

    async def put(self, key: str, value: bytes) -> int:
        """Write whatever is there."""
        self._check(key, value)
        return self._kv.write(key, value)

    async def create(self, key: str, value: bytes) -> int:
        """Write only if there is no live entry."""
        self._check(key, value)
        if key in self._kv.entries:
            raise RevisionError(f"{key}: exists at revision {self._kv.entries[key].revision}")
        return self._kv.write(key, value)

    async def update(self, key: str, value: bytes, last: int) -> int:
        """Write only over revision `last`."""
        self._check(key, value)
        entry = self._kv.entries.get(key)
        if entry is None or entry.revision != last:
            raise RevisionError(f"{key}: revision is {entry.revision if entry else 'none'}, not {last}")
        return self._kv.write(key, value)

    async def delete(self, key: str) -> None:
        """Remove the entry; no error if there is none."""
        self._check(key)
        self._kv.remove(key)

    async def keys(self) -> list[str]:
        """The live keys."""
        self._bus.require_connected()
        return list(self._kv.entries)

    async def watch(self) -> KvWatch:
        """Watch all keys."""
        self._bus.require_connected()
        return _Watch(self._bus, self._kv)
