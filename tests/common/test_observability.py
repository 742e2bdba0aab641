from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator

import pytest

from talaria_common.metrics import Metrics
from talaria_common.observability import ObservabilityServer

REASONS: list[str] = []


@pytest.fixture
async def port() -> AsyncIterator[int]:
    REASONS.clear()
    metrics = Metrics("x", process=False)
    metrics.gauge("g", "a").set(7)
    server = ObservabilityServer(metrics.registry, lambda: list(REASONS))
    yield await server.listen("127.0.0.1", 0)
    await server.close()


async def ask(port: int, raw: bytes) -> tuple[int, dict[str, str], bytes]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(raw)
    answer = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    await writer.wait_closed()
    if not answer:
        return 0, {}, b""
    head, _, body = answer.partition(b"\r\n\r\n")
    first, *rest = head.decode().split("\r\n")
    return int(first.split()[1]), dict(line.split(": ", 1) for line in rest), body


async def get(port: int, path: str, method: str = "GET") -> tuple[int, dict[str, str], bytes]:
    return await ask(port, f"{method} {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())


async def test_metrics(port: int):
    status, headers, body = await get(port, "/metrics?x=1")
    assert status == 200
    assert headers["Content-Type"].startswith("text/plain")
    assert int(headers["Content-Length"]) == len(body)
    assert b"talaria_x_g 7.0" in body


async def test_ready_says_why_not(port: int):
    assert (await get(port, "/readyz"))[0] == 200
    REASONS.append("not connected to the message bus")
    status, _, body = await get(port, "/readyz")
    assert status == 503
    assert json.loads(body) == {"ready": False, "reasons": ["not connected to the message bus"]}
    assert (await get(port, "/livez"))[0] == 200


async def test_head_has_no_body(port: int):
    status, headers, body = await get(port, "/livez", "HEAD")
    assert (status, body) == (200, b"")
    assert int(headers["Content-Length"]) > 0


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/", 404), ("POST", "/livez", 405)])
async def test_other_requests(port: int, method: str, path: str, status: int):
    assert (await get(port, path, method))[0] == status


@pytest.mark.parametrize("raw", [b"nonsense\r\n\r\n", b"\xff\xfe\r\n\r\n", b"GET / SPDY/3\r\n\r\n", b"x" * 40_000])
async def test_what_is_no_http_is_dropped_and_harms_nobody(port: int, raw: bytes):
    with contextlib.suppress(ConnectionError):  # the server closed while we still wrote: dropped as well
        assert (await ask(port, raw))[0] == 0
    assert (await get(port, "/livez"))[0] == 200


async def test_off_means_off():
    server = ObservabilityServer(Metrics("x").registry, list)
    assert await server.start("127.0.0.1", None) == 0
    assert await server.start("127.0.0.1", 0) == 0
    await server.close()
