"""The mock worker under the load generator, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import os

import pytest
from bench.gateway.load import Job, run
from bench.gateway.processes import free_port
from bench.gateway.prompts import SIZES, messages
from bench.gateway.worker import serve

pytestmark = pytest.mark.timeout(30)


@contextlib.asynccontextmanager
async def worker(**paces):
    port = free_port()
    task = asyncio.create_task(serve(port, paces))
    try:
        for _ in range(200):
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                await asyncio.sleep(0.01)
            else:
                writer.close()
                await writer.wait_closed()
                break
        yield port
        await asyncio.sleep(0.01)  # for the server's side to see that the clients have gone
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def job(port, **more) -> Job:
    values = {"model": "m", "size_bytes": 1000, "clients": 4, "stream": True, "tokens": 5, "seconds": 0.2}
    return Job(port=port, cpu={"all": [os.getpid()]}, **values | more)


@pytest.mark.parametrize("stream", [True, False])
async def test_closed_loop_counts_checked_answers(stream):
    async with worker(m=(0, 0)) as port:
        result = await run(job(port, stream=stream))
    assert result.failed == 0
    assert result.requests >= 4
    assert len(result.total_ms) == result.requests
    assert len(result.ttft_ms) == (result.requests if stream else 0)
    assert result.wall_s >= 0.2
    assert result.cpu_s["all"] > 0


async def test_paced_tokens_come_at_their_time():
    async with worker(m=(30, 10)) as port:
        result = await run(job(port, clients=1, seconds=0.3))
    assert min(result.ttft_ms) >= 28
    assert min(result.total_ms) >= 65
    assert len(result.gap_ms) == 4 * result.requests


async def test_bursts_take_as_long_as_their_last_stream():
    async with worker(m=(10, 10)) as port:
        result = await run(job(port, clients=8, bursts=2))
    assert result.requests == 16
    assert len(result.burst_ms) == 2
    assert min(result.burst_ms) >= 45


async def test_a_refusal_is_an_error_not_a_request():
    async with worker(m=(0, 0)) as port:
        result = await run(job(port, model="another"))
    assert result.requests == 0
    assert result.failed == 8  # four that warm up, four that count
    assert "400" in result.errors[0]


class Same(asyncio.Protocol):
    """Answers any request with the same bytes and hangs up; with no bytes it leaves the client waiting."""

    def __init__(self, payload: bytes) -> None:
        self.payload = payload

    def connection_made(self, transport):
        self.transport = transport

    def data_received(self, data):
        if self.payload:
            self.transport.write(self.payload)
            self.transport.close()


@contextlib.asynccontextmanager
async def answering(payload: bytes):
    server = await asyncio.get_running_loop().create_server(lambda: Same(payload), "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]
        await asyncio.sleep(0.01)  # for the server's side to see that the clients have gone


def http(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


USAGE = b'data: {"usage":{"completion_tokens":5}}\n\n'
TEXT = b'data: {"choices":[{"delta":{"content":"x"}}]}\n\n'
DONE = b"data: [DONE]\n\n"


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (http(TEXT + USAGE), "no [DONE]"),
        (http(TEXT + DONE), "tokens instead of 5"),
        (http(TEXT + USAGE.replace(b"5", b"4") + DONE), "tokens instead of 5"),
        (http(USAGE + DONE), "without text"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 999\r\n\r\nshort", "connection lost"),
        (b"nonsense\r\n\r\n", "not HTTP"),
    ],
)
async def test_wrong_answers_are_found(answer, error):
    async with answering(answer) as port:
        result = await run(job(port, clients=1))
    assert result.requests == 0
    assert error in result.errors[0]


async def test_a_hanging_system_ends_the_job():
    async with answering(b"") as port:
        with pytest.raises(TimeoutError):
            await run(job(port, clients=1, timeout_s=0.2))


@pytest.mark.parametrize("size", SIZES.values())
def test_prompts_have_their_size_and_end_with_the_user(size):
    made = messages(size, seed=1)
    assert sum(len(m["content"]) for m in made) == size
    assert made[-1]["role"] == "user"
    assert made == messages(size, seed=1)
    assert made != messages(size, seed=2)
