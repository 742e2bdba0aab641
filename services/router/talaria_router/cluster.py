"""The router's picture of the instances: from telemetry's cluster view, or from the instances themselves.

Each `InstanceView` carries a whole snapshot, so what a delta brings is used even after a lost one; only the membership
(`removed`, and who is missing from a full view) waits for the next full view. Ages count on by the router's own clock.

While the bus itself cannot be heard, and until everybody has had time to speak after its return, nobody's silence
counts. When only the view falls silent it is telemetry that is late, not the instances: the router then listens to
their snapshots itself (`follow`), and the silence up to the moment when those can have arrived is not held against
anyone. So a dead telemetry costs no call, and an instance that dies in the same moment is found out a few heartbeats
later (ADR in docs/adr/0006).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from talaria_common.freshness import GATHER_HEARTBEATS, Health, health_of, supersedes
from talaria_common.wire import ClusterView, InstanceView, ModelState, Snapshot
from talaria_router.profiles import Profile

SILENT_HEARTBEATS = 1.5
"""The view counts as silent after this many heartbeats."""
LEARN_S = 5.0
"""What others taught of a model's costs reaches an instance that is idle at least this often."""


@dataclass(slots=True)
class Instance:
    """The newest snapshot of one instance and when it was true, by our clock."""

    snapshot: Snapshot
    seen_at: float
    reported: Health = "ok"
    """What telemetry thinks of it; our own clock may think worse."""
    models: dict[str, ModelState] = field(default_factory=dict)
    calls: int = 0
    """That the snapshot counts, all models."""
    profiles: dict[str, Profile] = field(default_factory=dict)
    """What its models cost there as far as anyone asked, since `learnt_at`."""
    learnt_at: float = 0.0


@dataclass(slots=True)
class _Source:
    """One telemetry."""

    epoch: str = ""
    version: int = -1
    synced: bool = False
    """It has told of everybody, and nothing of what it said since was lost."""
    heard_at: float = float("-inf")


class Cluster:
    """All instances, and how far the view can be trusted."""

    def __init__(self, heartbeat_s: float, missed: int) -> None:
        self._heartbeat_s = heartbeat_s
        self._missed = missed
        self.stale_after_s = heartbeat_s * missed
        """Age at which a snapshot is stale."""
        self._instances: dict[str, Instance] = {}
        self._serving: dict[str, list[str]] = {}
        self._sources: dict[str, _Source] = {}
        self._last_view = float("-inf")
        self._follow_since: float | None = None
        self._first_contact: float | None = None
        self._last_heard = float("-inf")
        self._deaf_since: float | None = None
        """When the last message came before the bus was lost."""
        self._hears_since: float | None = None
        self.version = 0
        """Version of the last cluster view."""
        self.gaps = 0
        """Views that never arrived."""
        self.changed: set[str] = set()
        """Instances that came, went, or say something new of their load: for whoever keeps figures of them."""
        self._active: dict[str, set[str]] = {}
        self._unindexed = False

    @property
    def following(self) -> bool:
        """Whether the router listens to the instances itself."""
        return self._follow_since is not None

    def get(self, iid: str) -> Instance | None:
        """The instance, if known."""
        return self._instances.get(iid)

    def instances(self) -> Iterable[tuple[str, Instance]]:
        """All known instances."""
        return self._instances.items()

    def serving(self, model: str) -> list[str]:
        """Ids of the instances in whose catalog `model` is, in a stable order; to be read only."""
        return self._serving.get(model, [])

    def informed(self, now: float) -> bool:
        """Whether "nobody serves it" can be said: after a start, the picture is not there at once."""
        since = self._first_contact
        if since is not None and now - since >= GATHER_HEARTBEATS * self._heartbeat_s:
            return True
        return any(s.synced for s in self._sources.values())

    def view(self, now: float, view: ClusterView) -> tuple[list[str], list[str]]:
        """Take in a view; returns (ids whose snapshot is new, ids that are gone)."""
        source = self._sources.setdefault(view.telemetry, _Source())
        if view.epoch == source.epoch and view.version <= source.version:
            return [], []
        follows = view.epoch == source.epoch and view.version == source.version + 1
        if view.epoch == source.epoch and not follows:
            self.gaps += view.version - source.version - 1
        source.epoch, source.version, source.heard_at = view.epoch, view.version, now
        self.version = view.version
        self._last_view = self._last_heard = now
        taken = [v.snapshot.iid for v in view.instances if self._take(now - v.age_ms / 1000, v.snapshot, v, now)]
        removed = list(view.removed)
        here = set(view.members) or {v.snapshot.iid for v in view.instances}
        source.synced = here <= self._instances.keys() if view.full else source.synced and follows
        if view.full:
            late = self._heartbeat_s * self._missed
            removed += [i for i, known in self._instances.items() if i not in here and now - known.seen_at > late]
        gone = [iid for iid in removed if self._remove(iid)]
        self._index()
        return [iid for iid in taken if iid in self._instances], gone

    def heard(self, now: float, snapshot: Snapshot) -> bool:
        """Take in a snapshot that came straight from its instance; False if it is old."""
        self._last_heard = now
        took = self._take(now, snapshot, None, now)
        self._index()
        return took

    def connection(self, now: float, connected: bool) -> None:
        """The bus was lost, or is there again."""
        if not connected and self._deaf_since is None:
            self._deaf_since = self._last_heard
        self._hears_since = now if connected else None

    def watch(self, now: float) -> bool | None:
        """Whether following is to be switched on (True) or off (False) now; None: leave it."""
        silent = now - self._last_view > SILENT_HEARTBEATS * self._heartbeat_s
        if silent and self._follow_since is None:
            self._follow_since = now
            return True
        if not silent and self._follow_since is not None and self._synced(now):
            self._follow_since = None
            return False
        return None

    def _synced(self, now: float) -> bool:
        """Whether the telemetries that speak now, one at least, can be relied on for who is there."""
        speak = [s.synced for s in self._sources.values() if now - s.heard_at <= self.stale_after_s]
        return bool(speak) and all(speak)

    def health(self, iid: str, now: float) -> Health:
        """Health of an instance by what was reported and by its snapshot's age now."""
        instance = self._instances.get(iid)
        if instance is None:
            return "gone"
        deaf_since = self._forgiven_from(now)
        age = (now if deaf_since is None else deaf_since) - instance.seen_at
        limit = self._heartbeat_s * self._missed
        if age > limit and self._excused(now, instance.seen_at):
            age = limit
        own = health_of(age, self._heartbeat_s, self._missed)
        if instance.reported == "gone" or own == "gone":
            return "gone"
        return "stale" if instance.reported == "stale" or own == "stale" else "ok"

    def judged_at(self, now: float) -> float:
        """The time at which ages count now: `reported` ok and no older than `stale_after_s` by then means healthy.

        It is `health` for many at once. Where telemetry's silence is excused, what counts is how fresh an instance
        was when it fell silent.
        """
        deaf_since = self._forgiven_from(now)
        if deaf_since is not None:
            return deaf_since
        since = self._follow_since
        silent = now - self._last_view > self._heartbeat_s
        if silent and (since is None or now - since <= self.stale_after_s):
            return self._last_view
        return now

    def models(self, iid: str) -> dict[str, ModelState]:
        """The models of an instance by name; to be read only."""
        instance = self._instances.get(iid)
        return instance.models if instance is not None else {}

    def active_elsewhere(self, model: str, iid: str, now: float) -> bool:
        """Whether a healthy instance other than `iid` has `model` active."""
        at = self.judged_at(now)
        for other in self._active.get(model, ()):
            instance = self._instances[other]
            fresh = instance.reported == "ok" and at - instance.seen_at <= self.stale_after_s
            well = fresh and instance.snapshot.status == "ready"
            if other != iid and well:
                return True
        return False

    def healths(self, now: float) -> dict[str, Health]:
        """Health of all instances."""
        return {iid: self.health(iid, now) for iid in self._instances}

    def _forgiven_from(self, now: float) -> float | None:
        """Silence from here on is the bus's; None: it is everybody's own."""
        if self._hears_since is not None and now - self._hears_since > self.stale_after_s:
            self._deaf_since = None
        return self._deaf_since

    def _excused(self, now: float, seen_at: float) -> bool:
        """Whether an instance's silence may be telemetry's: it was fresh when the view fell silent."""
        silence = now - self._last_view
        if silence <= self._heartbeat_s:
            return False
        limit = self._heartbeat_s * self._missed
        if self._last_view - seen_at > limit:
            return False
        since = self._follow_since
        return since is None or now - since <= limit

    def _take(self, seen_at: float, snapshot: Snapshot, view: InstanceView | None, now: float) -> bool:
        iid = snapshot.iid
        old = self._instances.get(iid)
        self._first_contact = now if self._first_contact is None else self._first_contact
        stale = old is not None and now - old.seen_at > self._heartbeat_s * self._missed
        if old is not None and not supersedes(snapshot, old.snapshot, old_is_stale=stale):
            if view is not None and snapshot.epoch == old.snapshot.epoch and snapshot.version == old.snapshot.version:
                old.reported = view.health
                old.seen_at = max(old.seen_at, seen_at)
            return False
        reported = view.health if view else "ok"
        if old is not None and now - old.learnt_at < LEARN_S and _same_load(old.snapshot, snapshot):
            old.snapshot, old.seen_at, old.reported = snapshot, seen_at, reported
            return True
        models = {m.name: m for m in snapshot.models}
        load = sum(m.queued + m.running for m in snapshot.models)
        self._instances[iid] = Instance(snapshot, seen_at, reported, models, load, learnt_at=now)
        self.changed.add(iid)
        for name, model in models.items():
            if model.state == "active":
                self._active.setdefault(name, set()).add(iid)
            elif name in self._active:
                self._active[name].discard(iid)
        self._unindexed = self._unindexed or old is None or old.models.keys() != models.keys()
        return True

    def _remove(self, iid: str) -> bool:
        if self._instances.pop(iid, None) is None:
            return False
        self.changed.add(iid)
        self._unindexed = True
        return True

    def _index(self) -> None:
        """Who serves what, once per message: with many instances it is not for nothing."""
        if not self._unindexed:
            return
        self._unindexed = False
        serving: dict[str, list[str]] = {}
        active: dict[str, set[str]] = {}
        for iid in sorted(self._instances):
            for name, model in self._instances[iid].models.items():
                serving.setdefault(name, []).append(iid)
                if model.state == "active":
                    active.setdefault(name, set()).add(iid)
        self._serving, self._active = serving, active


def _same_load(old: Snapshot, new: Snapshot) -> bool:
    """Whether what costs and checks read is unchanged: an idle instance's snapshots differ in time and number only."""
    return (
        old.models == new.models
        and old.epoch == new.epoch
        and old.status == new.status
        and old.max_queued == new.max_queued
        and old.deadline_risk == new.deadline_risk
        and old.round_remaining_ms == new.round_remaining_ms
        and old.round_planned_ms == new.round_planned_ms
        and old.kv_occupancy == new.kv_occupancy
        and old.staging_free_bytes == new.staging_free_bytes
        and old.buffer_bytes == new.buffer_bytes
    )
