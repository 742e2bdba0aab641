"""Router and telemetry as processes on a real server: kill -9, restart, an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from talaria_common import subjects
from talaria_common.bus import KvWatch, Message, NatsBus
from talaria_common.ids import PARTITIONS
from talaria_common.wire import decode
from talaria_router.ownership import Claim
from tests.router.mesh import Api, Instance
from tests.support.nats_server import NatsServer
from tests.support.waiting import Inbox, until

TOML = """
[bus]
url = "{url}"
[mesh]
heartbeat_s = 0.5
[router]
tau_s = 30.0
[models.m]
source = "smollm2"
"""


class Processes:
    def __init__(self, directory: Path, url: str) -> None:
        self.config = directory / "talaria.toml"
        self.config.write_text(TOML.format(url=url))
        self.directory = directory
        self.running: list[asyncio.subprocess.Process] = []

    async def start(self, part: str, name: str) -> asyncio.subprocess.Process:
        log = (self.directory / f"{name}-{len(self.running)}.log").open("wb")
        argv = ["-m", f"talaria_{part}", "--config", str(self.config), "--id", name]
        process = await asyncio.create_subprocess_exec(sys.executable, *argv, stdout=log, stderr=log)
        log.close()
        self.running.append(process)
        return process

    async def end(self) -> None:
        for process in self.running:
            if process.returncode is None:
                process.kill()
            await process.wait()


@pytest.fixture
async def mesh(tmp_path: Path, nats_url: str) -> AsyncIterator[tuple[Processes, Api, dict[str, Instance]]]:
    bus = await NatsBus.connect(nats_url)
    instances = {iid: await Instance(bus, iid).start() for iid in "ab"}
    beating = asyncio.ensure_future(beat(instances))
    processes = Processes(tmp_path, nats_url)
    yield processes, Api(bus), instances
    beating.cancel()
    await processes.end()
    await bus.close()


async def beat(instances: dict[str, Instance]) -> None:
    while True:
        for instance in instances.values():
            await instance.speak()
        await asyncio.sleep(0.1)


async def serve(api: Api, instances: dict[str, Instance], session: str) -> Any:
    """One whole call."""
    p = await api.place(session)
    instances[p.iid].take(p)
    await instances[p.iid].complete(p, session)
    return p


class Agents:
    """Sessions that call again and again, until they are told to stop; `homes` says where each call went.

    A call that failed ends the test at once, at the next wait for something that `holds`.
    """

    def __init__(self, count: int, api: Api, instances: dict[str, Instance]) -> None:
        self.homes: dict[str, list[str]] = {f"s{i}": [] for i in range(count)}
        self.served: Counter[str] = Counter()
        """Calls by router."""
        self._api, self._instances = api, instances
        self._stop = asyncio.Event()
        self._tasks = [asyncio.ensure_future(self._calls(session)) for session in self.homes]

    async def _calls(self, session: str) -> None:
        while not self._stop.is_set():
            p = await serve(self._api, self._instances, session)
            self.homes[session].append(p.iid)
            self.served[p.router] += 1
            await asyncio.sleep(0.2)

    async def until(self, holds: Callable[[], object], what: str) -> None:
        def looked() -> object:
            for task in self._tasks:
                if task.done():
                    task.result()
            return holds()

        await until(looked, 30, what)

    async def all_go_on(self, calls: int = 4) -> None:
        marks = {session: len(homes) for session, homes in self.homes.items()}
        await self.until(lambda: all(len(self.homes[s]) >= n + calls for s, n in marks.items()), "every agent goes on")

    async def stop(self) -> None:
        self._stop.set()
        await asyncio.gather(*self._tasks)


async def test_kill_9_of_the_router_and_of_telemetry(mesh: Any):
    processes, api, instances = mesh
    telemetry = await processes.start("telemetry", "telemetry-0")
    router = await processes.start("router", "router-0")
    sessions = [f"s{i}" for i in range(20)]
    home = {s: (await serve(api, instances, s)).iid for s in sessions}
    again = {s: await serve(api, instances, s) for s in sessions}
    assert {s: p.iid for s, p in again.items()} == home
    assert {p.via for p in again.values()} == {"lease"}

    telemetry.kill()
    await telemetry.wait()
    for _ in range(3):
        for s in sessions:
            assert (await serve(api, instances, s)).iid == home[s], "without telemetry no call is lost"
        await asyncio.sleep(0.8)  # in all longer than its view lives

    router.kill()
    await router.wait()
    await processes.start("router", "router-0")
    back = {s: await serve(api, instances, s) for s in sessions}
    stayed = sum(back[s].iid == home[s] for s in sessions)
    assert stayed >= 19, "at least 95% return to where their KV is"
    assert all(back[s].fence.owner_rev > again[s].fence.owner_rev for s in sessions)


@pytest.mark.soak  # tests/chaos/test_router_pair.py asks more of real parts
async def test_two_routers_one_is_killed_under_load(mesh: Any):
    processes, api, instances = mesh
    await processes.start("telemetry", "telemetry-0")
    routers = [await processes.start("router", f"router-{n}") for n in (0, 1)]
    agents = Agents(24, api, instances)
    await agents.until(lambda: set(agents.served) == {"router-0", "router-1"}, "both routers route")
    await agents.all_go_on()
    before = {s: h[-1] for s, h in agents.homes.items()}
    routers[1].kill()
    await routers[1].wait()
    agents.served.clear()
    await agents.all_go_on()
    assert agents.served["router-0"]
    await agents.stop()
    stayed = sum(agents.homes[s][-1] == before[s] for s in before)
    assert stayed >= 23


async def test_routers_join_and_leave_and_telemetries_come_and_go_under_load(mesh: Any):
    """A third router joins, one leaves in order, one of two telemetries is cut off for a while and then dies."""
    processes, api, instances = mesh
    telemetries = [await processes.start("telemetry", f"telemetry-{n}") for n in (0, 1)]
    routers = [await processes.start("router", f"router-{n}") for n in (0, 1)]
    agents = Agents(40, api, instances)
    await agents.until(lambda: len(agents.served) == 2, "both routers route")
    await agents.all_go_on()
    before = {s: h[-1] for s, h in agents.homes.items()}

    await processes.start("router", "router-2")
    await agents.until(lambda: agents.served["router-2"], "the third gets its share")
    await agents.all_go_on()
    telemetries[1].send_signal(signal.SIGSTOP)
    routers[0].send_signal(signal.SIGTERM)
    assert await asyncio.wait_for(routers[0].wait(), 15) == 0
    await agents.all_go_on()
    agents.served.clear()  # what it said last has been read by now
    await agents.until(lambda: len(agents.served) == 2, "the others route")
    await agents.all_go_on()
    assert set(agents.served) == {"router-1", "router-2"}
    telemetries[1].send_signal(signal.SIGCONT)  # what it says first is old
    await agents.all_go_on()
    telemetries[0].kill()
    await telemetries[0].wait()
    await agents.all_go_on()
    await agents.stop()
    stayed = sum(set(homes[-4:]) == {before[s]} for s, homes in agents.homes.items())
    assert stayed >= 38, "at least 95% kept their place"


class Partitions:
    """What routers do with the bucket: `written` holds all that they asked of it, what it refused too."""

    def __init__(self) -> None:
        self.written: dict[str, list[str]] = {}
        self.beats: Counter[str] = Counter()
        self.owner: dict[str, str] = {}

    def hear(self, message: Message) -> None:
        key = message.subject.removeprefix(f"$KV.{subjects.KV_PARTITIONS}.")
        if key.startswith("p."):
            self.written.setdefault(key, []).append(decode(message.data, Claim).owner)
        else:
            self.beats[key] += 1

    async def follow(self, watch: KvWatch) -> None:
        async for key, entry in watch:
            if key.startswith("p.") and entry is not None:
                self.owner[key] = decode(entry.value, Claim).owner

    def share(self, router: str) -> int:
        return sum(owner == router for owner in self.owner.values())

    def shared(self) -> bool:
        """Two routers own everything, each its part."""
        return self.share("router-0") + self.share("router-1") == PARTITIONS and 90 < self.share("router-0") < 166


@contextlib.asynccontextmanager
async def partitions(url: str) -> AsyncIterator[Partitions]:
    bus = await NatsBus.connect(url)  # one connection for both: what was asked is heard before what came of it
    it = Partitions()
    await bus.subscribe(f"$KV.{subjects.KV_PARTITIONS}.>", it.hear)
    watch = await (await bus.kv(subjects.KV_PARTITIONS)).watch()
    following = asyncio.ensure_future(it.follow(watch))
    try:
        yield it
    finally:
        following.cancel()
        await bus.close()


async def test_a_router_that_stood_still_takes_nothing_from_another(mesh: Any, nats_url: str):
    """It has heard nobody meanwhile; that is not the others' silence. What it lost is given back to it, in order."""
    processes, _, _ = mesh
    async with partitions(nats_url) as seen:
        sleeper, _ = [await processes.start("router", f"router-{n}") for n in (0, 1)]
        await until(seen.shared, 30, "each has its share")
        share = seen.share("router-0")
        sleeper.send_signal(signal.SIGSTOP)
        await until(lambda: seen.share("router-1") == PARTITIONS, 30, "the other has taken over")
        beats = seen.beats["r.router-1"]
        await until(lambda: seen.beats["r.router-1"] > beats + 3, 30, "more than a dead one may miss")
        marks = {p: len(written) for p, written in seen.written.items()}
        sleeper.send_signal(signal.SIGCONT)
        await until(lambda: seen.share("router-0") == share, 30, "it has its share again")
        later = {tuple(written[marks[p] :]) for p, written in seen.written.items()}
        assert later == {(), ("", "router-0")}, "released first, never taken"


async def test_a_bus_that_hangs_moves_no_partition(nats_server: NatsServer, tmp_path: Path):
    processes = Processes(tmp_path, nats_server.url)
    try:
        async with partitions(nats_server.url) as seen:
            for n in (0, 1):
                await processes.start("router", f"router-{n}")
            await until(seen.shared, 30, "each has its share")
            before = {p: list(written) for p, written in seen.written.items()}
            os.kill(nats_server.pid, signal.SIGSTOP)
            await asyncio.sleep(4.0)  # more than twice what a death takes to be noticed
            os.kill(nats_server.pid, signal.SIGCONT)
            have = dict(seen.beats)
            await until(lambda: all(seen.beats[r] > n + 12 for r, n in have.items()), 30, "both beat again")
            assert seen.written == before
    finally:
        await processes.end()


async def test_an_orderly_end_exits_0(mesh: Any):
    processes, api, instances = mesh
    telemetry = await processes.start("telemetry", "telemetry-0")
    router = await processes.start("router", "router-0")
    views = Inbox()
    await api.bus.subscribe(subjects.CLUSTER, views)
    await serve(api, instances, "s")
    await views.wait(1)
    for process in (router, telemetry):
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 15) == 0


@pytest.mark.parametrize("part", ["router", "telemetry"])
async def test_a_bad_configuration_exits_2_and_names_the_key(part: str, tmp_path: Path):
    config = tmp_path / "t.toml"
    config.write_text('[router]\npolicy = "best"\n[telemetry]\nfull_every = 0\n')
    argv = ["-m", f"talaria_{part}", "--config", str(config)]
    process = await asyncio.create_subprocess_exec(sys.executable, *argv, stderr=asyncio.subprocess.PIPE)
    _, err = await process.communicate()
    assert process.returncode == 2
    assert b"full_every" in err
