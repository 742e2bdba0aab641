"""The load generator: a process of its own that reads jobs as JSON lines and answers each with one.

Closed loop: each client sends its next request when the last answer is complete. Every answer is checked: status 200,
the number of tokens in its usage, text, and for streams `[DONE]`. CPU seconds of the measured processes are read at the
window's two ends, here, so that nothing else lies between.
"""

from __future__ import annotations

import asyncio
import gc
import json
import re
import socket
import sys
import time
from collections.abc import Callable
from typing import Any, cast

import httptools
import msgspec
import psutil
import uvloop

from bench.gateway.prompts import body, http_request

_TEXT = re.compile(rb'"content":\s*"[^"]')
_TOKENS = re.compile(rb'"completion_tokens":\s*(\d+)')


class Job(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One case on one system."""

    port: int
    model: str
    size_bytes: int
    clients: int
    stream: bool
    tokens: int
    seconds: float
    """Length of the window; requests that have begun in it are finished and counted."""
    bursts: int = 0
    """Instead of a closed loop: this often, all clients send at once and all are waited for; none begins after
    `bursts_s`."""
    bursts_s: float = 6.0
    warm: int = 4
    """Clients that send one request before the window."""
    sessions: bool = True
    """Name a session per client; without, the gateway has to work it out."""
    timeout_s: float = 20.0
    cpu: dict[str, list[int]] = {}
    """Processes whose CPU seconds to read, by group."""


class Result(msgspec.Struct, kw_only=True):
    """What came of a job. Times in ms, CPU in seconds."""

    requests: int
    wall_s: float
    errors: list[str]
    """The first few, in words."""
    failed: int
    cpu_s: dict[str, float]
    load_cpu_s: float
    ttft_ms: list[float]
    """Of each stream: from sending to the first text."""
    per_token_ms: list[float]
    """Of each stream: mean time from token to token after the first."""
    gap_ms: list[float]
    """Between tokens that came one after the other; 0 for those that came together."""
    total_ms: list[float]
    burst_ms: list[float]


class Client(asyncio.Protocol):
    """One connection with one request after another."""

    def __init__(self, job: Job, request: bytes, done: Callable[[Client], None]) -> None:
        self.job = job
        self.request = request
        self.done = done
        self.error = ""
        self.started = 0.0
        self.arrivals: list[tuple[float, int]] = []
        self.ended = 0.0
        self.busy = False
        self.closed = asyncio.Event()
        self._parts: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._parser: Any = httptools.HttpResponseParser(self)

    def send(self) -> None:
        """Send the request; `done` is called when the answer is complete or has failed."""
        self._parts = []
        self.arrivals = []
        self.error = ""
        self.busy = True
        self.started = time.perf_counter()
        if self._transport.is_closing():
            self._finish("connection lost before the request")
        else:
            self._transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as e:
            self._finish(f"not HTTP: {e}")
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed.set()
        if self.busy:
            self._finish(f"connection lost: {exc}")

    def on_body(self, part: bytes) -> None:
        self._parts.append(part)
        if self.job.stream:
            texts = len(_TEXT.findall(part))
            if texts:
                self.arrivals.append((time.perf_counter(), texts))

    def on_message_complete(self) -> None:
        answer = b"".join(self._parts)
        status = self._parser.get_status_code()
        error = "" if status == 200 else f"status {status}: {answer[:200]!r}"
        self._finish(error or self._check(answer))

    def _check(self, answer: bytes) -> str:
        counts = _TOKENS.findall(answer)
        if not counts or int(counts[-1]) != self.job.tokens:
            return f"{counts[-1:]} tokens instead of {self.job.tokens}"
        if self.job.stream:
            if not answer.rstrip().endswith(b"data: [DONE]"):
                return f"no [DONE]: ...{answer[-80:]!r}"
            if not self.arrivals:
                return "a stream without text"
        elif not _TEXT.search(answer):
            return "an answer without text"
        return ""

    def _finish(self, error: str) -> None:
        if not self.busy:
            return
        self.busy = False
        self.ended = time.perf_counter()
        self.error = error
        self.done(self)

    def close(self) -> None:
        """Hang up."""
        self.busy = False
        self._transport.abort()


class Window:
    """Collects answers and keeps the loop closed until its end."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.until = 0.0
        self.left = 0
        self.idle = asyncio.Event()
        self.counting = False
        self.requests = 0
        self.errors: list[str] = []
        self.failed = 0
        self.ttft_ms: list[float] = []
        self.per_token_ms: list[float] = []
        self.gap_ms: list[float] = []
        self.total_ms: list[float] = []

    def begin(self, clients: list[Client], seconds: float) -> None:
        """All clients send now, and again until `seconds` have passed."""
        self.idle.clear()
        self.left = len(clients)
        self.until = time.perf_counter() + seconds
        for client in clients:
            client.send()

    def done(self, client: Client) -> None:
        """An answer is complete."""
        if client.error:
            self.failed += 1
            if len(self.errors) < 5:
                self.errors.append(client.error)
        elif self.counting:
            self._count(client)
        if client.error or client.ended >= self.until:
            self.left -= 1
            if self.left == 0:
                self.idle.set()
        else:
            client.send()

    def _count(self, client: Client) -> None:
        self.requests += 1
        self.total_ms.append((client.ended - client.started) * 1e3)
        if not self.job.stream:
            return
        first = client.arrivals[0][0]
        self.ttft_ms.append((first - client.started) * 1e3)
        if self.job.tokens > 1:
            self.per_token_ms.append((client.arrivals[-1][0] - first) * 1e3 / (self.job.tokens - 1))
        before = first
        for at, texts in client.arrivals[1:]:
            self.gap_ms.append((at - before) * 1e3)
            self.gap_ms.extend([0.0] * (texts - 1))
            before = at


def _cpu_s(groups: dict[str, list[psutil.Process]]) -> dict[str, float]:
    out = {}
    for name, processes in groups.items():
        total = 0.0
        for process in processes:
            times = process.cpu_times()
            total += times.user + times.system
        out[name] = total
    return out


async def run(job: Job) -> Result:
    """Carry out one job. Raises TimeoutError when the system hangs and OSError when it cannot be reached."""
    loop = asyncio.get_running_loop()
    window = Window(job)
    clients: list[Client] = []
    bursts: list[float] = []
    groups = {name: [psutil.Process(pid) for pid in pids] for name, pids in job.cpu.items()}
    try:
        for n in range(job.clients):
            payload = body(job.size_bytes, seed=n, model=job.model, tokens=job.tokens, stream=job.stream)
            session = f"bench-{job.model}-{job.size_bytes}-{n}" if job.sessions else ""
            request = http_request(payload, port=job.port, session=session)
            made = Client(job, request, window.done)
            await loop.create_connection(lambda made=made: made, "127.0.0.1", job.port)  # type: ignore[misc]
            clients.append(made)
        async with asyncio.timeout(job.timeout_s):
            window.begin(clients if job.bursts else clients[: job.warm], 0)
            await window.idle.wait()
            gc.collect()
            gc.disable()
            window.counting = True
            cpu_before = _cpu_s(groups)
            own_before = time.process_time()
            began = time.perf_counter()
            for _ in range(job.bursts):
                start = time.perf_counter()
                if bursts and start - began > job.bursts_s:
                    break
                window.begin(clients, 0)
                await window.idle.wait()
                bursts.append((time.perf_counter() - start) * 1e3)
            if not job.bursts:
                window.begin(clients, job.seconds)
                await window.idle.wait()
            wall_s = time.perf_counter() - began
            own_s = time.process_time() - own_before
            cpu_after = _cpu_s(groups)
    finally:
        gc.enable()
        for client in clients:
            client.close()
        await asyncio.gather(*(client.closed.wait() for client in clients))
    return Result(
        requests=window.requests,
        wall_s=wall_s,
        errors=window.errors,
        failed=window.failed,
        cpu_s={name: cpu_after[name] - cpu_before[name] for name in groups},
        load_cpu_s=own_s,
        ttft_ms=window.ttft_ms,
        per_token_ms=window.per_token_ms,
        gap_ms=window.gap_ms,
        total_ms=window.total_ms,
        burst_ms=bursts,
    )


async def serve() -> None:
    """Jobs from stdin, results to stdout, one at a time, until stdin ends."""
    loop = asyncio.get_running_loop()
    decoder = msgspec.json.Decoder(Job)
    while line := await loop.run_in_executor(None, sys.stdin.buffer.readline):
        try:
            out: Any = msgspec.to_builtins(await run(decoder.decode(line)))
        except (OSError, TimeoutError, psutil.Error) as e:
            out = {"error": f"{type(e).__name__}: {e}"}
        print(json.dumps(out), flush=True)


if __name__ == "__main__":
    uvloop.run(serve())
