"""Tenants share what there is: limits on calls in flight, weighted turns among the waiting, shares of the queue.

A tenant's load is its calls in flight over its weight. Who waits is served by priority, then by the least load, then by
age; the queue, when it is full, makes room for a tenant below its weighted share by refusing the newest call of the one
furthest above its own. All of it is this router's view: its partitions, hence its part of every tenant's sessions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from talaria_router.calls import Calls, Waiting
from talaria_router.config import Tenant


class Fairness:
    """The rules, over the live table of calls."""

    def __init__(self, calls: Calls, tenants: Mapping[str, Tenant], default: Tenant) -> None:
        self._calls = calls
        self._tenants = tenants
        self._default = default
        self._limits = any(t.max_in_flight is not None for t in (default, *tenants.values()))

    def of(self, tenant: str) -> Tenant:
        """What counts for the tenant."""
        return self._tenants.get(tenant, self._default)

    def load(self, tenant: str) -> float:
        """Calls in flight per weight."""
        return self._calls.in_flight[tenant] / self.of(tenant).weight

    def limited(self, tenant: str) -> int | None:
        """The tenant's limit if it is reached, else None."""
        if not self._limits:
            return None
        limit = self.of(tenant).max_in_flight
        return limit if limit is not None and self._calls.in_flight[tenant] >= limit else None

    def next(self, waiting: Iterable[Waiting]) -> Waiting:
        """Who of those that wait for room, one at least, is to be tried next."""

        def turn(w: Waiting) -> tuple[float, float, float, str]:
            request = w.case.ask.request
            return (-request.priority, self.load(request.tenant), w.case.since, request.rid)

        return min(waiting, key=turn)

    def makes_room(self, waiting: Iterable[Waiting], tenant: str, places: int) -> Waiting | None:
        """Who must leave a full queue of `places` for one more call of `tenant`; None: nobody, it is refused.

        Shares are by weight among the tenants that wait, the newcomer's included. Of the tenant that is furthest above
        its share the newest call of least priority goes.
        """
        held: dict[str, list[Waiting]] = {}
        for w in waiting:
            held.setdefault(w.case.ask.request.tenant, []).append(w)
        weights = {t: self.of(t).weight for t in {*held, tenant}}
        unit = places / sum(weights.values())
        if len(held.get(tenant, ())) + 1 > weights[tenant] * unit:
            return None
        above, greedy = max((len(calls) / (weights[t] * unit), t) for t, calls in held.items())
        if above <= 1:
            return None
        newest_first = reversed(held[greedy])  # a queue keeps its order: of equals `min` takes the first
        return min(newest_first, key=lambda w: (w.case.ask.request.priority, -w.case.since))
