"""Which candidates may take a call: the round, queue and HBM checks of 3.3, and Eq. 2.

Reasons, in the order of the checks (docs/events-router.md):

    excluded   failed this call before             stale, gone      by health
    starting, draining, failed                     by the instance's own status
    failed_model   the model failed to load there  context          too long for its KV or context
    queue      the instance would reject it        round            gamma·T_TTFT would be passed (Eq. 5), as measured,
                                                                    with the wait for KV rows where HBM is full
    replica    a fresh replica is not worth it (Eq. 2)
"""

from __future__ import annotations

from dataclasses import dataclass

from talaria_common.wire import Snapshot
from talaria_router.config import RouterConfig
from talaria_router.cost import Call, Candidate, Place

_GIB = float(1 << 30)
_MAX_PRESSURE = 0.99


@dataclass(frozen=True, slots=True)
class Demand:
    """What is known of the demand for one model, for Eq. 2."""

    arrivals_per_s: float = 0.0
    reserved_returns: float = 0.0


def check(call: Call, candidate: Candidate, place: Place, budget_ms: float) -> str:
    """Why `candidate` must not take the call, "" if it may. Health and exclusion were checked before."""
    if call.prompt_tokens > place.longest:
        return "context"
    if place.full:
        return "queue"
    if place.floor_ms + candidate.rows_ms + candidate.own_ms <= budget_ms or not place.measured:
        return ""
    return "round" if excess_ms(candidate, budget_ms) > 0 else ""


def excess_ms(candidate: Candidate, budget_ms: float) -> float:
    """By how much the predicted round would pass the budget (Eq. 5); negative: it fits.

    Half of the budget at most is kept for the call's own prefill: a prompt too long for the target even on an idle
    instance is served late rather than never. Half at most goes to leases: those who might return must not lock out
    those who are here.
    """
    return candidate.floor_ms + min(candidate.own_ms, budget_ms / 2) - budget_ms


def replica_gain_ms(demand: Demand, best_wait_ms: float | None, own_wait_ms: float, config: RouterConfig) -> float:
    """Eq. 2's left side: queued or spilled demand that a replica would take off over the control window, in ms.

    `best_wait_ms` is the shortest wait where the model is held already and admitted; None: nobody admits it, so each
    call gains the whole budget.
    """
    calls = demand.arrivals_per_s * config.control_window_s + demand.reserved_returns
    before = config.budget_ms if best_wait_ms is None else best_wait_ms
    return calls * max(0.0, before - own_wait_ms)


def replica_price_ms(snapshot: Snapshot, weight_bytes: int, open_ms: float, config: RouterConfig) -> float:
    """Eq. 2's right side: T_swap + mu_j·dW + nu_m; mu_j rises with pressure and falls with staging slack."""
    pressure = snapshot.kv_occupancy
    if snapshot.buffer_bytes and snapshot.staging_free_bytes:
        pressure *= 1.0 - min(1.0, snapshot.staging_free_bytes / snapshot.buffer_bytes)
    pressure = min(max(pressure, 0.0), _MAX_PRESSURE)
    mu = config.mu_ms_per_gib * pressure / (1.0 - pressure)
    return open_ms + mu * weight_bytes / _GIB + config.nu_ms
