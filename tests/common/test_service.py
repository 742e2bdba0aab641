"""The process shell, in processes of its own: signals and exit codes are what counts."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import textwrap
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from tests.support.nats_server import NatsServer

Start = Callable[..., Awaitable["Program"]]


class Program:
    """A service in a process; its log lines are JSON."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.lines: list[dict[str, object]] = []

    async def says(self, event: str, timeout_s: float = 30) -> dict[str, object]:
        """The next log line whose event has `event` in it."""
        assert self.process.stderr is not None
        async with asyncio.timeout(timeout_s):
            while raw := await self.process.stderr.readline():
                try:
                    line = json.loads(raw)
                except ValueError:
                    line = {"event": raw.decode()}
                self.lines.append(line)
                if event in str(line["event"]):
                    return line
        raise AssertionError(f"it ended without saying {event!r}: {self.lines}")

    async def ends(self, timeout_s: float = 30) -> int:
        return await asyncio.wait_for(self.process.wait(), timeout_s)


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    running: list[asyncio.subprocess.Process] = []

    async def one(main: str, settings: str = "") -> Program:
        code = f"""
            import asyncio, sys
            from talaria_common import service
            from talaria_common.metrics import Metrics
            from talaria_common.settings import parse
            import tomllib
            async def main(process):
                log = service.log
            {textwrap.indent(textwrap.dedent(main), " " * 4).replace(chr(10), chr(10) + " " * 12)}
            sys.exit(service.run(main, "part-0", parse(tomllib.loads({settings!r}))))
        """
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", textwrap.dedent(code), stderr=asyncio.subprocess.PIPE, cwd=tmp_path
        )
        running.append(process)
        return Program(process)

    yield one
    for process in running:
        if process.returncode is None:
            process.kill()
        await process.communicate()


WAIT = """
log.info("up")
await process.stop.wait()
log.info("leaving")
"""


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_it_in_order(start: Start, sig: signal.Signals):
    program = await start(WAIT)
    up = await program.says("up")
    assert up["part"] == "part-0"
    assert up["epoch"]
    program.process.send_signal(sig)
    await program.says("leaving")
    await program.says("stopped")
    assert await program.ends() == 0


async def test_a_second_interrupt_ends_it_at_once(start: Start):
    program = await start("""
        log.info("up")
        await process.stop.wait()
        log.info("stuck")
        await asyncio.sleep(3600)
    """)
    await program.says("up")
    program.process.send_signal(signal.SIGINT)
    await program.says("stuck")
    program.process.send_signal(signal.SIGINT)
    assert await program.ends() == 130


async def test_an_end_that_takes_too_long_is_cut_off(start: Start):
    program = await start("""
        service.GRACE_S = 0.1
        log.info("up")
        await asyncio.sleep(3600)
    """)
    await program.says("up")
    program.process.send_signal(signal.SIGTERM)
    await program.says("did not stop in time")
    assert await program.ends() == 1


async def test_a_background_task_that_dies_takes_the_process_with_it(start: Start):
    program = await start("""
        async def fail():
            raise RuntimeError("broken heart")
        process.spawn(fail(), "heartbeat")
        await process.stop.wait()
    """)
    line = await program.says("a background task died")
    assert line["task"] == "heartbeat"
    assert "broken heart" in json.dumps(line)
    assert await program.ends() == 1


async def test_a_background_task_that_ends_is_no_failure(start: Start):
    program = await start("""
        process.spawn(asyncio.sleep(0), "short")
        process.spawn(asyncio.sleep(3600), "long")
        await asyncio.sleep(0.05)
    """)
    await program.says("stopped")
    assert await program.ends() == 0


async def test_a_main_that_fails_exits_with_1(start: Start):
    program = await start('raise RuntimeError("no start")')
    line = await program.says("failed")
    assert "no start" in json.dumps(line)
    assert await program.ends() == 1


async def test_it_waits_for_the_bus_and_says_so(start: Start, nats_server: NatsServer):
    nats_server.stop()
    settings = f'bus.url = "{nats_server.url}"'
    program = await start(
        """
        service.BUS_RETRY_S = 0.05
        bus = await process.connect_bus()
        log.info("connected")
        await process.stop.wait()
        await bus.close()
        """,
        settings,
    )
    line = await program.says("waiting for the message bus")
    assert nats_server.url in str(line["error"])
    nats_server.start()
    await program.says("connected")
    program.process.send_signal(signal.SIGTERM)
    assert await program.ends() == 0


async def test_it_can_be_stopped_while_it_waits_for_the_bus(start: Start, unused_tcp_port: int):
    program = await start("await process.connect_bus()", f'bus.url = "nats://127.0.0.1:{unused_tcp_port}"')
    await program.says("waiting for the message bus")
    program.process.send_signal(signal.SIGTERM)
    await program.says("stopped before it was up")
    assert await program.ends() == 0


async def test_it_serves_metrics_where_the_settings_say(start: Start, unused_tcp_port: int):
    program = await start(
        """
        port = await process.observe(Metrics("x").registry, lambda: ["warming up"])
        log.info("up", port=port)
        await process.stop.wait()
        """,
        f'mesh.metrics_ports = {{ "part-0" = {unused_tcp_port} }}',
    )
    assert (await program.says("up"))["port"] == unused_tcp_port
    url = f"http://127.0.0.1:{unused_tcp_port}/livez"
    body = await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=10).read())
    assert json.loads(body) == {"live": True}
    program.process.send_signal(signal.SIGTERM)
    assert await program.ends() == 0
