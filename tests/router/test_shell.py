"""The router on a bus, in memory and on NATS."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from talaria_common import subjects
from talaria_common.bus import Bus, NatsBus
from talaria_common.clock import SystemClock
from talaria_common.errors import BusError
from talaria_common.ids import PARTITIONS, partition_of
from talaria_common.wire import ClusterView, Event, InstanceView, ModelState, Snapshot, decode, encode
from talaria_router.metrics import RouterCollector
from talaria_router.sessions import key_of
from talaria_router.shell import RouterShell
from tests.conftest import Connect
from tests.router.mesh import Api, Instance, M, Telemetry, config, router
from tests.support.nats_server import NatsServer
from tests.support.waiting import Inbox, until


class World:
    def __init__(self, connect: Connect) -> None:
        self.connect = connect
        self.shells: list[RouterShell] = []
        self.silent: set[str] = set()

    async def start(self) -> World:
        self.bus = await self.connect()
        self.api, self.telemetry = Api(self.bus), Telemetry(self.bus)
        self.a = await Instance(self.bus, "a").start()
        self.b = await Instance(self.bus, "b").start()
        self.events = Inbox()
        await self.bus.subscribe(subjects.ALL_EVENTS, self.events)
        return self

    async def router(self, name: str = "r0", **more: object) -> RouterShell:
        shell = await router(await self.connect(), config(name, **more))
        self.shells.append(shell)
        return shell

    async def view(self) -> None:
        await self.telemetry.view(
            *(i.snapshot() for i in (self.a, self.b) if i.iid not in self.silent), full=not self.silent
        )

    async def beating(self) -> None:
        while True:
            with suppress(BusError):
                await self.view()
            await asyncio.sleep(0.05)

    def decoded(self, kind: str) -> list[Event]:
        found = [decode(m.data, Event) for m in self.events.messages if f".event.{kind}." in m.subject]
        assert all(e.kind == kind for e in found)
        return found


@pytest.fixture
async def world(connect: Connect) -> AsyncIterator[World]:
    world = await World(connect).start()
    beating = asyncio.ensure_future(world.beating())
    yield world
    beating.cancel()
    for shell in world.shells:
        assert not shell.failed.is_set()
        await shell.close()


async def owns_all(*shells: RouterShell) -> None:
    def all_owned() -> bool:
        owned = [p for s in shells for p in s.core.state.owned]
        subscribed = [p for s in shells for p in s._routes]
        return sorted(owned) == sorted(subscribed) == list(range(PARTITIONS))

    await until(all_owned, what="every partition has one owner")


async def test_a_session_from_the_first_call_to_the_return(world: World):
    shell = await world.router()
    await owns_all(shell)
    await until(lambda: not shell.not_ready())
    p = await world.api.place("s")
    assert p.via == "cost"
    instance = world.a if p.iid == "a" else world.b
    instance.take(p)
    await instance.complete(p, "s")
    await until(lambda: shell.core.state.leases.books.installed == 1)
    q = await world.api.place("s")
    assert (q.iid, q.via) == (p.iid, "lease")
    await until(lambda: len(world.decoded("route")) == 2)
    assert [e.data["what"] for e in world.decoded("lease")] == ["installed"]
    assert world.decoded("route")[1].data["lease"] == "honoured"
    instance.take(q)
    await until(lambda: shell.core.state.overlay.total()[0] == 0, what="the snapshot's marks reached the overlay")


async def record(shell: RouterShell, key: str) -> object:
    """What the bucket has of a session; None: nothing, or there is no bucket."""
    try:
        return await shell._sessions.get(key)
    except BusError:
        return None


async def test_after_a_lost_store_partitions_have_one_owner_and_sessions_are_written(nats_server: NatsServer):
    async with AsyncExitStack() as stack:

        async def connect() -> Bus:
            bus = await NatsBus.connect(nats_server.url, name="test")
            stack.push_async_callback(bus.close)
            return bus

        world = await World(connect).start()
        beating = asyncio.ensure_future(world.beating())
        first, second = await world.router("r0"), await world.router("r1")
        await owns_all(first, second)
        shares = [set(s.core.state.owned) for s in (first, second)]
        nats_server.stop()
        nats_server.lose_store()
        nats_server.start()
        await until(lambda: first.claims.ownership.unowned == second.claims.ownership.unowned == 0, timeout_s=30)
        await owns_all(first, second)
        await until(lambda: [set(s.core.state.owned) for s in (first, second)] == shares, timeout_s=20)
        p = await world.api.place("s")
        instance = world.a if p.iid == "a" else world.b
        instance.take(p)
        await instance.complete(p, "s")
        owner = first if partition_of("t", "s", M) in first.core.state.owned else second
        await until(lambda: owner.core.state.leases.books.installed == 1)
        async with asyncio.timeout(10):
            while await record(owner, key_of("t", "s", M)[0]) is None:
                await asyncio.sleep(0.05)
        beating.cancel()
        for shell in world.shells:
            assert not shell.failed.is_set()
            await shell.close()


async def test_it_says_why_it_is_not_ready(world: World, connect: Connect):
    shell = RouterShell(await connect(), config(), SystemClock(), "e")
    world.shells.append(shell)
    assert len(shell.not_ready()) == 2
    await shell.start()
    await until(lambda: not shell.not_ready())


async def test_sessions_survive_a_router_that_vanishes(world: World):
    first = await world.router(tau_s=30.0)
    await owns_all(first)
    places = {}
    for i in range(30):
        session = f"s{i}"
        p = await world.api.place(session)
        instance = world.a if i % 2 else world.b
        await instance.complete(p, session)
        places[session] = instance.iid
    await until(lambda: first.core.state.leases.books.installed == 30 and first.dirty == 0)
    await vanish(first)
    world.shells.remove(first)
    second = await world.router(tau_s=30.0)
    await owns_all(second)
    await until(lambda: not second.not_ready())
    for session, iid in places.items():
        p = await world.api.place(session)
        assert (p.iid, p.via) == (iid, "lease")
    assert second.core.state.counts.restored == 30


async def vanish(shell: RouterShell) -> None:
    """As kill -9 does, for the bus: nothing is released, nothing is written."""
    await shell.claims.stop()
    for task in list(shell._tasks):
        task.cancel()
    await asyncio.gather(*shell._tasks, return_exceptions=True)
    await shell._bus.close()


async def test_two_routers_share_and_one_takes_over_when_the_other_dies(world: World):
    r0 = await world.router("r0")
    await owns_all(r0)
    r1 = await world.router("r1")
    await until(lambda: len(r1.core.state.owned) > 80, what="the second gets its share")
    await owns_all(r0, r1)
    share = set(r1.core.state.owned)
    session = next(s for s in map(str, range(1000)) if partition_of("t", s, M) in share)
    p = await world.api.place(session)
    assert p.router == "r1"
    instance = world.a if p.iid == "a" else world.b
    await instance.complete(p, session)
    key = key_of("t", session, M)[0]
    await until(lambda: r1.core.record(key) is not None and r1.dirty == 0)
    await vanish(r1)
    world.shells.remove(r1)
    q = await world.api.place(session)
    assert q.router == "r0"
    assert q.iid == p.iid, "affinity is read from the bucket"
    assert q.fence.owner_rev > p.fence.owner_rev
    await owns_all(r0)


async def test_a_router_that_leaves_in_order_is_not_missed(world: World):
    r0 = await world.router("r0")
    r1 = await world.router("r1")
    await until(lambda: r0.core.state.owned and r1.core.state.owned)
    await owns_all(r0, r1)
    await r1.close()
    world.shells.remove(r1)
    await owns_all(r0)
    assert not r1.core.state.owned


async def test_a_stale_instance_is_probed_over_the_bus(world: World):
    shell = await world.router(tau_s=30.0)
    await owns_all(shell)
    await until(lambda: not shell.not_ready())
    await world.a.complete(await world.api.place("s"), "s")
    await until(lambda: shell.core.state.leases.books.installed == 1)
    world.silent.add("a")
    await until(lambda: shell.core.state.cluster.health("a", shell._clock.now()) == "stale")
    p = await world.api.place("s")
    assert (p.iid, p.via) == ("a", "lease")
    assert world.a.probes == 1


async def test_the_view_falls_silent_and_the_router_listens_itself(connect: Connect):
    world = await World(connect).start()
    shell = await world.router()
    try:
        await owns_all(shell)
        await world.view()
        await until(lambda: not shell.not_ready())
        await until(lambda: shell._follow_sub is not None, what="it subscribes to snapshots")
        for i in range(10):
            await world.a.speak()
            await asyncio.sleep(0.05)
            assert (await world.api.place(f"s{i}")) is not None
        await until(lambda: shell.core.state.cluster.health("b", shell._clock.now()) == "stale")
        await world.view()
        await until(lambda: shell._follow_sub is None, what="it stops when the view is back")
    finally:
        await shell.close()


async def test_late_duplicated_reordered_and_lost_views_change_nothing_that_is_newer(connect: Connect):
    world = await World(connect).start()
    shell = await world.router()

    def queued() -> int:
        instance = shell.core.state.cluster.get("a")
        return -1 if instance is None else instance.models[M].queued

    def view(version: int, snapshot: Snapshot, epoch: str = "e", full: bool = False) -> bytes:
        views = (InstanceView(snapshot=snapshot, age_ms=0, health="ok"),)
        return encode(ClusterView(telemetry="t0", epoch=epoch, version=version, at_ms=0, full=full, instances=views))

    def load(version: int, n: int) -> Snapshot:
        models = (ModelState(name=M, state="active", max_running=8, queued=n),)
        return Snapshot(
            iid="a", epoch="1", version=version, at_ms=version, pool="cold", status="ready", models=models, max_queued=64
        )  # fmt: skip

    try:
        await owns_all(shell)
        said = [
            view(1, load(1, 1), full=True),
            view(2, load(5, 5)),
            view(2, load(9, 9)),  # a version that was seen
            view(1, load(9, 9)),  # and an older one
            view(3, load(4, 4)),  # an older snapshot in a newer view
            view(7, load(6, 6)),  # 4, 5 and 6 are lost
            view(1, load(2, 2), epoch="f"),  # a telemetry that has restarted and knows less
        ]
        for data in said:
            await world.bus.publish(subjects.CLUSTER, data)
        await until(lambda: shell.core.state.cluster.version == 1 and queued() == 6)
        assert shell.core.state.cluster.gaps == 3
        await world.bus.publish(subjects.CLUSTER, view(2, load(7, 7), epoch="f"))
        await until(lambda: queued() == 7)
        assert (await world.api.place("s")).iid == "a"
    finally:
        await shell.close()


async def test_malformed_messages_are_counted_and_survived(world: World):
    shell = await world.router()
    await owns_all(shell)
    for subject in (subjects.route(3), subjects.CLUSTER, subjects.completion("a")):
        await world.bus.publish(subject, b"{")
    await until(lambda: shell.malformed == 3)
    await until(lambda: not shell.not_ready())
    assert (await world.api.place("s")) is not None


async def test_metrics(world: World):
    shell = await world.router()
    await owns_all(shell)
    await until(lambda: not shell.not_ready())
    await world.api.place("s")
    registry = CollectorRegistry()
    registry.register(RouterCollector(shell, SystemClock()))
    text = generate_latest(registry).decode()
    assert 'talaria_router_placements_total{via="cost"} 1.0' in text
    assert "talaria_router_partitions 256.0" in text
