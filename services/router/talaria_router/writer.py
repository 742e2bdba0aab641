"""Sessions written behind: the newest record of each changed key, coalesced, a bounded number of writes at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from talaria_common.bus import KvBucket
from talaria_common.errors import BusError
from talaria_common.ids import PARTITIONS
from talaria_common.wire import SessionRecord, encode

log = structlog.get_logger(__name__)

INTERVAL_S = 0.1
SAME_KEY_ROUNDS = 10
"""A key is written once in so many intervals at most: calls in quick succession cost one write a second."""
AT_ONCE = 32


class SessionWriter:
    """Writes what `record` says of the keys marked dirty. A key that changes again before its turn is written once.

    Args:
        record: the key's record now; None: delete it.
        ours: whether the key's partition is ours; another owner's record is never overwritten.
    """

    def __init__(self, record: Callable[[str], SessionRecord | None], ours: Callable[[str], bool]) -> None:
        self.bucket: KvBucket
        """Where to; may be opened anew."""
        self._record = record
        self._ours = ours
        self._dirty: dict[str, None] = {}
        self._recent: set[str] = set()
        self.failures = 0

    def mark(self, key: str) -> None:
        """The key's record changed."""
        self._dirty[key] = None

    def __len__(self) -> int:
        return len(self._dirty)

    async def run(self, bucket: KvBucket) -> None:
        """Write to `talaria_sessions` until cancelled."""
        self.bucket = bucket
        while True:
            self._recent.clear()
            for _ in range(SAME_KEY_ROUNDS):
                await asyncio.sleep(INTERVAL_S)
                keys = [key for key in self._dirty if key not in self._recent]
                self._recent.update(keys)
                await self._write_out(keys)

    async def flush(self) -> None:
        """Write what is dirty now."""
        await self._write_out(list(self._dirty))

    async def _write_out(self, keys: list[str]) -> None:
        """What fails is tried again in a later round."""
        for start in range(0, len(keys), AT_ONCE):
            batch = keys[start : start + AT_ONCE]
            for key in batch:
                self._dirty.pop(key, None)
            failed = await self._write([key for key in batch if self._ours(key)])
            for key in failed:
                self._dirty.setdefault(key)
                self._recent.discard(key)
            if failed:
                self.failures += len(failed)
                self._recent.difference_update(keys[start + AT_ONCE :])
                return

    async def hand_over(self, partition: int) -> None:
        """Write what is dirty in one partition, which was ours until now. What fails is lost to the next owner.

        The records are those of this moment, whatever is learnt while they are being written.
        """
        keys = [key for key in self._dirty if int(key[:8], 16) % PARTITIONS == partition]
        for key in keys:
            del self._dirty[key]
        await self._write(keys)

    async def _write(self, keys: list[str]) -> list[str]:
        """Write the records as they are now; returns the keys that failed."""
        done = await asyncio.gather(*[self._put(key, self._record(key)) for key in keys])
        return [key for key, ok in zip(keys, done, strict=True) if not ok]

    async def _put(self, key: str, record: SessionRecord | None) -> bool:
        try:
            if record is None:
                await self.bucket.delete(key)
            else:
                await self.bucket.put(key, encode(record))
        except BusError as e:
            log.debug("session not written", key=key, error=e.message)
            return False
        return True
