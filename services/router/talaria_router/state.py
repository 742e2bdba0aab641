"""Everything the router core knows, in one plain object; and the few operations that more than one part needs."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

from talaria_common.ids import PARTITIONS
from talaria_router.admission import Demand
from talaria_router.board import Boards
from talaria_router.calls import Calls, Waiting
from talaria_router.cluster import Cluster
from talaria_router.config import RouterConfig
from talaria_router.events import lease_event
from talaria_router.fairness import Fairness
from talaria_router.gaps import Gaps
from talaria_router.leases import Leases
from talaria_router.messages import Dirty, Effect, Emit
from talaria_router.overlay import Overlay
from talaria_router.policies import Policy, policy
from talaria_router.profiles import Profiles
from talaria_router.ranking import Ranker
from talaria_router.replicas import Replicas
from talaria_router.returns import Returns
from talaria_router.sessions import Entry, SessionTable
from talaria_router.shared import SharedPrefixes


class Arrivals:
    """Arrival rate of one model, decaying over the control window."""

    __slots__ = ("_at", "_rate", "turn")

    def __init__(self) -> None:
        self._rate = 0.0
        self._at = 0.0
        self.turn = 0
        """Decisions made for this model."""

    def add(self, now: float, window_s: float) -> None:
        """One more call."""
        self._rate = self._rate * math.exp((self._at - now) / window_s) + 1.0 / window_s
        self._at = now
        self.turn += 1

    def per_s(self, now: float, window_s: float) -> float:
        """Calls per second, seen from `now`."""
        return self._rate * math.exp(-max(0.0, now - self._at) / window_s)


@dataclass(slots=True)
class Owned:
    """A partition of ours. Until `restore_until` the bucket may know sessions that we do not."""

    rev: int
    restore_until: float


@dataclass(slots=True)
class Counts:
    """For metrics; all only rise."""

    routed: Counter[str] = field(default_factory=Counter)
    """Placements by `via`."""
    verdicts: Counter[str] = field(default_factory=Counter)
    rejected: Counter[str] = field(default_factory=Counter)
    """Candidates ruled out, by reason."""
    opens: Counter[str] = field(default_factory=Counter)
    """Placements whose instance must activate the model first, by where its weights are there."""
    avoidable_opens: int = 0
    """Those of them for which another healthy instance had the model active (5.3)."""
    restored: int = 0
    """Sessions read back from the bucket."""
    restore_timeouts: int = 0
    probes: int = 0
    commands: Counter[str] = field(default_factory=Counter)
    """Replicas that were to be opened or closed, and refusals, by verb."""
    spilled: int = 0
    """Placements that no instance had room for within the target (overload = spill)."""
    queued: int = 0
    """Calls that had to wait for room."""
    not_taken_up: int = 0
    """Placements that left the overlay by their deadline."""


class RouterState:
    """The tables. `me` is this router in the snapshots' `seen`: "router/epoch"."""

    def __init__(self, config: RouterConfig, router: str, epoch: str) -> None:
        self.config = config
        self.router = router
        self.epoch = epoch
        self.me = f"{router}/{epoch}"
        self.policy: Policy = policy(config.policy)
        self.sessions = SessionTable(config.session_idle_s, config.sessions_max)
        self.overlay = Overlay()
        self.leases = Leases(self.sessions, self.overlay)
        self.cluster = Cluster(config.heartbeat_s, config.missed)
        self.profiles = Profiles(config.admission_unit_ms)
        self.replicas = Replicas(self.cluster, self.overlay, self.profiles, config)
        boards = Boards(self.cluster, self.overlay, self.profiles, config.budget_ms)
        self.ranker = Ranker(self.cluster, boards, config, self.policy, self.replicas)
        self.calls = Calls()
        self.fairness = Fairness(self.calls, config.tenants, config.tenant)
        self.gaps = Gaps(config.tau_s, config.tau_learn_max_s)
        self.shared = SharedPrefixes()
        self.returns = Returns()
        self.waiting: dict[str, Waiting] = {}
        self.probing: dict[str, str] = {}
        """Session key → rid of the call that waits for the probe of its leased instance: the lease is spoken for."""
        self.owned: dict[int, Owned] = {}
        self.arrivals: dict[str, Arrivals] = {}
        self.counts = Counts()

    def entry(self, key: str, partition: int) -> Entry | None:
        """The session's entry, unless it was learnt under an earlier ownership: others may have changed it since."""
        owned = self.owned.get(partition)
        entry = self.sessions.get(key)
        return entry if owned is not None and entry is not None and entry.owner_rev == owned.rev else None

    def arrival(self, model: str, now: float) -> None:
        """A new call for `model` came."""
        found = self.arrivals.get(model)
        if found is None:
            found = self.arrivals[model] = Arrivals()
        found.add(now, self.config.control_window_s)

    def demand(self, model: str, now: float) -> Demand:
        """Eq. 2's demand for `model`, of all routers: what this one sees of it stands for the partitions of the others.

        Arrivals seen and returns reserved. Nothing is seen of partitions that are not ours.
        """
        arrivals = self.arrivals.get(model)
        rate = arrivals.per_s(now, self.config.control_window_s) if arrivals else 0.0
        whole = PARTITIONS / max(1, len(self.owned))
        return Demand(rate * whole, self.overlay.leases_of(model) * whole)


class Turn:
    """One call of `RouterCore.handle`: the tables, the time, and the effects so far."""

    __slots__ = ("now", "out", "state")

    def __init__(self, state: RouterState, now: float) -> None:
        self.state = state
        self.now = now
        self.out: list[Effect] = []

    def lease_event(self, what: str, entry: Entry, reason: str = "", rid: str = "") -> None:
        """Publish what became of the entry's lease; before the lease is changed, so that its time is told."""
        self.out.append(Emit(lease_event(self.state.router, self.now, what, entry, reason=reason, rid=rid)))

    def discard_lease(self, key: str, entry: Entry, reason: str, rid: str = "") -> None:
        """End the entry's live lease unused."""
        self.lease_event("discarded", entry, reason, rid)
        self.state.leases.discard(entry, reason)
        self.out.append(Dirty(key))

    def expire_lease(self, key: str, entry: Entry) -> None:
        """End the entry's lease: its time is up."""
        self.lease_event("expired", entry)
        self.state.leases.expire(entry)
        self.out.append(Dirty(key))
