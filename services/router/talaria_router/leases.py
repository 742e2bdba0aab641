"""What becomes of leases, and the books about it (3.3, 4.1, 5.4)."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from talaria_router.cluster import Cluster
from talaria_router.cost import handle_valid, unready
from talaria_router.overlay import Overlay
from talaria_router.sessions import Entry, SessionTable


@dataclass(slots=True)
class LeaseBooks:
    """installed = honoured + expired + sum(discarded) + live, always."""

    installed: int = 0
    honoured: int = 0
    expired: int = 0
    discarded: Counter[str] = field(default_factory=Counter)
    wasted: int = 0
    """Held an admission unit for nothing: expired, discarded, or honoured by a call that then found no prefix."""

    @property
    def live(self) -> int:
        """Leases that hold an admission unit now."""
        return self.installed - self.honoured - self.expired - sum(self.discarded.values())


class Leases:
    """Installs and ends leases: entry, overlay charge and books change together or not at all."""

    def __init__(self, table: SessionTable, overlay: Overlay) -> None:
        self._table = table
        self._overlay = overlay
        self.books = LeaseBooks()

    def install(self, key: str, entry: Entry, until: float) -> None:
        """Give the entry, which has none, a lease on its instance."""
        assert entry.lease_until == 0.0
        self._table.lease(key, entry, until)
        self._overlay.reserve(entry.iid, entry.model, +1)
        self.books.installed += 1

    def consume(self, entry: Entry) -> None:
        """The return that it was for has come and goes there."""
        self._end(entry)
        self.books.honoured += 1

    def expire(self, entry: Entry) -> None:
        """Its time is up."""
        self._end(entry)
        self.books.expired += 1
        self.books.wasted += 1

    def discard(self, entry: Entry, reason: str) -> None:
        """It cannot or must not be used any more."""
        self._end(entry)
        self.books.discarded[reason] += 1
        self.books.wasted += 1

    def missed(self) -> None:
        """A call that consumed a lease found no cached prefix."""
        self.books.wasted += 1

    def _end(self, entry: Entry) -> None:
        assert entry.lease_until > 0.0
        entry.lease_until = 0.0
        self._overlay.reserve(entry.iid, entry.model, -1)


def obstacle(cluster: Cluster, entry: Entry, now: float, exclude: tuple[str, ...]) -> str:
    """Why the entry's lease cannot be honoured; "" if it can; "stale" if only a health probe can tell."""
    if entry.iid in exclude:
        return "excluded"
    instance = cluster.get(entry.iid)
    if instance is None or cluster.health(entry.iid, now) == "gone":
        return "gone"
    reason = unready(instance, instance.models.get(entry.model))
    if reason:
        return reason
    if not handle_valid(entry, instance, instance.models[entry.model]):
        return "prefix"
    return "stale" if cluster.health(entry.iid, now) == "stale" else ""
