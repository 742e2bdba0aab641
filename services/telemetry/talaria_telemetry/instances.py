"""What telemetry holds of one instance, and how a snapshot changes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from talaria_common.freshness import HEALTHS, Health, health_of, supersedes
from talaria_common.wire import InstanceView, ModelState, Snapshot


class Expected(NamedTuple):
    """An instance that should be there: from the configuration, or because it announced itself."""

    iid: str
    pool: Literal["hot", "cold"]
    models: tuple[str, ...]


@dataclass(slots=True)
class Instance:
    """One instance. Times in seconds, by our clock."""

    snapshot: Snapshot
    received_at: float
    """When the newest snapshot came; for one that was never heard: since when we wait."""
    heard: bool = True
    health: Health = "ok"
    """As last published."""
    gaps: int = 0
    restarts: int = 0
    late: int = 0
    """Snapshots dropped: duplicates, reordered, or of an earlier life."""
    clock_offset_ms: float = 0.0
    """The instance's clock less ours at the last snapshot, transit included."""
    changed: bool = True
    """Not yet in a view."""

    def age_s(self, now: float) -> float:
        """Time since its newest snapshot came."""
        return max(0.0, now - self.received_at)

    def judge(self, now: float, heartbeat_s: float, missed: int, heard_from: float) -> Health:
        """Health by age. One that was never heard is not fit for anything yet: gone.

        `heard_from`: since when anybody can be heard; silence before that counts against nobody, and for nobody.
        """
        if not self.heard:
            return "gone"
        silent_s = max(0.0, now - max(self.received_at, heard_from))
        judged = health_of(silent_s, heartbeat_s, missed)
        return judged if self.received_at >= heard_from else max(judged, self.health, key=HEALTHS.index)

    def view(self, now: float) -> InstanceView:
        """As it is published."""
        return InstanceView(
            snapshot=self.snapshot,
            age_ms=round(self.age_s(now) * 1000),
            health=self.health,
            gaps=self.gaps,
            restarts=self.restarts,
        )

    def take(self, now: float, snapshot: Snapshot, stale_after_s: float) -> Literal["late", "new", "restart"]:
        """Take in a snapshot; "late": it is older than what we have."""
        stale = not self.heard or self.age_s(now) > stale_after_s
        if not supersedes(snapshot, self.snapshot, old_is_stale=stale):
            self.late += 1
            return "late"
        restart = self.heard and snapshot.epoch != self.snapshot.epoch
        if restart:
            self.restarts += 1
            self.gaps = 0
        elif self.heard:
            self.gaps += snapshot.version - self.snapshot.version - 1
        self.snapshot, self.received_at, self.heard, self.changed = snapshot, now, True, True
        self.clock_offset_ms = snapshot.at_ms - now * 1000
        return "restart" if restart else "new"


def awaited(expected: Expected, now: float) -> Instance:
    """An instance of which nothing was heard yet: its models are known, nothing of it can be used.

    `at_ms` 0 and an empty epoch: any real snapshot supersedes it.
    """
    models = tuple(ModelState(name=m, state="cold") for m in expected.models)
    snapshot = Snapshot(
        iid=expected.iid,
        epoch="",
        version=0,
        at_ms=0,
        pool=expected.pool,
        status="starting",
        reason="no snapshot has come yet",
        models=models,
    )
    return Instance(snapshot, now, heard=False, health="gone")
