"""What a routed call costs the router's process over the real bus, beside a bare request-reply of the same size.

In turn, on one NATS server, from one client with 16 calls at a time: a request to a process that decodes nothing and
answers at once with as many bytes as a placement has; and whole calls as an api makes them (ask for the place, forward
the body, wait for the end) with telemetry, one router and one sim engine that takes no time, each session coming back
at once, so that nearly all are honoured leases. The client and the instance share the machine with the router, so
calls per second of wall time say little about it; calls per second of its CPU time are what one busy process does.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from bench.gateway.processes import Processes, free_port
from talaria_common import subjects
from talaria_common.bus import Message, NatsBus
from talaria_common.clock import SystemClock, to_ms
from talaria_common.errors import BusError
from talaria_common.ids import hash_id, new_epoch, new_rid, partition_of
from talaria_common.wire import (
    FORWARD_HEADER,
    ForwardHead,
    ForwardReply,
    RouteReply,
    RouteRequest,
    TokenBatch,
    decode,
    encode,
)

API, MODEL, ECHO = "bench-0", "fast", "bench.echo"
AT_ONCE = 16
BODY = json.dumps(
    {"model": MODEL, "max_tokens": 1, "messages": [{"role": "user", "content": "what is the time? " * 50}]}
).encode()
CONFIG = """
[bus]
url = {url}
[log]
level = "warning"
[router]
t_ttft_s = 1e6
[models.{model}]
source = "tiny-qwen3"
[[instances]]
id = "hot-0"
pool = "hot"
engine = "sim"
models = ["{model}"]
page_size = 1
max_running = 64
max_queued = 64
sim = {{ ttft_ms = 0, decode_step_ms = 0, max_running = 64, kv_capacity_tokens = 1000000, context_tokens = 100000 }}
"""


class Client:
    """Plays the api: one bus connection, a subscription for the frames of its calls."""

    def __init__(self, bus: NatsBus) -> None:
        self.bus = bus
        self.clock = SystemClock()
        self.epoch = new_epoch()
        self.ends: dict[str, asyncio.Future[None]] = {}
        self.sizes = (0, 0)
        """Bytes of the last ask and of its answer."""
        self.leases = 0

    async def start(self) -> None:
        """Listen for frames."""
        await self.bus.subscribe(subjects.tokens(API), self._frames)

    def _frames(self, message: Message) -> None:
        for frame in decode(message.data, TokenBatch).frames:
            if frame.kind == "delta":
                continue
            end = self.ends.pop(frame.rid, None)
            if end is None or end.done():
                continue
            if frame.error is not None:
                end.set_exception(RuntimeError(frame.error.message))
            else:
                end.set_result(None)

    async def call(self, session: str) -> None:
        """One whole call. Raises RuntimeError when it gets no place or no answer."""
        request = RouteRequest(
            rid=new_rid(), tenant="local", session=session, model=MODEL, api=API, prompt_bytes=len(BODY),
            deadline_ms=to_ms(self.clock.now() + 60),
        )  # fmt: skip
        ask = encode(request)
        answer = await self.bus.request(subjects.route(partition_of("local", session, MODEL)), ask, timeout_s=10)
        self.sizes = (len(ask), len(answer.data))
        placement = decode(answer.data, RouteReply).placement
        if placement is None:
            raise RuntimeError(answer.data.decode())
        self.leases += placement.via == "lease"
        head = ForwardHead(
            placement=placement, endpoint="chat", api=API, api_epoch=self.epoch, tenant="local", session=session,
            model=MODEL, stream=False, is_continuation=placement.continuation,
        )  # fmt: skip
        end = self.ends[request.rid] = asyncio.get_running_loop().create_future()
        headers = {FORWARD_HEADER: encode(head).decode()}
        taken = await self.bus.request(subjects.forward(placement.iid), BODY, timeout_s=10, headers=headers)
        reply = decode(taken.data, ForwardReply)
        if not reply.accepted:
            raise RuntimeError(taken.data.decode())
        await end

    async def bare(self, ask: bytes) -> None:
        """One request-reply."""
        await self.bus.request(ECHO, ask, timeout_s=10)


async def _window(seconds: float, pid: int, one: Any) -> tuple[int, float, float]:
    """(how many, wall seconds, CPU seconds of `pid`) of `one(worker)` in a closed loop of AT_ONCE workers."""
    process, done = psutil.Process(pid), 0
    until = time.monotonic() + seconds

    async def work(n: int) -> None:
        nonlocal done
        while time.monotonic() < until:
            await one(n)
            done += 1

    before, began = process.cpu_times(), time.monotonic()
    await asyncio.gather(*(work(n) for n in range(AT_ONCE)))
    wall, after = time.monotonic() - began, process.cpu_times()
    return done, wall, after.user + after.system - before.user - before.system


async def _ready(client: Client) -> None:
    """Until a call comes through."""
    for _ in range(300):
        try:
            await asyncio.wait_for(client.call(hash_id("warm")), 5)
        except (BusError, RuntimeError, TimeoutError):
            await asyncio.sleep(0.1)
        else:
            return
    raise RuntimeError("the mesh does not take calls")


async def _measure(url: str, echo_pid: int, router_pid: int, seconds: float) -> dict[str, float]:
    bus = await NatsBus.connect(url, name=API)
    try:
        client = Client(bus)
        await client.start()
        await _ready(client)
        sessions = [hash_id("session", str(n)) for n in range(AT_ONCE)]
        await _window(seconds / 4, router_pid, lambda n: client.call(sessions[n]))
        ask = b"x" * client.sizes[0]
        await bus.request(ECHO, b"%d" % client.sizes[1], timeout_s=10)
        client.leases = 0
        counts = [0, 0]
        walls, cpus = [0.0, 0.0], [0.0, 0.0]
        for _ in range(4):
            for which, pid, one in (
                (0, echo_pid, lambda _: client.bare(ask)),
                (1, router_pid, lambda n: client.call(sessions[n])),
            ):
                done, wall, cpu = await _window(seconds / 4, pid, one)
                counts[which] += done
                walls[which] += wall
                cpus[which] += cpu
        bare, routed = counts[0] / cpus[0], counts[1] / cpus[1]
        return {
            "bare_replies_per_s": counts[0] / walls[0],
            "routed_calls_per_s": counts[1] / walls[1],
            "bare_replies_per_cpu_s": bare,
            "routed_calls_per_cpu_s": routed,
            "routed_calls_over_bare_replies_per_cpu_s": routed / bare,
            "routed_by_lease_over_all": client.leases / counts[1],
        }
    finally:
        await bus.close()


def measure(seconds: float) -> dict[str, float]:
    """Start everything, measure both for `seconds` each, stop everything."""
    with tempfile.TemporaryDirectory(prefix="talaria-bench-") as directory, Processes(Path(directory)) as processes:
        port = free_port()
        url = f"nats://127.0.0.1:{port}"
        config, nats = processes.directory / "talaria.toml", processes.directory / "nats.conf"
        config.write_text(CONFIG.format(url=json.dumps(url), model=MODEL))
        store = json.dumps(str(processes.directory / "jetstream"))
        nats.write_text(f"listen: 127.0.0.1:{port}\njetstream {{ store_dir: {store} }}\n")
        processes.start("nats", [str(Path(sys.executable).with_name("nats-server")), "--config", str(nats)])
        echo = processes.start("echo", [sys.executable, "-m", "bench.router_bus", "--echo", url])
        parts = {part: [sys.executable, "-m", f"talaria_{part}"] for part in ("telemetry", "router")}
        parts["hot-0"] = [sys.executable, "-m", "talaria_instance", "--id", "hot-0"]
        pids = {name: processes.start(name, [*args, "--config", str(config)]) for name, args in parts.items()}
        return asyncio.run(_measure(url, echo, pids["router"], seconds))


async def _echo(url: str) -> None:
    """Answer everything with as many bytes as a short, numeric request asked for."""
    bus = await NatsBus.connect(url, name="echo")
    answer = b""
    waiting: set[asyncio.Future[None]] = set()

    def reply(message: Message) -> None:
        nonlocal answer
        if message.data.isdigit():
            answer = b"x" * int(message.data)
        if not bus.post(message, answer):
            waiting.add(task := asyncio.ensure_future(bus.respond(message, answer)))
            task.add_done_callback(waiting.discard)

    await bus.subscribe(ECHO, reply)
    await asyncio.Event().wait()


def main() -> int:
    """The echo process, or the figures alone."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--echo", metavar="URL", help="be the process that only answers")
    parser.add_argument("--seconds", type=float, default=4.0)
    args = parser.parse_args()
    if args.echo:
        asyncio.run(_echo(args.echo))
    for name, value in measure(args.seconds).items():
        print(f"{name} = {value:.5g}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
