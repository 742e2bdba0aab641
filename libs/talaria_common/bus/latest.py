"""The state of a running KV watch, shared by both buses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from talaria_common.bus.interface import KvEntry


class LatestPerKey:
    """Changes on their way to a watch's reader: the latest of each key, in order of first change.

    Bounded by the number of keys however slow the reader is; a reader sees every key's last state, not every state.
    """

    def __init__(self) -> None:
        self._pending: dict[str, KvEntry | None] = {}
        self._seen: dict[str, KvEntry] = {}
        self._wake = asyncio.Event()
        self._stopped = False

    @property
    def known(self) -> set[str]:
        """Keys that are live as far as this watch has been told."""
        return set(self._seen)

    def put(self, key: str, entry: KvEntry | None) -> None:
        """`key` now has `entry`; None: deleted. What is not news (the same entry, an unknown key gone) is dropped.

        A lower revision is news: a server that lost its store counts from one again.
        """
        if entry is None:
            if self._seen.pop(key, None) is None:
                return
        elif entry == self._seen.get(key):
            return
        else:
            self._seen[key] = entry
        self._pending[key] = entry
        self._wake.set()

    def stop(self) -> None:
        """End the iteration."""
        self._stopped = True
        self._wake.set()

    async def __aiter__(self) -> AsyncIterator[tuple[str, KvEntry | None]]:
        while not self._stopped:
            if not self._pending:
                self._wake.clear()
                await self._wake.wait()
                continue
            key = next(iter(self._pending))
            yield key, self._pending.pop(key)
