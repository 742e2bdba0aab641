"""Whether this api can serve: the bus, telemetry's view, a router, an instance. For /readyz."""

from __future__ import annotations

import asyncio

from talaria_api.cluster import Cluster
from talaria_api.link import Link
from talaria_common.clock import Clock, to_ms
from talaria_common.ids import PARTITIONS, hash_id, new_rid
from talaria_common.wire import RouteRequest, encode

ROUTER_FRESH_S = 2.0
"""A router that answered anything within this time counts as there."""
PROBE_TIMEOUT_S = 0.5


class Readiness:
    """Finds the reasons why a call would fail now. Asks a router only when no call has lately."""

    def __init__(self, link: Link, cluster: Cluster, clock: Clock) -> None:
        self.draining = False
        self._link = link
        self._cluster = cluster
        self._clock = clock
        self._probe: asyncio.Task[bool] | None = None
        self._partition = 0

    async def reasons(self) -> list[str]:
        """Why it is not ready, for people; empty when it is."""
        if self.draining:
            return ["shutting down"]
        if not self._link.connected:
            return ["bus: not connected"]
        out: list[str] = []
        now = self._clock.now()
        if not self._cluster.seen:
            out.append("telemetry: no cluster view yet")
        elif not self._cluster.fresh(now):
            out.append("telemetry: the cluster view is stale")
        if not await self._router_answers(now):
            out.append("router: no answer")
        if self._cluster.seen and self._cluster.ready_instances() == 0:
            out += self._cluster.why_not_ready() or ["instances: none"]
        return out

    async def _router_answers(self, now: float) -> bool:
        last = self._link.route_answered_at
        if last is not None and now - last <= ROUTER_FRESH_S:
            return True
        if self._probe is None or self._probe.done():  # one probe, however many ask
            self._probe = asyncio.create_task(self._ask())
        return await asyncio.shield(self._probe)

    async def _ask(self) -> bool:
        """A question whose deadline has passed: any router refuses it, none acts on it."""
        self._partition = (self._partition + 1) % PARTITIONS
        request = RouteRequest(
            rid=new_rid(),
            tenant="readyz",
            session=hash_id("readyz"),
            model="readyz",
            api=self._link.api,
            prompt_bytes=0,
            deadline_ms=to_ms(self._clock.now()) - 3_600_000,
        )
        return await self._link.probe_router(self._partition, encode(request), PROBE_TIMEOUT_S)
