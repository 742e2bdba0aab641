"""Eq. 2 acting (3.3): models are opened where a replica is worth its price, and closed where one has long been idle.

The ranking decides that a replica is worth it; here stands what is under way, so that one demand opens one replica, and
what an instance refused, so that it is not asked again and again. Hysteresis: a model has at most one opening at a
time; what was closed is not opened for its gain within a control window; a replica is closed only after a long idle
time, never the last one, and only if twice what its absence would cost stays below the price of opening it.
"""

from __future__ import annotations

from collections.abc import Callable

from talaria_common.ids import partition_of
from talaria_common.wire import ModelState
from talaria_router.admission import Demand, replica_gain_ms, replica_price_ms
from talaria_router.board import HELD
from talaria_router.cluster import Cluster, Instance
from talaria_router.config import RouterConfig
from talaria_router.cost import profile_of
from talaria_router.messages import Control
from talaria_router.overlay import Overlay
from talaria_router.profiles import Profiles

OPEN_WITHIN_S = 600.0
"""An opening that no snapshot has shown by then is given up."""
REFUSED_WINDOWS = 6.0
"""An instance that refused is asked again after this many control windows."""

Replica = tuple[str, str]
"""(iid, model)."""


class Replicas:
    """What is being opened, what was refused, and since when replicas are idle. Times in seconds."""

    def __init__(self, cluster: Cluster, overlay: Overlay, profiles: Profiles, config: RouterConfig) -> None:
        self._cluster = cluster
        self._overlay = overlay
        self._profiles = profiles
        self._config = config
        self._opening: dict[str, tuple[str, float]] = {}
        self._refused: dict[tuple[str, str, str], float] = {}
        """(verb, iid, model): until when not to ask again."""
        self._closing: dict[Replica, float] = {}
        """Told to close, though the snapshot may still show it; until when that is believed."""
        self._closed: dict[Replica, float] = {}
        """Until when not to open again for gain."""
        self._idle_since: dict[Replica, float] = {}
        self._next_look = 0.0

    def may_open(self, iid: str, model: str, now: float, *, held: bool) -> bool:
        """Whether the model may be opened there now; `held`: somebody serves it, so it is for gain only."""
        opening = self._opening.get(model)
        if opening is not None:
            return opening[0] == iid
        if now < self._refused.get(("open", iid, model), 0.0):
            return False
        return not held or now >= self._closed.get((iid, model), 0.0)

    def open(self, iid: str, model: str, now: float) -> Control | None:
        """Open the model there; None: that is under way."""
        if model in self._opening:
            return None
        self._opening[model] = (iid, now + OPEN_WITHIN_S)
        return Control(iid, "open", model)

    def answered(self, now: float, control: Control, *, ok: bool) -> None:
        """The instance's answer to a command."""
        replica = (control.iid, control.model)
        if not ok:
            self._refused[control.verb, control.iid, control.model] = now + REFUSED_WINDOWS * self._window_s
            if control.verb == "close":
                self._closing.pop(replica, None)
            elif self._opening.get(control.model, ("", 0.0))[0] == control.iid:
                del self._opening[control.model]
        elif control.verb == "close":
            self._closed[replica] = now + self._window_s

    def look(self, now: float, demand: Callable[[str, float], Demand], leads: Callable[[str], bool]) -> list[Control]:
        """Follow what is under way and close what is idle.

        Args:
            now: seconds.
            demand: of a model at a time.
            leads: whether a model is this router's to close: each is one router's (`leader`). How long replicas have
                been idle is followed of all, for whoever comes to lead them.
        """
        for model, (iid, until) in list(self._opening.items()):
            instance = self._cluster.get(iid)
            state = instance.models.get(model) if instance is not None else None
            if now >= until or state is None or state.state in {"active", "host"}:
                del self._opening[model]
            elif state.state == "failed":
                self.answered(now, Control(iid, "open", model), ok=False)
        if now < self._next_look:
            return []
        self._next_look = now + self._window_s / 10
        self._refused = {r: until for r, until in self._refused.items() if until > now}
        self._closing = {r: until for r, until in self._closing.items() if until > now and self._shown(r)}
        self._closed = {r: until for r, until in self._closed.items() if until > now}
        seen: set[Replica] = set()
        out: list[Control] = []
        for iid, instance in self._cluster.instances():
            for state in instance.models.values():
                if not self._idle(instance, state):
                    continue
                replica = (iid, state.name)
                seen.add(replica)
                idle_s = now - self._idle_since.setdefault(replica, now)
                if out or idle_s < self._config.replica_idle_s or not leads(state.name):
                    continue
                if self._spare(instance, state, demand(state.name, now), now):
                    # One at a time, and the same one not at once again: the next snapshots may judge otherwise.
                    out.append(Control(iid, "close", state.name))
                    self._idle_since[replica] = now
                    self._closing[replica] = now + REFUSED_WINDOWS * self._window_s
        self._idle_since = {r: since for r, since in self._idle_since.items() if r in seen}
        return out

    def _shown(self, replica: Replica) -> bool:
        """Whether the snapshot shows the replica."""
        state = self._cluster.models(replica[0]).get(replica[1])
        return state is not None and state.state in HELD

    def _idle(self, instance: Instance, model: ModelState) -> bool:
        charge = self._overlay.of(instance.snapshot.iid, model.name)
        used = model.queued or model.running or charge.calls or charge.leases
        return model.state == "host" and not used

    def _spare(self, instance: Instance, model: ModelState, demand: Demand, now: float) -> bool:
        """Whether the idle replica is not worth what it occupies."""
        iid = instance.snapshot.iid
        if instance.snapshot.status != "ready" or self._cluster.health(iid, now) != "ok":
            return False
        if now < self._refused.get(("close", iid, model.name), 0.0) or model.name in self._opening:
            return False
        waits = [
            profile_of(there, state, self._profiles).switch_ms if state.state == "host" else 0.0
            for other in self._cluster.serving(model.name)
            if other != iid
            and (other, model.name) not in self._closing
            and self._cluster.health(other, now) == "ok"
            and (there := self._cluster.get(other)) is not None
            and (state := there.models[model.name]).state in {"active", "host"}
        ]
        if not waits:
            return False
        profile = profile_of(instance, model, self._profiles)
        price = replica_price_ms(instance.snapshot, profile.weight_bytes, profile.open_ms, self._config)
        return 2 * replica_gain_ms(demand, min(waits), 0.0, self._config) < price

    @property
    def _window_s(self) -> float:
        return self._config.control_window_s


def leader(model: str) -> int:
    """The partition whose owner closes replicas of the model."""
    return partition_of("", "", model)
