"""The round planner (3.4): how long each active model's slot is and how much decode it protects. Pure arithmetic.

For a round of R ms, Eq. 4 (`d·T_TPOT - d·t >= U = R - d·t`) says d >= R / T_TPOT for every model whose decode step
t is shorter than T_TPOT: so a sequence that lives through the round gets a token every T_TPOT on average. Eq. 5 says
R <= gamma·T_TTFT. What is left after switches and protected decode is for P and SP.

Both targets can be out of reach, and then the plan says which it gives up, and by how much the round grows:

- `ttft`: the round has to grow beyond Eq. 5, since a model with work is never left out, each slot owes its first
  waiting call a first token, and a slot is worth its switch only if prefill gets as much time as that took, while so
  much waits. (3.4: cumulative pressure pushes the round past the bound, and the instance reports it.) Without the last
  rule switches and protected decode could fill the round, and each slot let in one call while its queue grows;
- `tpot`: the models' decode steps together leave no time for anything else. Then decode gets half of the round, the
  same number of iterations for every model.

A round that has to grow anyhow gives each model as much time as its switch took, up to `slot_ms`: it must not do little
but switch.

Where KV does not outlive the switch (`lossy`), a slot that prefills for p ms also decodes for p ms: the end of the slot
throws the prefill of what still runs away, and a slow device would otherwise do little but prefill the same calls.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

_EPS = 1e-9
_HALF = 0.5


class Demand(NamedTuple):
    """What a model brings into a round; predicted ms."""

    model: str
    decode_ms: float
    """One decode step; 0: unknown."""
    switch_ms: float
    """The switch that opens its slot."""
    first_ms: float = 0.0
    """Prefill and restore of what its slot must: the call that it owes a token, or all that ran and lost their KV."""
    prefill_ms: float = 0.0
    """Prefill and restore of all that waits, and of the returns that it can expect."""

    @property
    def least_ms(self) -> float:
        """Prefill that a slot is not opened without: what it must, and what makes it worth its switch."""
        return max(self.first_ms, min(self.prefill_ms, self.switch_ms))


class Limits(NamedTuple):
    """What bounds a round, ms."""

    slot_ms: float
    drain_ms: float
    round_ms: float
    """gamma·T_TTFT."""
    t_tpot_ms: float
    lossy: bool


@dataclass(frozen=True, slots=True)
class SlotPlan:
    """One model's slot."""

    model: str
    length_ms: float
    """From the end of its switch to the start of the next one."""
    decodes: int
    """d_m: the decode iterations that P and SP must leave."""
    decode_ms: float
    """Predicted time of those."""

    @property
    def prefill_ms(self) -> float:
        """What P and SP may use if nothing of it is lost at the end of the slot."""
        return max(0.0, self.length_ms - self.decode_ms)


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """A round: R = switches + slots (Eq. 3)."""

    slots: dict[str, SlotPlan]
    switch_ms: float
    """All that is not slots: the switches, and what of the round has run already."""
    infeasible: tuple[str, ...] = ()
    """Targets given up: "ttft", "tpot"."""
    round_ms: float = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "round_ms", self.switch_ms + sum(s.length_ms for s in self.slots.values()))


def plan_round(demands: Sequence[Demand], limits: Limits, spent_ms: float = 0.0) -> RoundPlan:
    """Plan one slot for each of `demands`, in that order.

    `spent_ms`: the round began so long ago, and its models that have had their slots are not in `demands`.
    """
    switch_ms = sum(d.switch_ms for d in demands) if len(demands) > 1 or spent_ms else 0.0
    switch_ms += spent_ms
    step_ms = sum(d.decode_ms for d in demands)
    least_ms = sum(_lossy(d.least_ms, limits) for d in demands)
    reachable = all(d.decode_ms < limits.t_tpot_ms for d in demands)
    wanted = _wanted_ms(demands, limits, switch_ms)
    if reachable:
        for round_ms in (wanted, limits.round_ms):
            plan = _fill(demands, limits, switch_ms, round_ms)
            if plan is not None:
                return plan
    share = step_ms / limits.t_tpot_ms
    worth_it = switch_ms + sum(min(limits.slot_ms, d.switch_ms) for d in demands)
    if reachable and share <= _HALF:
        round_ms = max(limits.round_ms, worth_it, (switch_ms + least_ms + step_ms) / (1 - share))
        return _grown(demands, limits, switch_ms, round_ms, infeasible=("ttft",))
    t_tpot_ms = step_ms / _HALF
    needed = max(worth_it, (switch_ms + least_ms + step_ms) / _HALF)
    missed = ("tpot",) if needed <= limits.round_ms else ("ttft", "tpot")
    round_ms = max(needed, min(wanted, limits.round_ms))
    return _grown(demands, limits._replace(t_tpot_ms=t_tpot_ms), switch_ms, round_ms, infeasible=missed)


def _lossy(prefill_ms: float, limits: Limits) -> float:
    return 2 * prefill_ms if limits.lossy else prefill_ms


def _wanted_ms(demands: Sequence[Demand], limits: Limits, switch_ms: float) -> float:
    """The round that gives everybody what they ask for, or the longest one that Eq. 5 allows."""
    share = sum(d.decode_ms for d in demands) / limits.t_tpot_ms
    asked = sum(max(_lossy(d.prefill_ms, limits), limits.drain_ms) + d.decode_ms for d in demands)
    worth_it = switch_ms + sum(max(limits.slot_ms, d.decode_ms) for d in demands)
    full = (switch_ms + asked) / (1 - share) if share < 1 else math.inf
    return min(max(worth_it, full), limits.round_ms)


def _fill(demands: Sequence[Demand], limits: Limits, switch_ms: float, round_ms: float) -> RoundPlan | None:
    """A round of exactly `round_ms`; None if protected decode and the least prefill do not fit."""
    count = max(1, math.ceil(round_ms / limits.t_tpot_ms - _EPS))
    for drain_ms in (limits.drain_ms, 0.0):
        decodes = [max(count, int(drain_ms / d.decode_ms)) if d.decode_ms > _EPS else count for d in demands]
        protected = [n * d.decode_ms for n, d in zip(decodes, demands, strict=True)]
        least = [_length(d.least_ms, own, limits) for d, own in zip(demands, protected, strict=True)]
        free = round_ms - switch_ms - sum(least)
        if free >= -_EPS:
            break
    else:
        return None
    extra = _shares(demands, protected, least, max(0.0, free), limits)
    slots = {
        d.model: SlotPlan(d.model, base + more, n, own)
        for d, base, more, n, own in zip(demands, least, extra, decodes, protected, strict=True)
    }
    return RoundPlan(slots, switch_ms)


def _grown(
    demands: Sequence[Demand], limits: Limits, switch_ms: float, round_ms: float, *, infeasible: tuple[str, ...]
) -> RoundPlan:
    plan = _fill(demands, limits, switch_ms, round_ms)
    while plan is None:  # the last iterations that rounding up adds
        round_ms *= 1.1
        plan = _fill(demands, limits, switch_ms, round_ms)
    return RoundPlan(plan.slots, switch_ms, infeasible)


def _length(prefill_ms: float, protected_ms: float, limits: Limits) -> float:
    """A slot with so much prefill."""
    return prefill_ms + (max(protected_ms, prefill_ms) if limits.lossy else protected_ms)


def _shares(
    demands: Sequence[Demand], protected: Sequence[float], least: Sequence[float], free: float, limits: Limits
) -> list[float]:
    """How the rest of a round is divided: first to what waits, in proportion; what is then left, evenly."""
    asked = [
        max(0.0, _length(d.prefill_ms, own, limits) - base)
        for d, own, base in zip(demands, protected, least, strict=True)
    ]
    total = sum(asked)
    if total >= free:
        return [free * a / total if total else 0.0 for a in asked]
    even = (free - total) / len(demands)
    return [a + even for a in asked]
