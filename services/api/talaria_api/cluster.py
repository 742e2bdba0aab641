"""The cluster view as the api needs it: which models can be served now, and how long their context is.

Pure state, fed with `ClusterView` messages. Placement is none of the api's business: this serves /v1/models, /readyz,
a light context check, and one more sign that an instance is gone.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from talaria_common.wire import ClusterView, InstanceView

_SERVING = frozenset({"active", "host"})


class ModelFacts(NamedTuple):
    """A model, as far as the view tells."""

    ready: bool
    context_tokens: int
    """The longest context that any instance offers; 0: unknown."""
    reason: str
    """Why it is not ready, for people; "" when it is."""


class Cluster:
    """Holds the newest view. `stale_after_s`: without an update for this long the view is stale."""

    def __init__(self, stale_after_s: float) -> None:
        self._stale_after_s = stale_after_s
        self._instances: dict[str, InstanceView] = {}
        self._next: dict[str, InstanceView] = {}
        """Of another telemetry life (`_next_epoch`), until it says who is there."""
        self._next_epoch = ""
        self._epoch = ""
        self._version = -1
        self._heard_at: float | None = None

    def update(self, now: float, view: ClusterView) -> list[InstanceView]:
        """Take in a full view or a delta; returns the instances that it says are gone. Older versions are ignored."""
        if view.epoch == self._epoch and view.version < self._version:
            return []
        if view.epoch != self._epoch and not view.full:
            # What counts of a new telemetry life begins with a full view; a delta alone would mix lives.
            if view.epoch != self._next_epoch:
                self._next, self._next_epoch = {}, view.epoch
            self._next.update({i.snapshot.iid: i for i in view.instances})
            self._heard_at = now
            return []
        self._heard_at, self._epoch, self._version = now, view.epoch, view.version
        if view.full:
            self._full(view)
        self._instances.update({i.snapshot.iid: i for i in view.instances})
        for iid in view.removed:
            self._instances.pop(iid, None)
        return [i for i in view.instances if i.health == "gone"]

    def _full(self, view: ClusterView) -> None:
        """Who is there: the others go. The last page names them, and most of them were on the pages before it."""
        if view.epoch == self._next_epoch:
            self._instances.update(self._next)
        self._next, self._next_epoch = {}, ""
        members = set(view.members)
        self._instances = {iid: i for iid, i in self._instances.items() if iid in members}

    def fresh(self, now: float) -> bool:
        """Whether telemetry was heard of lately."""
        return self._heard_at is not None and now - self._heard_at <= self._stale_after_s

    @property
    def seen(self) -> bool:
        """Whether there was any view yet."""
        return self._heard_at is not None

    def ready_instances(self) -> int:
        """Instances that are healthy and ready."""
        return sum(_ready(i) for i in self._instances.values())

    def why_not_ready(self) -> list[str]:
        """For each instance that is not ready: its name and the reason."""
        return [
            f"instance {iid}: {i.snapshot.reason or i.snapshot.status if i.health == 'ok' else i.health}"
            for iid, i in sorted(self._instances.items())
            if not _ready(i)
        ]

    def knows(self, model: str) -> bool:
        """Whether some instance lists the model."""
        return any(m.name == model for i in self._instances.values() for m in i.snapshot.models)

    def served(self) -> set[str]:
        """Models that some instance can serve now."""
        return {m.name for i in self._instances.values() if _ready(i) for m in i.snapshot.models if m.state in _SERVING}

    def model(self, name: str) -> ModelFacts:
        """What is known of a model."""
        context = 0
        states: list[str] = []
        ready = False
        for instance in self._instances.values():
            for model in instance.snapshot.models:
                if model.name != name:
                    continue
                context = max(context, model.context_tokens)
                if _ready(instance) and model.state in _SERVING:
                    ready = True
                states.append(f"{instance.snapshot.iid}: {model.state if _ready(instance) else _state(instance)}")
        return ModelFacts(ready, context, "" if ready else _reason(states))


def _ready(instance: InstanceView) -> bool:
    return instance.health == "ok" and instance.snapshot.status == "ready"


def _state(instance: InstanceView) -> str:
    return instance.snapshot.status if instance.health == "ok" else instance.health


def _reason(states: Iterable[str]) -> str:
    return ", ".join(sorted(states)) or "no instance has it"
