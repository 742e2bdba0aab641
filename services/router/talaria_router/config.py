"""The router core's configuration: the part of `Settings` that policy may depend on, as plain numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from talaria_common.settings import Settings


@dataclass(frozen=True, slots=True)
class Tenant:
    """What is configured of one tenant."""

    weight: float = 1.0
    max_in_flight: int | None = None


EVENT_CANDIDATES = 8
"""Candidates that an event shows at most, those that a check refused included."""
RANKED = 3
"""Best candidates that a decision by cost looks for: the chosen one, and enough others to see why."""
RESTORE_WAIT_S = 0.1
"""Longest that a call waits for its session's record; after that it is placed as a new session."""
PROBE_WAIT_S = 0.3
"""Longest that a call waits for a health probe of its reserved instance."""
COMPLETED_KEPT = 8192
"""Completions remembered, so that a duplicate does not install a second lease."""


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """Units in names. See `talaria_common.settings.RouterSettings` for meaning and defaults."""

    catalog: frozenset[str] = frozenset()
    policy: str = "talaria"
    tau_s: float = 1.0
    tau_learn_max_s: float = 0.0
    t_ttft_ms: float = 10_000.0
    gamma: float = 0.9
    overload: Literal["reject", "queue", "spill"] = "reject"
    queue_max: int = 256
    patience_s: float = 15.0
    tenant: Tenant = Tenant()
    """Of all that are not in `tenants`."""
    tenants: Mapping[str, Tenant] = field(default_factory=dict)
    session_idle_s: float = 3600.0
    sessions_max: int = 1_000_000
    mu_ms_per_gib: float = 2.0
    nu_ms: float = 500.0
    control_window_s: float = 10.0
    replica_idle_s: float = 300.0
    admission_unit_ms: float | None = None
    heartbeat_s: float = 0.5
    missed: int = 3
    skew_s: float = 2.0
    accept_s: float = 2.0
    ask_again_s: float = 1.0
    """An api that still waits asks again this often: one that does not is gone."""

    @property
    def forgive_after_s(self) -> float:
        """A call that waits tries an instance that failed it again after this: by then a dead one is stale."""
        return self.heartbeat_s * (self.missed + 1)

    @property
    def budget_ms(self) -> float:
        """gamma·T_TTFT (Eq. 5)."""
        return self.gamma * self.t_ttft_ms

    @staticmethod
    def of(settings: Settings) -> RouterConfig:
        """The router's view of `settings`."""
        r = settings.router
        return RouterConfig(
            catalog=frozenset(settings.models),
            policy=r.policy,
            tau_s=r.tau_s,
            tau_learn_max_s=r.tau_learn_max_s,
            t_ttft_ms=r.t_ttft_s * 1000,
            gamma=r.gamma,
            overload=r.overload,
            queue_max=r.queue_max,
            patience_s=r.patience_s,
            tenant=Tenant(max_in_flight=r.tenant_max_in_flight),
            tenants={
                name: Tenant(t.weight, t.max_in_flight if t.max_in_flight is not None else r.tenant_max_in_flight)
                for name, t in r.tenants.items()
            },
            session_idle_s=r.session_idle_s,
            sessions_max=r.sessions_max,
            mu_ms_per_gib=r.mu_ms_per_gib,
            nu_ms=r.nu_ms,
            control_window_s=r.control_window_s,
            replica_idle_s=r.replica_idle_s,
            admission_unit_ms=r.admission_unit_ms,
            heartbeat_s=settings.mesh.heartbeat_s,
            missed=settings.mesh.missed,
            skew_s=settings.mesh.skew_tolerance_s,
            accept_s=settings.api.accept_timeout_s,
            ask_again_s=settings.api.route_timeout_s,
        )
