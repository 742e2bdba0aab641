"""The session table with its leases (4.1): one entry per (tenant, session, model), bounded, forgotten when idle.

A lease (s, m, i, k, t_exp) lives inside its entry: s and m are the entry's, i and k its `iid` and `prefix_handle` (with
the epochs that say whether k still means anything), t_exp is `lease_until`. So a lease cannot outlive its session, and
a session has one at most. `lease_until == 0`: none.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from talaria_common.clock import from_ms, to_ms
from talaria_common.ids import PARTITIONS, hash_id
from talaria_common.wire import SessionRecord


@lru_cache(8192)
def key_of(tenant: str, session: str, model: str) -> tuple[str, int]:
    """(key, partition) of a session on a model. The partition is `ids.partition_of`, without hashing twice."""
    key = hash_id(tenant, session, model)
    return key, int(key[:8], 16) % PARTITIONS


@dataclass(slots=True)
class Entry:
    """What the router knows of one session on one model. Times in seconds."""

    tenant: str
    session: str
    model: str
    last_use: float
    iid: str = ""
    """Instance of the last completed call, "" before the first."""
    iid_epoch: str = ""
    home: str = ""
    """First instance, for the session-sticky policy."""
    kv_tokens: int = 0
    prefix_handle: str = ""
    kv_epoch: int = 0
    calls: int = 0
    lease_until: float = 0.0
    away_since: float = 0.0
    """When its last call ended, until it comes back; 0: it is here, or that is not known."""
    owner_rev: int = 0
    """Revision of the partition claim under which this was learnt."""
    parent: str = ""
    """Session whose sub-agent it is; "": none, or nobody has said so since it was restored."""
    prefix_id: str = ""
    """How its last prompt began, where sessions share that."""

    def record(self) -> SessionRecord:
        """The entry as it is written behind."""
        return SessionRecord(
            tenant=self.tenant,
            session=self.session,
            model=self.model,
            iid=self.iid,
            iid_epoch=self.iid_epoch,
            home=self.home,
            kv_tokens=self.kv_tokens,
            prefix_handle=self.prefix_handle,
            kv_epoch=self.kv_epoch,
            calls=self.calls,
            last_use_ms=to_ms(self.last_use),
            lease_until_ms=to_ms(self.lease_until),
        )

    @staticmethod
    def restored(record: SessionRecord) -> Entry:
        """The entry that `record` was written from."""
        return Entry(
            tenant=record.tenant,
            session=record.session,
            model=record.model,
            last_use=from_ms(record.last_use_ms),
            iid=record.iid,
            iid_epoch=record.iid_epoch,
            home=record.home,
            kv_tokens=record.kv_tokens,
            prefix_handle=record.prefix_handle,
            kv_epoch=record.kv_epoch,
            calls=record.calls,
            lease_until=from_ms(record.lease_until_ms),
        )


class SessionTable:
    """Entries by key, least recently used first, and the expiry order of their leases.

    All operations are O(1) in the number of sessions, but for the lease heap's O(log live leases).
    """

    def __init__(self, idle_s: float, limit: int) -> None:
        self._entries: OrderedDict[str, Entry] = OrderedDict()
        self._idle_s = idle_s
        self._limit = limit
        self._expiry: list[tuple[float, str]] = []
        self._children: dict[tuple[str, str], set[str]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: str) -> bool:
        return key in self._entries

    def items(self) -> Iterator[tuple[str, Entry]]:
        """All entries, longest unused first."""
        return iter(self._entries.items())

    def get(self, key: str) -> Entry | None:
        """The entry, without counting as a use."""
        return self._entries.get(key)

    def put(self, key: str, entry: Entry) -> None:
        """Add an entry as the most recently used one; `overflow` then tells which must go."""
        self._entries[key] = entry
        self._entries.move_to_end(key)

    def touch(self, key: str, entry: Entry, now: float) -> None:
        """The session was used."""
        entry.last_use = now
        self._entries.move_to_end(key)

    def remove(self, key: str) -> Entry | None:
        """Forget a session; its lease is the caller's to settle."""
        entry = self._entries.pop(key, None)
        if entry is not None and entry.parent:
            self._disown(key, entry)
        return entry

    def adopt(self, key: str, entry: Entry, parent: str) -> None:
        """The entry, which is in the table, is a sub-agent of the same tenant's session `parent`."""
        if entry.parent:
            self._disown(key, entry)
        entry.parent = parent
        self._children.setdefault((entry.tenant, parent), set()).add(key)

    def children(self, tenant: str, parent: str) -> list[tuple[str, Entry]]:
        """The sub-agents of a session, on whatever model."""
        return [(key, self._entries[key]) for key in sorted(self._children.get((tenant, parent), ()))]

    def _disown(self, key: str, entry: Entry) -> None:
        siblings = self._children[entry.tenant, entry.parent]
        siblings.discard(key)
        if not siblings:
            del self._children[entry.tenant, entry.parent]

    def overdue(self, now: float) -> str | None:
        """The key that must be forgotten next: idle for too long, or one too many. None: all is well."""
        if not self._entries:
            return None
        key, entry = next(iter(self._entries.items()))
        idle = now - entry.last_use > self._idle_s
        return key if idle or len(self._entries) > self._limit else None

    def lease(self, key: str, entry: Entry, until: float) -> None:
        """Give the entry a lease until `until`."""
        entry.lease_until = until
        heapq.heappush(self._expiry, (until, key))

    def expired(self, now: float) -> Iterator[tuple[str, Entry]]:
        """Entries whose lease ended by `now` unused, each once; the caller clears `lease_until`."""
        while self._expiry and self._expiry[0][0] <= now:
            until, key = heapq.heappop(self._expiry)
            entry = self._entries.get(key)
            if entry is not None and entry.lease_until == until:
                yield key, entry
