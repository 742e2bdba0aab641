"""Telemetry on a bus, in memory and on NATS."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from talaria_common import subjects
from talaria_common.bus import Bus, MemoryBus, MemoryHub
from talaria_common.clock import SystemClock, to_ms
from talaria_common.settings import parse
from talaria_common.wire import ClusterView, Completion, Event, ModelState, Presence, Snapshot, decode, encode
from talaria_telemetry.shell import TelemetryShell
from tests.support.waiting import Inbox, until

SETTINGS = parse(
    {
        "mesh": {"heartbeat_s": 0.1},
        "models": {"m": {"source": "smollm2"}},
        "instances": [{"id": "cold-0", "pool": "cold", "models": ["m"]}],
    }
)


class World:
    def __init__(self, ours: Bus, theirs: Bus) -> None:
        self.ours, self.theirs = ours, theirs
        self.registry = CollectorRegistry()
        self.shell = TelemetryShell(ours, SETTINGS, SystemClock(), "e", self.registry)
        self.views, self.events = Inbox(), Inbox()
        self.version = 0

    def snapshot(self, iid: str = "cold-0", **more: Any) -> Snapshot:
        self.version += 1
        models = (ModelState(name="m", state="active", queued=3, running=2),)
        more = {"epoch": "1", "version": self.version, "models": models, "pool": "cold", "status": "ready"} | more
        return Snapshot(iid=iid, at_ms=to_ms(SystemClock().now()), **more)

    async def speak(self, snapshot: Snapshot, subject: str | None = None) -> None:
        await self.theirs.publish(subject or subjects.snapshot(snapshot.iid), encode(snapshot))

    async def well(self, iid: str = "cold-0", **more: Any) -> None:
        """Speak until it is shown as well: a single snapshot may be old before anybody looks at it."""
        async with asyncio.timeout(20):
            while (seen := self.last().get(iid)) is None or seen.health != "ok":
                await self.speak(self.snapshot(iid, **more))
                await asyncio.sleep(0.05)

    def last(self) -> dict[str, Any]:
        """The picture that the views add up to."""
        picture: dict[str, Any] = {}
        for data in self.views.data:
            view = decode(data, ClusterView)
            picture = {i: v for i, v in picture.items() if not view.full or i in view.members}
            picture |= {v.snapshot.iid: v for v in view.instances}
            for iid in view.removed:
                picture.pop(iid, None)
        return picture


@pytest.fixture
async def world(bus_pair: tuple[Bus, Bus]) -> AsyncIterator[World]:
    world = World(*bus_pair)
    await world.theirs.subscribe(subjects.CLUSTER, world.views)
    await world.theirs.subscribe(subjects.ALL_EVENTS, world.events)
    await world.shell.start()
    await world.ours.flush()
    yield world
    assert not world.shell.failed.is_set()
    await world.shell.close()


async def test_snapshots_become_views_events_and_metrics(world: World):
    await until(lambda: world.last().get("cold-0"), what="the expected instance is shown")
    assert world.last()["cold-0"].health == "gone"
    await world.well()

    def told() -> list[str]:
        events = [decode(d, Event) for d in world.events.data]
        assert {e.kind for e in events} == {"health"}
        return [e.data["to"] for e in events]

    await until(lambda: told()[-1] in {"stale", "gone"}, what="silence is noticed")
    assert told()[told().index("ok") + 1] == "stale"
    await until(lambda: world.last()["cold-0"].health in {"stale", "gone"})
    text = generate_latest(world.registry).decode()
    assert 'talaria_model_queued{instance="cold-0",model="m"} 3.0' in text
    assert 'talaria_instance_up{instance="cold-0",pool="cold"} 0.0' in text


async def test_the_event_stream_is_there_and_covers_events_only(world: World):
    await until(lambda: world.shell.stream_ready)
    assert world.shell.not_ready() == []
    await world.speak(world.snapshot())
    await until(lambda: world.events.messages)
    with pytest.raises(Exception, match=r"nobody|no answer"):
        await world.theirs.request(subjects.route(1), b"{}", timeout_s=0.3)


async def test_presence_is_followed(world: World):
    kv = await world.theirs.kv(subjects.KV_INSTANCES)
    await kv.put("late-1", encode(Presence(iid="late-1", epoch="1", pool="hot", models=("m",))))
    await until(lambda: "late-1" in world.last())
    await world.well("late-1", pool="hot")
    await kv.delete("late-1")
    await until(lambda: "late-1" not in world.last())


async def test_malformed_and_misplaced_messages_are_counted_and_survived(world: World):
    await world.theirs.publish(subjects.snapshot("x"), b"nonsense")
    await world.theirs.publish(subjects.completion("x"), b"[]")
    await world.speak(world.snapshot("other"), subjects.snapshot("x"))
    await until(lambda: world.shell.malformed == 3)
    await world.well()
    assert "other" not in world.last()


async def test_completions_add_up(world: World):
    c = Completion(
        iid="cold-0", epoch="1", rid="r", attempt=0, router="r0", seq=1, partition=0, tenant="t", session="s", model="m",
        ok=True, prompt_tokens=100, cached_tokens=60, cache_source="device", completion_tokens=7, ttft_ms=50, at_ms=0,
    )  # fmt: skip
    await world.theirs.publish(subjects.completion("cold-0"), encode(c))
    line = 'talaria_cached_tokens_total{instance="cold-0",model="m",source="device"} 60.0'
    await until(lambda: line in generate_latest(world.registry).decode())


async def test_what_the_bus_does_not_carry_goes_out_in_pages_and_ends_nothing() -> None:
    hub = MemoryHub(max_payload_bytes=1 << 16)
    world = World(MemoryBus(hub), MemoryBus(hub))
    await world.theirs.subscribe(subjects.CLUSTER, world.views)
    await world.shell.start()
    try:
        for n in range(400):
            await world.speak(world.snapshot(f"cold-{n:04}"))
        await until(lambda: len(world.last()) == 401)  # and the configured one
        room = (1 << 16) - len(encode(world.snapshot("huge")))
        await world.speak(world.snapshot("huge", reason="x" * (room - 30)))  # as a part of a view it is too large
        count = len(world.views.data)
        await until(lambda: "huge" in world.shell.core.instances)
        await world.views.wait(count + 20)
        assert "huge" not in world.last()
        assert len(world.last()) == 401, "the others are told of none the less"
        assert not world.shell.failed.is_set()
    finally:
        await world.shell.close()


async def test_versions_rise_by_one(world: World):
    await world.views.wait(5)
    versions = [decode(d, ClusterView).version for d in world.views.data]
    assert versions == list(range(versions[0], versions[0] + len(versions)))


async def test_the_stream_and_a_full_view_come_back_with_the_server(nats_server: Any):
    from talaria_common.bus import NatsBus

    ours, theirs = await NatsBus.connect(nats_server.url), await NatsBus.connect(nats_server.url)
    world = World(ours, theirs)
    await world.theirs.subscribe(subjects.CLUSTER, world.views)
    await world.shell.start()
    try:
        await until(lambda: world.shell.stream_ready)
        await world.views.wait(2)
        nats_server.stop()
        await until(lambda: not ours.connected)
        assert "the message bus is away" in world.shell.not_ready()
        sent = world.shell.core.version
        await asyncio.sleep(4 * world.shell.settings.mesh.heartbeat_s)
        assert world.shell.core.version == sent, "nothing is said to nobody"
        count = len(world.views.messages)
        nats_server.start()
        await until(lambda: world.shell.not_ready() == [], timeout_s=30)
        await world.views.wait(count + 1, timeout_s=30)
        first = decode(world.views.data[count], ClusterView)
        assert first.full, "whoever missed something sees everything"
        assert first.version == sent + 1
    finally:
        await world.shell.close()
        await asyncio.gather(ours.close(), theirs.close())
