"""The capacity question: how many instances does this load need for p95 SCT under a bound."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import msgspec

from talaria_replay.sim.run import SimResult
from talaria_replay.sim.scenario import Scenario, ScenarioError


class Try(NamedTuple):
    """One number of instances that was simulated."""

    instances: int
    sct_p95_s: float
    failed_calls: int
    gpu_s_per_session: float | None
    """Of those answered; None: none was."""

    def meets(self, bound_s: float) -> bool:
        """Whether it is enough."""
        return not self.failed_calls and self.sct_p95_s <= bound_s


class Capacity(NamedTuple):
    """The answer. `instances` None: not even the largest number tried is enough."""

    instances: int | None
    tried: list[Try]
    """In order of number."""
    result: SimResult | None
    """Of the answer."""


def sized(scenario: Scenario, instances: int) -> Scenario:
    """The scenario with so many instances of its only group."""
    return msgspec.structs.replace(scenario, groups=(msgspec.structs.replace(scenario.groups[0], count=instances),))


def search(
    scenario: Scenario,
    bound_s: float,
    run: Callable[[Scenario], SimResult],
    *,
    most: int,
    tell: Callable[[Try], None] = lambda _: None,
    size: Callable[[int], Scenario] | None = None,
    least: int = 1,
) -> Capacity:
    """The least number of instances that is enough, found by doubling and halving.

    It takes for granted that more instances are not worse; `tried` shows whether they were.

    Args:
        scenario: with one group; its count is ignored. With `size`: not looked at.
        bound_s: on the 95th percentile of session completion times; a call that fails is never enough.
        run: simulates.
        most: instances to try at most.
        tell: told of each try.
        size: gives the scenario of so many instances, where that is more than a count (a catalog is placed anew).
        least: instances that it takes to have a place for every model.

    Raises:
        ScenarioError: the scenario has several groups.
    """
    if size is None and len(scenario.groups) != 1:
        raise ScenarioError("the capacity question needs a single kind of instance (one --hardware)")
    tried: dict[int, Try] = {}
    best: tuple[int, SimResult] | None = None

    def enough(count: int) -> bool:
        nonlocal best
        result = run(sized(scenario, count) if size is None else size(count))
        s = result.summary
        p95 = s["sct_s"].get("p95", float("inf"))
        tried[count] = Try(count, p95, s["failed_calls"], s["gpu_s_per_session"])
        tell(tried[count])
        if not tried[count].meets(bound_s):
            return False
        if best is None or count < best[0]:
            best = (count, result)
        return True

    low, high = least - 1, least  # low is not enough; high is to be tried
    while not enough(high):
        if high >= most:
            return Capacity(None, [tried[n] for n in sorted(tried)], None)
        low, high = high, min(2 * high, most)
    while high - low > 1:
        middle = (low + high) // 2
        if enough(middle):
            high = middle
        else:
            low = middle
    assert best is not None
    return Capacity(high, [tried[n] for n in sorted(tried)], best[1])
