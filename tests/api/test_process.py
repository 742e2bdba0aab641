"""`python -m talaria_api` as a process, on a real NATS."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from talaria_common.bus import NatsBus
from tests.api.doubles import FakeInstance, FakeRouter, FakeTelemetry, Held, answers
from tests.support.nats_server import NatsServer

CONFIG = """
[log]
format = "json"
[models.m]
source = "tiny-qwen3"
[mesh]
heartbeat_s = 0.2
"""
BODY = {"model": "m", "messages": [{"role": "user", "content": "x"}], "stream": True}


class Running:
    """One api process."""

    def __init__(self, process: asyncio.subprocess.Process, url: str, log: Path) -> None:
        self.process = process
        self.url = url
        self.log = log

    async def ready(self) -> None:
        async with asyncio.timeout(40), httpx.AsyncClient() as http:
            while True:
                assert self.process.returncode is None, self.log.read_text()
                with contextlib.suppress(httpx.TransportError):
                    if (await http.get(self.url + "/readyz")).status_code == 200:
                        return
                await asyncio.sleep(0.05)

    async def live(self) -> None:
        async with asyncio.timeout(40), httpx.AsyncClient() as http:
            while True:
                with contextlib.suppress(httpx.TransportError):
                    if (await http.get(self.url + "/livez")).status_code == 200:
                        return
                await asyncio.sleep(0.05)


async def start(directory: Path, nats_url: str, *args: str, config: str = CONFIG, port: int = 0) -> Running:
    file = directory / "talaria.toml"
    file.write_text(config)
    if not port:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
    log = directory / "api.log"
    with log.open("wb") as out:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "talaria_api",
            "--config",
            str(file),
            *args,
            stderr=out,
            stdout=out,
            env=os.environ | {"TALARIA_BUS__URL": nats_url, "TALARIA_API__PORT": str(port)},
        )
    return Running(process, f"http://127.0.0.1:{port}", log)


@contextlib.asynccontextmanager
async def peers(url: str, behave: object = answers) -> AsyncIterator[FakeInstance]:
    bus = await NatsBus.connect(url, name="peers")
    await FakeRouter(bus, ["i-0"]).start()
    instance = await FakeInstance(bus, "i-0", behave).start()  # type: ignore[arg-type]
    telemetry = await FakeTelemetry(bus).start()
    yield instance
    telemetry.stop()
    instance.stop()
    await bus.close()


async def test_serves_and_stops_in_order(tmp_path: Path, nats_url: str) -> None:
    more = asyncio.Event()

    async def waits(held: Held) -> None:
        await held.accept()
        await held.delta("one")
        await more.wait()
        await held.final("two")

    async with peers(nats_url, waits) as instance:
        api = await start(tmp_path, nats_url, "--id", "api-7")
        await api.ready()
        async with httpx.AsyncClient() as http, http.stream("POST", api.url + "/v1/chat/completions", json=BODY) as r:
            lines = r.aiter_lines()
            await anext(lines)
            assert instance.held[0].head.api.startswith("api-7-")
            api.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(httpx.TransportError):
                async with asyncio.timeout(30), httpx.AsyncClient() as other:
                    while True:
                        await other.get(api.url + "/livez")
                        await asyncio.sleep(0.02)
            more.set()
            assert "data: [DONE]" in [line async for line in lines]
        assert await asyncio.wait_for(api.process.wait(), 30) == 0, api.log.read_text()
    assert "Traceback" not in api.log.read_text()


async def test_comes_up_before_nats(tmp_path: Path, nats_server: NatsServer) -> None:
    nats_server.stop()
    api = await start(tmp_path, nats_server.url)
    await api.live()
    async with httpx.AsyncClient() as http:
        answer = await http.get(api.url + "/readyz")
        assert (answer.status_code, answer.json()["reasons"]) == (503, ["bus: not connected"])
        waiting = asyncio.create_task(http.post(api.url + "/v1/chat/completions", json=BODY, timeout=20))
        await asyncio.sleep(0.2)
        nats_server.start()
        async with peers(nats_server.url):
            assert (await waiting).status_code == 200  # what came too early has waited
            await api.ready()
            api.process.send_signal(signal.SIGINT)
            assert await asyncio.wait_for(api.process.wait(), 30) == 0


async def test_stops_while_it_waits_for_nats(tmp_path: Path) -> None:
    api = await start(tmp_path, "nats://127.0.0.1:9")
    await api.live()
    api.process.terminate()
    assert await asyncio.wait_for(api.process.wait(), 30) == 0, api.log.read_text()


async def test_a_taken_port_is_said(tmp_path: Path) -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        api = await start(tmp_path, "nats://127.0.0.1:9", port=s.getsockname()[1])
        assert await asyncio.wait_for(api.process.wait(), 30) == 1
    assert "cannot listen on 127.0.0.1" in api.log.read_text()


@pytest.mark.parametrize(("config", "args"), [("[api]\nporrt = 1\n", ()), (CONFIG, ("--id", "a b"))])
async def test_a_wrong_configuration_is_said(tmp_path: Path, config: str, args: tuple[str, ...]) -> None:
    api = await start(tmp_path, "nats://127.0.0.1:9", *args, config=config)
    assert await asyncio.wait_for(api.process.wait(), 30) == 2
    said = api.log.read_text()
    assert "porrt" in said or "a b" in said
    assert "Traceback" not in said


async def test_killed_and_started_again_it_hears_nothing_of_its_earlier_life(tmp_path: Path, nats_url: str) -> None:
    async def waits(held: Held) -> None:
        await held.accept()
        await held.delta("one")

    async with peers(nats_url, waits) as instance:
        api = await start(tmp_path, nats_url)
        await api.ready()
        async with httpx.AsyncClient() as http, http.stream("POST", api.url + "/v1/chat/completions", json=BODY) as r:
            lines = r.aiter_lines()
            await anext(lines)
            api.process.kill()
            with pytest.raises(httpx.RemoteProtocolError):
                [line async for line in lines]
        again = await start(tmp_path, nats_url)
        await again.ready()
        old = instance.held[0]
        instance.behave = answers
        async with httpx.AsyncClient() as http:
            await old.delta("two")
            answer = await http.post(again.url + "/v1/chat/completions", json=BODY | {"stream": False})
            assert answer.json()["choices"][0]["message"]["content"] == "Hello, wörld"
        assert instance.held[1].head.api != old.head.api
        again.process.terminate()
        assert await asyncio.wait_for(again.process.wait(), 30) == 0
