"""The instance as a process on a real NATS server: signals, deaths, restarts of the server."""

import asyncio
import contextlib
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from talaria_common import subjects
from talaria_common.bus import MemoryHub, NatsBus
from talaria_common.wire import Presence, decode
from tests.instance.double import IID, Api, Running, alive, environment, instance_command, write_config
from tests.support.waiting import until


class Process:
    """`python -m talaria_instance`, its output kept in memory."""

    def __init__(self, config):
        self._process = subprocess.Popen(
            instance_command(config), env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.output = []
        self._reader = threading.Thread(target=lambda: self.output.extend(self._process.stdout), daemon=True)
        self._reader.start()
        self.pid = self._process.pid

    def signal(self, number):
        self._process.send_signal(number)

    async def exit(self, timeout_s=20):
        code = await asyncio.to_thread(self._process.wait, timeout_s)
        self._reader.join(5)
        return code

    def end(self):
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        self._process.wait(10)
        self._reader.join(5)
        self._process.stdout.close()


def children(pid):
    """Pids of the processes whose parent is `pid`."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if int(stat.read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(stat.parent.name))
    return found


@contextlib.asynccontextmanager
async def process(url, directory, **config):
    bus = await NatsBus.connect(url, name="test")
    api = await Api(bus).listen()
    it = Process(write_config(directory, url, **config))
    try:
        await api.ready()
        yield api, it
    finally:
        it.end()
        await bus.close()


async def test_a_life_from_start_to_sigterm(nats_url, tmp_path):
    async with process(nats_url, tmp_path) as (api, it):
        maps = await asyncio.to_thread(Path(f"/proc/{it.pid}/maps").read_text)
        assert "libtorch" not in maps
        assert "uvloop" in maps
        (engine,) = children(it.pid)
        rid = await api.call(max_tokens=50)
        await api.first_token(rid)
        it.signal(signal.SIGTERM)
        frames = await api.end_of(rid)
        assert frames[-1].finish_reason == "length"
        assert await it.exit() == 0
        assert not alive(engine)
        assert api.snapshots[-1].status == "draining"
        assert await (await api.bus.kv(subjects.KV_INSTANCES)).get(IID) is None


async def test_ctrl_c_is_like_sigterm(nats_url, tmp_path):
    async with process(nats_url, tmp_path) as (_, it):
        it.signal(signal.SIGINT)
        assert await it.exit() == 0
        assert not [line for line in it.output if "Traceback" in line]


async def test_a_killed_instance_takes_its_engine_along(nats_url, tmp_path):
    async with process(nats_url, tmp_path) as (api, it):
        (engine,) = children(it.pid)
        await api.first_token(await api.call(max_tokens=100_000))
        it.signal(signal.SIGKILL)
        await it.exit()
        await until(lambda: not alive(engine), what="the engine's end")


async def test_the_nats_server_restarts(nats_server, tmp_path):
    async with process(nats_server.url, tmp_path) as (api, it):
        (engine,) = children(it.pid)
        bucket = await api.bus.kv(subjects.KV_INSTANCES)
        async with asyncio.timeout(20):
            while (written := await bucket.get(IID)) is None:
                await asyncio.sleep(0.02)
        record = decode(written.value, Presence)
        running = await api.call(max_tokens=100_000)
        await api.first_token(running)
        await bucket.delete(IID)  # as a server that lost its store would
        nats_server.stop(kill=True)
        nats_server.start()
        have = len(api.snapshots)
        await until(lambda: api.bus.connected and len(api.snapshots) > have + 2, 20, "snapshots after the restart")
        shot = api.snapshots[-1]
        assert (shot.epoch, shot.status, shot.engine_restarts) == (record.epoch, "ready", 0)
        assert sum(m.running for m in shot.models) == 1  # the call went on meanwhile
        await until(lambda: any(running in (b.alive or []) for b in api.batches[-20:]))
        await api.cancel(running)
        await until(lambda: api.frames[running][-1].kind != "delta")
        for _ in range(100):
            with contextlib.suppress(Exception):  # JetStream takes its time after the connection stands
                entry = await bucket.get(IID)
                if entry is not None:
                    break
            await asyncio.sleep(0.1)
        assert decode(entry.value, Presence) == record
        await api.end_of(await api.call("after", max_tokens=3))
        assert children(it.pid) == [engine]


async def test_it_ends_in_order_without_a_bus(nats_server, tmp_path):
    async with process(nats_server.url, tmp_path, shutdown_s=0.2) as (api, it):
        (engine,) = children(it.pid)
        await api.first_token(await api.call(max_tokens=100_000))
        nats_server.stop(kill=True)
        await until(lambda: any("lost the message bus" in line for line in it.output), 20)
        it.signal(signal.SIGTERM)
        assert await it.exit() == 0, "".join(it.output[-6:])
        assert not alive(engine)


async def test_it_waits_for_a_bus_that_is_not_there(nats_server, tmp_path):
    url = nats_server.url
    nats_server.stop()
    it = Process(write_config(tmp_path, url))
    try:
        await until(lambda: any("waiting for the message bus" in line for line in it.output), 20)
        nats_server.start()
        bus = await NatsBus.connect(url, name="test")
        await (await Api(bus).listen()).ready()
        await bus.close()
        it.signal(signal.SIGTERM)
        assert await it.exit() == 0
    finally:
        it.end()


def test_mistakes_in_the_configuration(tmp_path):
    config = write_config(tmp_path)
    command = [sys.executable, "-m", "talaria_instance", "--config", str(config), "--id", "nobody"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, env=environment(), check=False)
    assert done.returncode == 2
    assert "nobody" in done.stderr
    assert "Traceback" not in done.stderr


async def test_a_bus_cut_off_for_a_while(tmp_path):
    hub = MemoryHub()
    ours, api = hub.connect(), await Api(hub.connect()).listen()
    instance = Running(ours, write_config(tmp_path))
    try:
        await api.ready()
        rid = await api.call(max_tokens=150)
        await api.first_token(rid)
        bucket = await api.bus.kv(subjects.KV_INSTANCES)
        hub.disconnect(ours)
        await bucket.delete(IID)
        assert instance.service.not_ready() == ["the message bus is away"]
        await until(lambda: not instance.service.core.calls)  # it ran to its end without an api to hear it
        ours.set_connected(True)
        await api.end_of(rid)
        have = len(api.snapshots)
        await until(lambda: len(api.snapshots) > have)
        for _ in range(200):
            if await bucket.get(IID) is not None:
                break
            await asyncio.sleep(0.01)
        assert await bucket.get(IID) is not None
        assert instance.service.not_ready() == []
    finally:
        await instance.stop()


GARBAGE = "import os, sys, time; os.write(int(sys.argv[-1]), b'\\4\\0\\0\\0abcd'); time.sleep(1000)"


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        (["sh", "-c", "exit 3"], "status 3"),
        (["sh", "-c", "kill -11 $$"], "SIGSEGV"),
        ([sys.executable, "-c", GARBAGE], "no report"),
        (["sh", "-c", "exec sleep 1000"], ""),
        (["/no/such/program"], "cannot be started"),
    ],
)
async def test_engines_that_never_get_ready(tmp_path, engine, said, monkeypatch):
    """Reported with the reason, started again, and the instance ends in order nonetheless."""
    monkeypatch.setattr("talaria_instance.engine_process.GRACE_S", 0.2)
    hub = MemoryHub()
    api = await Api(hub.connect()).listen()
    instance = Running(hub.connect(), write_config(tmp_path))
    instance.service.supervisor._command = engine
    try:
        if said:
            await until(lambda: any(s.engine_restarts >= 2 for s in api.snapshots), 20)
            assert said in next(s.reason for s in api.snapshots if s.status == "failed" and s.engine_restarts)
        else:
            await until(lambda: api.snapshots and api.snapshots[-1].reason == "the engine is starting")
        assert not (await api.send(api.place(), b"{}")).accepted
        pid = instance.engine_pid
    finally:
        await instance.stop()
    assert pid is None or not alive(pid)
