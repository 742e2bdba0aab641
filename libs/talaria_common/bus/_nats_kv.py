"""Key-value buckets on JetStream (NATS traps 4 and 5)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, cast

import msgspec
import nats.errors
import nats.js.errors as js_errors
import stamina
import structlog
from nats.js import api
from nats.js.kv import KV_DEL, KV_MARKER_REASON, KV_OP, KV_PURGE, KeyValue

from talaria_common.bus import names
from talaria_common.bus._nats_errors import NAME_IN_USE, WRONG_LAST_SEQUENCE, not_ready, translated
from talaria_common.bus.interface import KvEntry, Message
from talaria_common.bus.latest import LatestPerKey
from talaria_common.errors import BusError, RevisionError

log = structlog.get_logger(__name__)

READY_WITHIN_S = 3.0
"""A bucket of a server that has just restarted answers within this, or the call fails."""
WRITE_TIMEOUT_S = 5.0
_DUPLICATE_WINDOW_S = 120.0
_LISTING_IDLE_S = 5.0
"""The server forgets a listing's consumer this long after we have gone."""


async def open_bucket(js: Any, bucket: str, ttl_s: float | None) -> bool:
    """Make `bucket` unless it is there; a given `ttl_s` is enforced on an existing one too.

    Returns:
        Whether it allows direct reads: ours do, one made by somebody else need not.
    """
    stream = f"KV_{bucket}"
    try:
        info = await js.stream_info(stream)
    except js_errors.NotFoundError:
        try:
            await js.create_key_value(bucket=bucket, history=1, ttl=ttl_s, direct=True)
        except js_errors.BadRequestError as e:
            if e.err_code != NAME_IN_USE:  # else somebody else made it between our two calls
                raise
        return True
    if ttl_s is not None and info.config.max_age != ttl_s:
        window = min(_DUPLICATE_WINDOW_S, ttl_s)
        await js.update_stream(info.config.evolve(max_age=ttl_s, duplicate_window=window))
    return bool(info.config.allow_direct)


async def _mend_start(watcher: Any) -> None:
    """Put the marker that ends a bucket's present state behind that state.

    nats-py says at once that a bucket is empty if nothing is pending and nothing has come yet; but the server's word of
    that may overtake entries that it has sent before, and a bucket with entries then seems empty (`keys` returns none).
    """
    updates = watcher._updates  # noqa: SLF001 - nats-py has no other way in
    if not watcher._init_done or watcher._sub.delivered:  # noqa: SLF001
        return
    info = await watcher._sub.consumer_info()  # noqa: SLF001
    if not info.delivered.consumer_seq:
        return  # nothing was sent: it is empty
    items = [updates.get_nowait() for _ in range(updates.qsize())]
    entries = [item for item in items if item is not None]
    watcher._init_done = bool(entries) and entries[-1].delta == 0  # noqa: SLF001 - else its last entry brings a marker
    for item in [*entries, None] if watcher._init_done else entries:  # noqa: SLF001
        updates.put_nowait(item)


class NatsKv:
    """One bucket. See `talaria_common.bus.interface.KvBucket`.

    Args:
        bucket: its name.
        direct: read with direct gets.
        jetstream: gives the current JetStream context; raises BusError while disconnected.
        ask: the connection's plain request: (subject, data, time-out in seconds, headers) to the answer.
        max_payload: gives the server's limit in bytes.
        register: called with a new watch, so that the bus can restart it after a reconnect.
    """

    def __init__(
        self,
        bucket: str,
        *,
        direct: bool,
        jetstream: Callable[[], Any],
        ask: Callable[[str, bytes, float, dict[str, str]], Awaitable[Message]],
        max_payload: Callable[[], int],
        register: Callable[[NatsWatch], None],
    ) -> None:
        self._bucket = bucket
        self._stream = f"KV_{bucket}"
        self._prefix = f"$KV.{bucket}."
        self._direct = direct
        self._js = jetstream
        self._ask = ask
        self._max_payload = max_payload
        self._register = register

    async def get(self, key: str) -> KvEntry | None:
        """The entry, or None."""
        names.check_key(key)
        raw = await self._raw(key)
        return None if raw is None or _is_marker(raw) else KvEntry(key, raw.data, raw.seq)

    async def put(self, key: str, value: bytes) -> int:
        """Write whatever is there."""
        return await self._write(key, names.check_value(value), {})

    async def create(self, key: str, value: bytes) -> int:
        """Write only if there is no live entry: over nothing, or over exactly the marker that is there."""
        try:
            return await self.update(key, value, 0)
        except RevisionError:
            raw = await self._raw(key)
            if raw is not None and not _is_marker(raw):
                raise
        return await self.update(key, value, raw.seq if raw is not None else 0)

    async def update(self, key: str, value: bytes, last: int) -> int:
        """Write only over revision `last`."""
        return await self._write(
            key, names.check_value(value), {api.Header.EXPECTED_LAST_SUBJECT_SEQUENCE.value: str(last)}
        )

    async def delete(self, key: str) -> None:
        """Leave a deletion marker; no error if there is no entry."""
        await self._write(key, b"", {KV_OP: KV_DEL})

    async def keys(self) -> list[str]:
        """The live keys: one consumer over the headers of the bucket's last messages, no values."""
        with translated(f"keys of {self._bucket}"):
            found = []
            watcher = await self._watcher(meta_only=True)
            try:
                async for entry in watcher:
                    if entry is None:
                        break
                    if entry.operation is None:
                        found.append(entry.key)
            finally:
                with contextlib.suppress(nats.errors.Error):
                    await watcher.stop()
            return found

    async def watch(self) -> NatsWatch:
        """Watch all keys."""
        with translated(f"watch of {self._bucket}"):
            watch = NatsWatch(self._bucket, self._watcher)
            await watch.start()
        self._register(watch)
        return watch

    async def _watcher(self, *, meta_only: bool = False) -> Any:
        js = self._js()
        kv = KeyValue(name=self._bucket, stream=self._stream, pre=self._prefix, js=js, direct=self._direct)
        async for attempt in _until_ready():
            with attempt:
                watcher = await kv.watchall(meta_only=meta_only, inactive_threshold=_LISTING_IDLE_S)
                await _mend_start(watcher)
                return watcher
        raise AssertionError("unreachable: stamina returns or raises")

    async def _raw(self, key: str) -> Any:
        with translated(f"get {key}"):
            try:
                async for attempt in _until_ready():
                    with attempt:
                        return await self._js().get_last_msg(self._stream, self._prefix + key, direct=self._direct)
            except js_errors.NotFoundError:
                return None
        raise AssertionError("unreachable: stamina returns or raises")

    async def _write(self, key: str, value: bytes, headers: dict[str, str]) -> int:
        names.check_key(key)
        names.check_size(value, headers, self._max_payload())
        with translated(f"write {key}"):
            written = await self._written(key, value, headers)
            if written is not None:
                return written
            try:
                async for attempt in _until_ready():
                    with attempt:
                        ack = await self._js().publish(self._prefix + key, value, headers=headers or None)
                        return cast("int", ack.seq)
            except js_errors.APIError as e:
                if e.err_code in WRONG_LAST_SEQUENCE:
                    raise RevisionError(f"{key}: {e.description}") from e
                raise
        raise AssertionError("unreachable: stamina returns or raises")

    async def _written(self, key: str, value: bytes, headers: dict[str, str]) -> int | None:
        """The new revision, without nats-py's and stamina's share of the cost; None: not written, to be tried anew.

        Raises:
            RevisionError: the key has another revision than `headers` say.
        """
        self._js()  # refuses while disconnected
        try:
            answer = await self._ask(self._prefix + key, value, WRITE_TIMEOUT_S, headers)
        except nats.errors.NoRespondersError:
            return None
        ack = _ack.decode(answer.data)
        if ack.error is not None and ack.error.err_code in WRONG_LAST_SEQUENCE:
            raise RevisionError(f"{key}: {ack.error.description}")
        return ack.seq if ack.error is None and ack.seq else None


class _Refused(msgspec.Struct, frozen=True):
    err_code: int = 0
    description: str = ""


class _Ack(msgspec.Struct, frozen=True):
    """JetStream's answer to a publish."""

    seq: int = 0
    error: _Refused | None = None


_ack = msgspec.json.Decoder(_Ack)


class NatsWatch:
    """A watch that outlives reconnects: it lists again and reports what changed and what went meanwhile."""

    def __init__(self, bucket: str, watcher: Callable[[], Any]) -> None:
        self._bucket = bucket
        self._watcher = watcher
        self._latest = LatestPerKey()
        self._task: asyncio.Task[None] | None = None
        self._stopped = False

    async def start(self) -> None:
        """Begin; raises what nats-py raises if the bucket cannot be read."""
        self._task = asyncio.create_task(self._follow(await self._watcher()), name=f"kv-watch-{self._bucket}")

    def restart(self) -> None:
        """The connection is there again: what the old consumer missed is lost, so list anew."""
        if self._stopped:
            return
        if self._task is not None:
            self._task.cancel()
        self._task = asyncio.create_task(self._again(), name=f"kv-watch-{self._bucket}")

    def __aiter__(self) -> AsyncIterator[tuple[str, KvEntry | None]]:
        return self._latest.__aiter__()

    async def stop(self) -> None:
        """End it; the iteration stops."""
        self._stopped = True
        self._latest.stop()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _again(self) -> None:
        while True:
            try:
                watcher = await self._watcher()
            except (nats.errors.Error, OSError, BusError) as e:
                log.warning("cannot watch yet", bucket=self._bucket, error=str(e))
                await asyncio.sleep(0.5)
            else:
                await self._follow(watcher)
                return

    async def _follow(self, watcher: Any) -> None:
        listed: set[str] | None = set()
        try:
            async for it in watcher:
                if it is None:  # the listing is complete
                    for key in self._latest.known - (listed or set()):
                        self._latest.put(key, None)
                    listed = None
                elif it.operation is not None or not it.value:
                    self._latest.put(it.key, None)
                else:
                    if listed is not None:
                        listed.add(it.key)
                    self._latest.put(it.key, KvEntry(it.key, it.value, it.revision))
        finally:
            # A closed or draining connection has dropped the subscription already.
            with contextlib.suppress(nats.errors.Error):
                await watcher.stop()


def _until_ready() -> Any:
    return stamina.retry_context(on=not_ready, attempts=None, timeout=READY_WITHIN_S, wait_initial=0.05, wait_max=0.5)


def _is_marker(raw: Any) -> bool:
    """Deleted, purged or expired: the server's own markers carry another header and look like empty entries."""
    headers = raw.headers or {}
    return headers.get(KV_OP) in (KV_DEL, KV_PURGE) or KV_MARKER_REASON in headers or not raw.data
