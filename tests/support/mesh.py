"""A whole mesh as real processes on free ports: NATS, telemetry, router(s), api(s), instances.

`Mesh` starts the very modules that `talaria up` starts, one process each, so that tests can kill them one by one.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import tomli_w

from talaria_common import subjects
from talaria_common.bus import Message, NatsBus
from talaria_common.wire import ClusterView, decode


def free_port() -> int:
    """A TCP port that was free a moment ago."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _die_with_parent() -> None:
    """In the child: SIGKILL when the test process ends, however it ends (PR_SET_PDEATHSIG)."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


@dataclass
class Part:
    """One process of the mesh."""

    name: str
    args: list[str]
    env: dict[str, str]
    log: Path
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(
                self.args,
                env=self.env,
                stdout=out,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def kill(self, sig: int = signal.SIGKILL) -> None:
        assert self.process is not None
        self.process.send_signal(sig)
        if sig in (signal.SIGKILL, signal.SIGTERM):
            self.process.wait(20)

    def stop(self) -> int | None:
        if self.process is None:
            return None
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
            try:
                self.process.wait(15)
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait(5)
        return self.process.returncode


@dataclass
class Mesh:
    """The parts by name: "nats", "telemetry-0", "router-0", "api-0", and the instances by their id."""

    dir: Path
    config: Path
    parts: dict[str, Part]
    nats_url: str
    urls: list[str]
    http: httpx.AsyncClient = field(init=False)

    def __post_init__(self) -> None:
        self.http = httpx.AsyncClient(base_url=self.urls[0], timeout=httpx.Timeout(300, connect=5))

    @property
    def url(self) -> str:
        return self.urls[0]

    async def chat(
        self, model: str, messages: list[dict[str, str]], *, session: str = "", **body: Any
    ) -> httpx.Response:
        headers = {"X-Talaria-Session-ID": session} if session else {}
        return await self.http.post(
            "/v1/chat/completions", json={"model": model, "messages": messages, **body}, headers=headers
        )

    async def wait_ready(self, timeout_s: float = 120, url: str = "") -> None:
        """Until /readyz is 200; the last reasons are in the error."""
        deadline = time.monotonic() + timeout_s
        said = "nothing answered"
        while time.monotonic() < deadline:
            for part in self.parts.values():
                if part.process is not None and part.process.poll() not in (None, -9, -15):
                    raise AssertionError(f"{part.name} exited with {part.process.returncode}:\n{self.tail(part.name)}")
            with contextlib.suppress(httpx.HTTPError):
                answer = await self.http.get((url or self.url) + "/readyz", timeout=2)
                said = answer.text
                if answer.status_code == 200:
                    return
            await asyncio.sleep(0.1)
        raise AssertionError(f"not ready after {timeout_s} s: {said}\n" + "\n".join(self.tail(p) for p in self.parts))

    async def all_instances_ready(self, timeout_s: float) -> None:
        """Until telemetry has said so of each; /readyz waits for one of them only."""
        waiting = {row["id"] for row in tomllib.loads(self.config.read_text())["instances"]}
        done = asyncio.Event()

        def hear(message: Message) -> None:
            for view in decode(message.data, ClusterView).instances:
                if view.snapshot.status == "ready":
                    waiting.discard(view.snapshot.iid)
            if not waiting:
                done.set()

        bus = await self.bus()
        try:
            await bus.subscribe(subjects.CLUSTER, hear)
            await asyncio.wait_for(done.wait(), timeout_s)
        except TimeoutError:
            raise AssertionError(f"not ready: {waiting}\n" + "\n".join(self.tail(p) for p in waiting)) from None
        finally:
            await bus.close()

    def tail(self, name: str, lines: int = 25) -> str:
        text = self.parts[name].log.read_text(errors="replace").splitlines()[-lines:]
        return f"--- {name}\n" + "\n".join(text)

    async def bus(self) -> NatsBus:
        return await NatsBus.connect(self.nats_url, name="test", timeout_s=20)  # a busy machine

    async def close(self) -> None:
        await self.http.aclose()
        order = [*reversed([n for n in self.parts if n != "nats"]), "nats"]
        for name in order:
            self.parts[name].stop()


@contextlib.asynccontextmanager
async def mesh(
    directory: Path,
    settings: dict[str, Any],
    *,
    apis: int = 1,
    routers: int = 1,
    ready_timeout_s: float = 120,
) -> AsyncIterator[Mesh]:
    """A running, ready mesh under `settings` (plain talaria.toml data); everything is stopped at the end."""
    directory.mkdir(parents=True, exist_ok=True)
    nats_port = free_port()
    nats_url = f"nats://127.0.0.1:{nats_port}"
    config = directory / "talaria.toml"
    config.write_text(tomli_w.dumps(settings))
    nats_conf = directory / "nats.conf"
    nats_conf.write_text(
        f"listen: 127.0.0.1:{nats_port}\nmax_payload: 8388608\njetstream {{ store_dir: {json.dumps(str(directory / 'js'))} }}\n"
    )
    env = os.environ | {"TALARIA_BUS__URL": nats_url, "TALARIA_LOG": "", "PYTHONFAULTHANDLER": "1"}
    env.pop("TALARIA_LOG")
    python = sys.executable
    server = str(Path(python).with_name("nats-server"))
    parts: dict[str, Part] = {}
    urls = []

    def add(name: str, args: list[str], **extra: str) -> None:
        parts[name] = Part(name, args, env | extra, directory / f"{name}.log")

    add("nats", [server, "--config", str(nats_conf)])
    add("telemetry-0", [python, "-m", "talaria_telemetry", "--config", str(config)])
    for n in range(routers):
        add(f"router-{n}", [python, "-m", "talaria_router", "--config", str(config)], TALARIA_ROUTER__ID=f"router-{n}")
    for n in range(apis):
        port = free_port()
        urls.append(f"http://127.0.0.1:{port}")
        add(
            f"api-{n}",
            [python, "-m", "talaria_api", "--config", str(config)],
            TALARIA_API__PORT=str(port),
            TALARIA_API__ID=f"api-{n}",
        )
    for row in settings["instances"]:
        add(row["id"], [python, "-m", "talaria_instance", "--config", str(config), "--id", row["id"]])
    it = Mesh(directory, config, parts, nats_url, urls)
    try:
        for part in parts.values():
            part.start()
        for url in urls:
            await it.wait_ready(ready_timeout_s, url)
        await it.all_instances_ready(ready_timeout_s)
        yield it
    finally:
        await it.close()
