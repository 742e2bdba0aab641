"""What a router shell needs around it: settings, pretend instances and apis that speak over a bus."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from talaria_common import subjects
from talaria_common.bus import Bus, Message
from talaria_common.clock import SystemClock, to_ms
from talaria_common.errors import BusError
from talaria_common.ids import new_epoch, new_rid, partition_of
from talaria_common.settings import Settings, parse
from talaria_common.wire import (
    ClusterView,
    Completion,
    ControlReply,
    InstanceView,
    ModelState,
    Placement,
    RouteReply,
    RouteRequest,
    SeenPlacements,
    Snapshot,
    decode,
    encode,
)
from talaria_router.shell import RouterShell

M = "m"


def config(router: str = "r0", **more: Any) -> Settings:
    return parse(
        {
            "models": {M: {"source": "smollm2"}},
            "mesh": {"heartbeat_s": 0.25},
            "router": {"id": router} | more,
        }
    )


class Instance:
    """Speaks as an instance does, and accepts whatever comes."""

    def __init__(self, bus: Bus, iid: str) -> None:
        self.bus, self.iid, self.epoch = bus, iid, new_epoch()
        self.version = 0
        self.arrived: dict[str, set[int]] = {}
        self.clock = SystemClock()
        self.healthy = True
        self.probes = 0

    async def start(self) -> Instance:
        await self.bus.subscribe(subjects.control(self.iid, "health"), self._health)
        return self

    def _health(self, message: Message) -> None:
        self.probes += 1
        if self.healthy:
            reply = ControlReply(ok=True, iid=self.iid, epoch=self.epoch, status="ready")
            self.answering = asyncio.ensure_future(self.bus.respond(message, encode(reply)))

    def snapshot(self) -> Snapshot:
        self.version += 1
        return Snapshot(
            iid=self.iid,
            epoch=self.epoch,
            version=self.version,
            at_ms=to_ms(self.clock.now()),
            pool="cold",
            status="ready",
            models=(ModelState(name=M, state="active", max_running=8, kv_epoch=1),),
            max_queued=64,
            seen={r: SeenPlacements(upto=max(s), missing=tuple(n for n in range(1, max(s)) if n not in s)) for r, s in self.arrived.items()},
        )  # fmt: skip

    async def speak(self) -> Snapshot:
        snapshot = self.snapshot()
        await self.bus.publish(subjects.snapshot(self.iid), encode(snapshot))
        return snapshot

    def take(self, p: Placement) -> None:
        self.arrived.setdefault(f"{p.router}/{p.router_epoch}", set()).add(p.seq)

    async def complete(self, p: Placement, session: str, **more: Any) -> None:
        c = Completion(
            iid=self.iid, epoch=self.epoch, rid=p.fence.rid, attempt=p.fence.attempt, router=p.router,
            router_epoch=p.router_epoch, seq=p.seq, partition=p.fence.partition, tenant="t", session=session, model=M,
            ok=True, prompt_tokens=2000, completion_tokens=10, kv_tokens=2000, kv_epoch=1, prefix_handle="h",
            at_ms=to_ms(self.clock.now()), **more,
        )  # fmt: skip
        await self.bus.publish(subjects.completion(self.iid), encode(c))


class Telemetry:
    def __init__(self, bus: Bus) -> None:
        self.bus, self.version = bus, 0
        self.epoch = new_epoch()

    async def view(self, *snapshots: Snapshot, full: bool = True) -> None:
        self.version += 1
        views = tuple(InstanceView(snapshot=s, age_ms=0, health="ok") for s in snapshots)
        view = ClusterView(telemetry="t0", epoch=self.epoch, version=self.version, at_ms=0, full=full, instances=views)
        await self.bus.publish(subjects.CLUSTER, encode(view))

    @contextlib.asynccontextmanager
    async def viewing(self, *instances: Instance) -> AsyncIterator[None]:
        """What `instances` say, again and again: a view that is not renewed is stale after three heartbeats."""

        async def go_on() -> None:
            while True:
                await asyncio.sleep(0.1)
                await self.view(*(i.snapshot() for i in instances))

        await self.view(*(i.snapshot() for i in instances))
        task = asyncio.ensure_future(go_on())
        try:
            yield
        finally:
            task.cancel()


class Api:
    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.clock = SystemClock()

    def request(self, session: str, **more: Any) -> RouteRequest:
        more = {"rid": new_rid(), "deadline_ms": to_ms(self.clock.now() + 20)} | more
        return RouteRequest(tenant="t", session=session, model=M, api="api-0", prompt_bytes=8000, **more)

    async def ask(self, session: str, **more: Any) -> RouteReply:
        """As an api asks: again, until there is an answer that is one."""
        request = self.request(session, **more)
        subject = subjects.route(partition_of("t", session, M))
        until = self.clock.now() + 20
        while self.clock.now() < until:
            try:
                answer = await self.bus.request(subject, encode(request), timeout_s=1)
            except BusError:
                await asyncio.sleep(0.02)
                continue
            reply = decode(answer.data, RouteReply)
            if reply.verdict is not None and reply.verdict.reason == "not_owner":
                await asyncio.sleep(0.02)
                continue
            return reply
        raise AssertionError("no router answers")

    async def place(self, session: str, **more: Any) -> Placement:
        reply = await self.ask(session, **more)
        assert reply.placement is not None, reply
        return reply.placement


async def router(bus: Bus, settings: Settings) -> RouterShell:
    shell = RouterShell(bus, settings, SystemClock(), new_epoch())
    await shell.start()
    return shell
