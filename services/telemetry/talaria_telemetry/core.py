"""Telemetry as a pure machine: snapshots in, a versioned cluster view and health events out (3.3, 4.1; DESIGN 3)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from talaria_common.clock import to_ms
from talaria_common.freshness import GATHER_HEARTBEATS
from talaria_common.wire import ClusterView, Event, Snapshot
from talaria_telemetry.instances import Expected, Instance, awaited
from talaria_telemetry.messages import Announce, Beat, Effect, Emit, Input, Present, Publish
from talaria_telemetry.pages import paged

FORGET_AFTER_S = 60.0
"""An instance that nobody expects is forgotten after this much silence."""


class TelemetryCore:
    """The aggregated view.

    A view goes out on every heartbeat, also an empty delta: it is telemetry's own heartbeat. A delta carries the
    instances with a newer snapshot or another health; each brings its whole snapshot, so a lost delta costs nothing
    that the next snapshot does not mend. A full view goes out every `full_every` heartbeats, at the start, when an
    instance appears or goes, and after a disconnection. It says who is there, so the first one waits until every living
    instance has had time to speak: routers would tell their callers that nobody serves them.

    Args:
        name: this telemetry.
        epoch: this life of it; views are numbered within it.
        heartbeat_s: interval of snapshots and views, seconds.
        missed: heartbeats missed before an instance is stale.
        full_every: heartbeats between full views.
        expected: instances of the configuration.
    """

    def __init__(
        self,
        name: str,
        epoch: str,
        *,
        heartbeat_s: float,
        missed: int,
        full_every: int,
        expected: Iterable[Expected] = (),
    ) -> None:
        self.name = name
        self.epoch = epoch
        self.version = 0
        self.instances: dict[str, Instance] = {}
        self._heartbeat_s = heartbeat_s
        self._missed = missed
        self._full_every = full_every
        self._configured = {e.iid: e for e in expected}
        self._present: dict[str, Expected] = {}
        self._removed: list[str] = []
        self._full_due = True
        self._heard_from = float("-inf")
        """Since when instances can be heard: the bus's last return."""
        self._began: float | None = None
        self._beats = 0

    def handle(self, now: float, message: Input) -> list[Effect]:
        """Take in one message at `now` (seconds, never going back); returns what is to be published, in order."""
        out: list[Effect] = []
        if self._began is None:
            self._began = now
        if isinstance(message, Snapshot):
            self._snapshot(now, message, out)
        elif isinstance(message, Beat):
            self._beat(now, message.page_bytes, out)
        elif isinstance(message, Present):
            self._presence(now, message, out)
        else:
            assert isinstance(message, Announce)
            self._full_due, self._heard_from = True, now
        return out

    def _snapshot(self, now: float, snapshot: Snapshot, out: list[Effect]) -> None:
        known = self.instances.get(snapshot.iid)
        if known is None:
            known = self.instances[snapshot.iid] = Instance(snapshot, now, health="gone")
            self._full_due = True
            known.clock_offset_ms = snapshot.at_ms - now * 1000
            self._health(now, known, "ok", "first snapshot", out)
            return
        first, old_status = not known.heard, known.snapshot.status
        took = known.take(now, snapshot, self._heartbeat_s * self._missed)
        if took == "late":
            return
        if first:
            self._full_due = True
        if took == "restart":
            self._event(now, known, "restart", {"epoch": snapshot.epoch, "restarts": known.restarts}, out)
        if known.health != "ok":
            self._health(now, known, "ok", "first snapshot" if first else "snapshots have come again", out)
        if snapshot.status != old_status and not first:
            self._event(now, known, "status", {"from": old_status, "to": snapshot.status}, out)

    def _presence(self, now: float, message: Present, out: list[Effect]) -> None:
        """An instance announced itself, or took its leave. Its snapshots say whether it lives."""
        iid, presence = message
        if presence is not None:
            self._present[iid] = Expected(iid, presence.pool, presence.models)
            return
        self._present.pop(iid, None)
        known = self.instances.get(iid)
        if known is None or not known.heard or iid in self._configured:
            return
        self._event(now, known, "left", {}, out)
        self._remove(iid)

    def _beat(self, now: float, page_bytes: int | None, out: list[Effect]) -> None:
        self._beats += 1
        for iid, expected in {**self._present, **self._configured}.items():
            if iid not in self.instances:
                self.instances[iid] = awaited(expected, now)
                self._full_due = True
        for iid, instance in list(self.instances.items()):
            health = instance.judge(now, self._heartbeat_s, self._missed, self._heard_from)
            if health != instance.health:
                self._health(now, instance, health, f"silent for {instance.age_s(now):.1f} s", out)
            wanted = iid in self._configured or iid in self._present
            if health == "gone" and not wanted and instance.age_s(now) > FORGET_AFTER_S:
                self._remove(iid)
        assert self._began is not None
        gathered = now - self._began >= GATHER_HEARTBEATS * self._heartbeat_s
        self._full_due = self._full_due or self._beats % self._full_every == 0
        full = gathered and self._full_due
        views = tuple(i.view(now) for i in self.instances.values() if full or i.changed)
        view = ClusterView(
            telemetry=self.name,
            epoch=self.epoch,
            version=self.version + 1,
            at_ms=to_ms(now),
            full=full,
            instances=views,
            removed=tuple(self._removed),
        )
        pages = [view] if page_bytes is None else paged(view, page_bytes)
        self.version = pages[-1].version
        out += map(Publish, pages)
        for instance in self.instances.values():
            instance.changed = False
        self._removed = []
        self._full_due = self._full_due and not full

    def _remove(self, iid: str) -> None:
        del self.instances[iid]
        self._removed.append(iid)

    def _health(self, now: float, instance: Instance, health: Any, reason: str, out: list[Effect]) -> None:
        """Another health: in the next view, and as an event."""
        data = {"from": instance.health, "to": health, "reason": reason}
        instance.health = health
        instance.changed = True
        self._event(now, instance, "health", data, out)

    def _event(self, now: float, instance: Instance, what: str, data: dict[str, Any], out: list[Effect]) -> None:
        snapshot = instance.snapshot
        common = {
            "iid": snapshot.iid,
            "what": what,
            "epoch": snapshot.epoch,
            "status": snapshot.status,
            "age_ms": round(instance.age_s(now) * 1000),
        }
        if snapshot.reason:
            common["status_reason"] = snapshot.reason
        out.append(Emit(Event(kind="health", source=self.name, at_ms=to_ms(now), data=common | data)))
