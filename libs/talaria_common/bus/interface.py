"""What the mesh needs of a message bus, and no more (docs/adr/0002)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from typing import NamedTuple, Protocol

from talaria_common.errors import RevisionError

__all__ = [
    "Bus",
    "Handler",
    "Headers",
    "KvBucket",
    "KvEntry",
    "KvWatch",
    "Message",
    "RevisionError",
    "Subscription",
]

Headers = Mapping[str, str]


class Message(NamedTuple):
    """A message as its handler sees it. `reply` is None when nobody waits for an answer."""

    subject: str
    data: bytes
    headers: Headers
    reply: str | None


Handler = Callable[[Message], None]
"""Called in arrival order on the event loop and must return at once; what needs to wait starts a task.

A plain function on purpose: the client library runs one subscription's handler serially, so an awaiting handler would
hold up every later message of its subject (NATS trap 3).
"""


class KvEntry(NamedTuple):
    """A key's value and revision. The revision of a bucket only rises, across keys: it serves as a fencing token."""

    key: str
    value: bytes
    revision: int


class KvWatch(Protocol):
    """A running watch."""

    def __aiter__(self) -> AsyncIterator[tuple[str, KvEntry | None]]:
        """(key, entry), entry None for a deleted key; first the keys that exist, then changes."""
        ...

    async def stop(self) -> None:
        """End it; the iteration stops."""
        ...


class KvBucket(Protocol):
    """A key-value bucket. Keys: [-/_=.a-zA-Z0-9]; ids are hashed before they come here (NATS trap 5).

    All methods raise BusError at once while disconnected, BusNameError for an illegal key and ValueError for an empty
    value (NATS cannot tell it from a marker). A BusTimeoutError leaves open whether the write was done: read again.
    """

    async def get(self, key: str) -> KvEntry | None:
        """The entry, or None if there is none (deleted and expired markers count as none, NATS trap 4)."""
        ...

    async def put(self, key: str, value: bytes) -> int:
        """Write whatever is there; returns the revision."""
        ...

    async def create(self, key: str, value: bytes) -> int:
        """Write only if there is no live entry; returns the revision. Raises RevisionError."""
        ...

    async def update(self, key: str, value: bytes, last: int) -> int:
        """Write only over revision `last`; returns the new revision. Raises RevisionError."""
        ...

    async def delete(self, key: str) -> None:
        """Remove the entry; no error if there is none."""
        ...

    async def keys(self) -> list[str]:
        """The live keys."""
        ...

    async def watch(self) -> KvWatch:
        """Watch all keys. Changes of one key that the reader was too slow for collapse into the last one."""
        ...


class Subscription(Protocol):
    """A running subscription."""

    async def stop(self) -> None:
        """Unsubscribe now; messages already queued are dropped."""
        ...

    async def drain(self) -> None:
        """Unsubscribe, and return when every message that had arrived was handled."""
        ...


class Bus(Protocol):
    """A connection to the bus. All methods raise BusError (or a child) and nothing else of the client library.

    Delivery is at most once; messages of one publisher to one subscriber keep their order. Messages published while
    disconnected may arrive after the reconnect: commands carry deadlines and fences.
    """

    @property
    def connected(self) -> bool:
        """Whether the server can be reached now."""
        ...

    @property
    def max_payload_bytes(self) -> int:
        """Largest message, headers included, that the server takes."""
        ...

    async def publish(self, subject: str, data: bytes, *, headers: Headers | None = None) -> None:
        """Send and forget. Raises PayloadTooLargeError above the limit, BusError when closed."""
        ...

    def post(self, to: str | Message, data: bytes, *, within_s: float = 0.0) -> bool:
        """Publish on a subject, or answer a request, if that can be done at once; raises as `publish`.

        `within_s`: it need not leave at once, but with the next message that must, or after so long: what is in no
        hurry costs less in company. The order stays.
        False: nothing was sent; `publish` or `respond` will do it, perhaps after waiting for the socket.
        """
        ...

    async def request(self, subject: str, data: bytes, *, timeout_s: float, headers: Headers | None = None) -> Message:
        """Send and wait for one answer.

        Raises:
            BusTimeoutError: no answer within `timeout_s`.
            NoRespondersError: nobody listens (a hint only: a tap hides it).
            PayloadTooLargeError: above the limit.
        """
        ...

    async def respond(self, to: Message, data: bytes) -> None:
        """Answer a request; nothing happens if nobody waits."""
        ...

    async def subscribe(self, subject: str, handler: Handler, *, queue: str = "") -> Subscription:
        """Call `handler` for every message on `subject` (wildcards allowed); `queue` shares them within a group."""
        ...

    async def kv(self, bucket: str, *, ttl_s: float | None = None) -> KvBucket:
        """Open `bucket`, made if missing. `ttl_s` removes garbage only: real expiry stands in the values."""
        ...

    async def ensure_stream(self, name: str, subjects: list[str], *, max_age_s: float, max_bytes: int) -> None:
        """Create or update a bounded JetStream stream."""
        ...

    def read_stream(self, name: str, subject: str, *, since_s: float | None = None) -> AsyncIterator[Message]:
        """What stream `name` holds now on `subject` (wildcards allowed), oldest first; it ends where the stream ends.

        `since_s`: of the last so many seconds only. The iteration raises BusError when the stream is not there or the
        server cannot be reached.
        """
        ...

    def on_connection(self, callback: Callable[[bool], None]) -> None:
        """Call back with False when the connection is lost and True when it is there again."""
        ...

    def on_error(self, callback: Callable[[Exception], None]) -> None:
        """Call back with asynchronous errors (slow consumer, permission refused); aggregated, not one per message."""
        ...

    async def flush(self, timeout_s: float = 5.0) -> None:
        """Return when everything published before has reached the server."""
        ...

    async def close(self) -> None:
        """Drain what is queued, then disconnect."""
        ...
