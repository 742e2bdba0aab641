"""Every refusal has OpenAI's error shape, the right status, code and headers, and nothing reaches the router."""

from __future__ import annotations

import asyncio
import hashlib
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from talaria_api import errors, protocol
from talaria_api.errors import body as error_body
from talaria_api.intake import HEADROOM_BYTES
from talaria_common.errors import OverloadedError
from tests.api.doubles import QUICK, Connect, Edge, answers, edge, place, refuse, settings

CHAT = "/v1/chat/completions"
GOOD = b'{"model":"m","messages":[{"role":"user","content":"x"}]}'


@pytest.fixture
async def served(connect: Connect) -> AsyncIterator[Edge]:
    async with edge(connect, answers) as e:
        yield e


def check(response: httpx.Response, status: int, code: str, param: str | None = None) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["code"], error["param"]) == (code, param)
    assert error["message"]
    return dict(error)


async def test_routes_and_methods(served: Edge) -> None:
    http = served.http
    check(await http.get("/nowhere"), 404, "not_found")
    check(await http.get("/v1/chat/completions/"), 404, "not_found")
    check(await http.get("/v1/models/nobody"), 404, "model_not_found", "model")
    refused = await http.get(CHAT)
    check(refused, 405, "method_not_allowed")
    assert refused.headers["allow"] == "POST"
    check(await http.delete("/v1/models"), 405, "method_not_allowed")
    check(await http.request("OPTIONS", CHAT), 405, "method_not_allowed")


async def test_bodies(served: Edge) -> None:
    post = served.http.post
    check(await post(CHAT, content=b"{"), 400, "invalid_request")
    check(await post(CHAT, content=b""), 400, "invalid_request")
    check(await post(CHAT, content=GOOD, headers={"content-type": "text/plain"}), 415, "unsupported_media_type")
    form = {"content-type": "application/x-www-form-urlencoded"}
    check(await post(CHAT, content=GOOD, headers=form), 415, "unsupported_media_type")
    check(await post(CHAT, content=GOOD, headers={"content-encoding": "gzip"}), 415, "unsupported_media_type")
    for fine in ("application/json", "application/json; charset=utf-8", "Application/JSON"):
        assert (await post(CHAT, content=GOOD, headers={"content-type": fine})).status_code == 200
    check(await served.chat(model="nobody"), 404, "model_not_found", "model")
    check(await served.chat(n=3), 400, "unsupported_parameter", "n")
    check(await served.chat(max_tokens=100), 400, "context_length_exceeded", "max_tokens")
    check(await post("/v1/completions", json={"model": "m"}), 400, "invalid_request", "prompt")
    assert len(served.router.asked) == 3


@pytest.mark.parametrize("value", ["0", "-1", "nan", "soon", ""])
async def test_timeout_header(served: Edge, value: str) -> None:
    check(await served.chat({"X-Talaria-Timeout-S": value}), 400, "invalid_request", "X-Talaria-Timeout-S")


@pytest.mark.parametrize("value", ["1", "-101", "1.5", "high", "", "9" * 5000])
async def test_priority_header(served: Edge, value: str) -> None:
    check(await served.chat({"X-Talaria-Priority": value}), 400, "invalid_request", "X-Talaria-Priority")


async def test_a_priority_goes_with_the_call_to_router_and_instance(connect: Connect) -> None:
    config = settings(router={"tenant_max_priority": 3, "tenants": {"local": {"max_priority": 7}}})
    async with edge(connect, answers, config=config) as e:
        for value in ("7", "-100", None):
            response = await e.chat({"X-Talaria-Priority": value} if value else {})
            assert response.status_code == 200
        check(await e.chat({"X-Talaria-Priority": "8"}), 400, "invalid_request", "X-Talaria-Priority")
        assert [r.priority for r in e.router.asked] == [7, -100, 0]
        assert [held.head.priority for held in e.instances[0].held] == [7, -100, 0]


async def test_too_large_by_content_length_is_refused_before_it_is_sent(served: Edge) -> None:
    limit = served.api_bus.max_payload_bytes - HEADROOM_BYTES
    reader, writer = await asyncio.open_connection("127.0.0.1", int(served.url.rpartition(":")[2]))
    writer.write(f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: {limit + 1}\r\n\r\n".encode())
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
    assert head.startswith(b"HTTP/1.1 413 ")
    assert str(limit).encode() in await asyncio.wait_for(reader.read(500), 5)
    writer.close()


async def test_too_large_while_it_is_sent_in_chunks(served: Edge) -> None:
    limit = served.api_bus.max_payload_bytes - HEADROOM_BYTES

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(limit // (1 << 20) + 2):
            yield b" " * (1 << 20)

    error = check(await served.http.post(CHAT, content=chunks()), 413, "payload_too_large")
    assert str(limit) in error["message"]


async def test_the_largest_body_passes(served: Edge) -> None:
    limit = served.api_bus.max_payload_bytes - HEADROOM_BYTES
    fill = b"x" * (limit - len(GOOD))
    response = await served.http.post(CHAT, content=GOOD.replace(b'"x"', b'"x' + fill + b'"'))
    assert response.status_code == 200
    assert len(served.instance.held[0].body) == limit
    response = await served.http.post(CHAT, content=GOOD.replace(b'"x"', b'"xy' + fill + b'"'))
    check(response, 413, "payload_too_large")


async def test_overload_says_when_to_come_back(served: Edge) -> None:
    served.router.decide = lambda _: refuse("overloaded", "overloaded", "full", retry_after_s=2.3)
    for stream in (False, True):
        response = await served.chat(stream=stream)
        error = check(response, 429, "overloaded")
        assert error["type"] == "rate_limit_error"
        assert response.headers["retry-after"] == "3"
        assert response.headers["x-should-retry"] == "true"
        assert response.headers["x-talaria-session-source"] == "prefix"


async def test_no_instance(served: Edge) -> None:
    served.router.decide = lambda _: refuse("no_instance", "unavailable", "cold-0 is draining")
    response = await served.chat()
    assert "cold-0 is draining" in check(response, 503, "unavailable")["message"]
    assert int(response.headers["retry-after"]) >= 1


async def test_router_away(connect: Connect) -> None:
    config = settings(api=QUICK | {"route_give_up_s": 2.0})
    async with edge(connect, answers, config=config) as e:
        e.router.decide = lambda _: None
        response = await e.chat()
        assert "no router answered" in check(response, 503, "unavailable")["message"]
        assert len(e.router.asked) >= 3
        assert len({(a.rid, a.attempt) for a in e.router.asked}) == 1


async def test_deadline_of_the_caller(served: Edge) -> None:
    served.router.decide = lambda r: place(r, "i-9")  # an instance that is not there
    served.router.came.clear()
    response = await served.chat({"X-Talaria-Timeout-S": "2"})
    assert response.status_code in (503, 504)
    assert served.router.asked[0].deadline_ms > 0


async def test_placement_on_an_instance_whose_name_is_no_subject(served: Edge) -> None:
    served.router.decide = lambda r: place(r, "a.b")
    check(await served.chat(), 500, "engine_error")


KEYS = {
    "keys": [{"sha256": hashlib.sha256(k.encode()).hexdigest(), "tenant": t} for k, t in (("k-a", "ta"), ("k-b", "tb"))]
}


async def test_api_keys(connect: Connect) -> None:
    async with edge(connect, answers, config=settings(auth=KEYS)) as e:
        for headers in (
            {},
            {"authorization": "k-a"},
            {"authorization": "Basic k-a"},
            {"authorization": "Bearer nope"},
            {"authorization": "Bearer"},
        ):
            refused = await e.chat(headers)
            error = check(refused, 401, "invalid_api_key")
            assert refused.headers["www-authenticate"].startswith("Bearer")
            assert "nope" not in error["message"]
            check(await e.http.get("/v1/models", headers=headers), 401, "invalid_api_key")
        for key, tenant in (("k-a", "ta"), ("k-b", "tb")):
            assert (await e.chat({"authorization": f"bearer {key}"})).status_code == 200
            assert e.router.asked[-1].tenant == tenant
        assert e.router.asked[0].session != e.router.asked[1].session  # the prefix chain is salted by tenant
        for open_path in ("/livez", "/readyz", "/metrics", "/openapi.json"):
            assert (await e.http.get(open_path)).status_code == 200
        secured = (await e.http.get("/openapi.json")).json()["paths"][CHAT]["post"]["security"]
        assert secured == [{"key": []}]


@pytest.fixture
def connection(served: Edge) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", int(served.url.rpartition(":")[2])), timeout=5) as s:
        yield s


async def test_what_is_not_http_is_refused_in_the_same_shape(served: Edge, connection: socket.socket) -> None:
    connection.sendall(b"NOT HTTP AT ALL\r\n\r\n")
    answer = await asyncio.to_thread(connection.recv, 1000)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b'"code":"invalid_request"' in answer


async def test_the_connection_serves_on_after_a_refusal(served: Edge) -> None:
    async with httpx.AsyncClient(base_url=served.url, limits=httpx.Limits(max_connections=1)) as one:
        for _ in range(3):
            assert (await one.post(CHAT, content=b"{")).status_code == 400
            assert (await one.post(CHAT, content=GOOD)).status_code == 200
        assert len(served.server.server_state.connections) <= 2


async def test_a_bug_of_ours_is_an_error_like_any_other(served: Edge, monkeypatch: pytest.MonkeyPatch) -> None:
    def boom(_: bytes | None) -> str:
        raise RuntimeError("a secret")

    monkeypatch.setattr(served.api.parts.auth, "tenant", boom)
    for response in (await served.chat(), await served.http.get("/v1/models")):
        error = check(response, 500, "internal_error")
        assert "secret" not in error["message"]
        assert response.headers["x-should-retry"] == "false"
    monkeypatch.undo()
    assert (await served.chat()).status_code == 200


def test_error_body() -> None:
    assert error_body(OverloadedError("full")) == (
        b'{"error":{"message":"full","type":"rate_limit_error","param":null,"code":"overloaded"}}'
    )


async def _raw(edge_: Edge, *pieces: bytes) -> bytes:
    """What the server answers to these bytes before it hangs up."""
    url = edge_.http.base_url
    reader, writer = await asyncio.open_connection(url.host, url.port)
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        return await asyncio.wait_for(reader.read(), 10)
    except ConnectionError:
        return b""
    finally:
        writer.close()


async def test_headers_without_end(served: Edge) -> None:
    line = b"x-padding: " + b"a" * 1000 + b"\r\n"
    start = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n"
    # Just beyond the limit: what a server leaves unread resets the connection, and its answer may be lost with it.
    answer = await _raw(served, start, *[line] * (protocol.HEAD_BYTES // len(line) + 1))
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert b'"code":"headers_too_large"' in answer
    assert (await served.http.get("/livez")).status_code == 200


async def test_headers_that_do_not_come(served: Edge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "HEAD_TIMEOUT_S", 0.05)
    answer = await _raw(served, b"POST /v1/chat/completions HTTP/1.1\r\nhost")
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b'"code":"request_timeout"' in answer
    assert await _raw(served) == b""  # a connection on which nothing comes is closed as well
    late = b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\nGET /livez HTTP"  # the second request of a kept connection
    answer = await _raw(served, late)
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert b"HTTP/1.1 408 " in answer


async def test_a_model_name_nobody_could_have(served: Edge) -> None:
    body = {"model": "m" * 100_000, "messages": [{"role": "user", "content": "x"}]}
    refused = await served.http.post(CHAT, json=body)
    check(refused, 400, "invalid_request", "model")
    assert len(refused.content) < 1000


def test_every_code_of_the_edge_is_documented() -> None:
    documented = (Path(__file__).parents[2] / "docs" / "errors.md").read_text()
    codes = {
        (e.status, e.code) for e in vars(errors).values() if isinstance(e, type) and e.__module__ == errors.__name__
    }
    edge_only = {(s, c) for s, c in codes if c not in ("client_gone", "slow_client")}  # those never reach a client
    assert {(s, c) for s, c in edge_only if f"{s} `{c}`" not in documented} == set()
    assert len(edge_only) >= 5
