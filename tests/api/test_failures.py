"""Deaths, silence, slow and vanishing clients, on a real server and both buses: every call ends, exactly once."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI, InternalServerError

from talaria_api import endpoint, protocol, sinks
from talaria_common.bus import MemoryBus, MemoryHub, NatsBus
from talaria_common.bus.interface import Bus
from talaria_common.wire import Cancel
from tests.api.doubles import EARLY, QUICK, Connect, Edge, Held, answers, edge, place, settings, until
from tests.support.nats_server import NatsServer

CHAT = "/v1/chat/completions"


def body(**more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": "x"}], "stream": True} | more


async def nothing(held: Held) -> None:
    """Does not even answer."""


async def only_accepts(held: Held) -> None:
    await held.accept()


async def one_token(held: Held) -> None:
    await held.accept()
    await held.delta("one")


def data(text: str) -> list[Any]:
    lines = [b.removeprefix("data: ") for b in text.split("\n\n") if b.startswith("data: ")]
    return [x if x == "[DONE]" else json.loads(x) for x in lines]


# --- before the first token: only time is lost


async def rejects(held: Held) -> None:
    await held.reject("overloaded", retryable=True)


async def retryable_error(held: Held) -> None:
    await held.accept()
    await held.error("engine_error", retryable=True)


async def falls_silent(held: Held) -> None:
    await held.accept()
    held.instance.beating = False


async def forgets(held: Held) -> None:
    await held.accept()
    held.instance.alive.discard(held.rid)


async def restarts(held: Held) -> None:
    await held.accept()
    held.instance.epoch = "0123456789ab"
    held.instance.alive.clear()


async def loses_its_first_frame(held: Held) -> None:
    await held.accept()
    held.seq = 1
    await held.delta("second")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "dies", [rejects, nothing, retryable_error, falls_silent, forgets, restarts, loses_its_first_frame]
)
async def test_placed_again_elsewhere(connect: Connect, dies: Any, stream: bool) -> None:
    config = settings(api=QUICK if dies in (nothing, falls_silent) else {})
    async with edge(connect, dies, answers, config=config) as e:
        response = await e.chat(stream=stream)
        assert response.status_code == 200
        assert "wörld" in response.text
        assert "error" not in response.text
        assert [(a.attempt, a.exclude) for a in e.router.asked] == [(0, ()), (1, ("i-0",))]
        assert len({a.rid for a in e.router.asked}) == 1
        metrics = (await e.http.get("/metrics")).text
        assert 'talaria_api_replacements_total{reason="' in metrics
        if dies not in (rejects, retryable_error, forgets):
            cancel = await asyncio.wait_for(e.instance.held[0].cancelled, 5)
            assert cancel.reason == "superseded"


async def test_headers_tell_the_instance_that_answered(connect: Connect) -> None:
    async with edge(connect, rejects, answers) as e:
        response = await e.chat(stream=True)
        assert response.headers["x-talaria-instance"] == "i-1"
        assert response.headers["x-talaria-route"] == "retry"


async def test_late_frames_of_the_first_instance_do_not_mix_in(connect: Connect) -> None:
    sent = asyncio.Event()

    async def slow(held: Held) -> None:
        await held.cancelled  # past the time to accept
        await held.accept()
        await held.delta("WRONG")
        await held.final("WRONG")
        sent.set()

    async def patient(held: Held) -> None:
        await held.accept()
        await held.delta("right ")
        await sent.wait()
        await held.final("answer")

    async with edge(connect, slow, patient, config=settings(api=QUICK)) as e:
        response = await e.chat(stream=True)
        assert "WRONG" not in response.text
        assert [c["choices"][0]["delta"].get("content") for c in data(response.text)[:2]] == ["right ", "answer"]


# --- after the first token


async def dies_silently(held: Held) -> None:
    await one_token(held)
    held.instance.beating = False


async def dies_with_an_error(held: Held) -> None:
    await one_token(held)
    await held.error("instance_lost", retryable=True)


async def dies_forgetting(held: Held) -> None:
    await one_token(held)
    held.instance.alive.discard(held.rid)


async def loses_a_frame(held: Held) -> None:
    await one_token(held)
    held.seq += 1
    await held.delta("three")


BROKEN = [dies_silently, dies_with_an_error, dies_forgetting, loses_a_frame]


@pytest.mark.parametrize("dies", BROKEN)
async def test_a_stream_ends_with_an_error_frame_and_no_done(connect: Connect, dies: Any) -> None:
    config = settings(api=QUICK if dies is dies_silently else {})
    async with edge(connect, dies, answers, config=config) as e:
        response = await e.chat(stream=True)
        assert response.status_code == 200
        chunks = data(response.text)
        assert chunks[0]["choices"][0]["delta"]["content"] == "one"
        assert chunks[-1]["error"]["code"] == "instance_lost"
        assert set(chunks[-1]["error"]) == {"message", "type", "param", "code"}
        assert "[DONE]" not in response.text
        assert len(e.router.asked) == 1
        await e.idle()


@pytest.mark.parametrize("dies", BROKEN)
async def test_a_whole_answer_that_broke_is_502_and_may_be_tried_again(connect: Connect, dies: Any) -> None:
    config = settings(api=QUICK if dies is dies_silently else {})
    async with edge(connect, dies, answers, config=config) as e:
        response = await e.chat()
        assert response.status_code == 502
        assert response.json()["error"]["code"] == "instance_lost"
        assert response.headers["x-should-retry"] == "true"
        assert response.headers["x-talaria-instance"] == "i-0"


async def test_error_of_the_engine_keeps_its_code(connect: Connect) -> None:
    async def fails(held: Held) -> None:
        await held.accept()
        await held.error("context_length_exceeded", retryable=False, message="too long")

    async with edge(connect, fails) as e:
        for stream in (False, True):
            response = await e.chat(stream=stream)
            assert response.status_code == 400
            assert response.json()["error"]["code"] == "context_length_exceeded"


async def test_attempts_run_out(connect: Connect) -> None:
    async with edge(connect, *[rejects] * 6, config=settings(api={"max_attempts": 3})) as e:
        response = await e.chat()
        assert response.status_code == 429
        assert len(e.router.asked) == 3


async def test_openai_client_retries_and_sees_errors_in_streams(connect: Connect) -> None:
    tries = 0

    async def breaks_once(held: Held) -> None:
        nonlocal tries
        tries += 1
        await (dies_with_an_error if tries == 1 else answers)(held)

    async with (
        edge(connect, breaks_once) as e,
        AsyncOpenAI(base_url=e.url + "/v1", api_key="x", max_retries=1) as client,
    ):
        whole = await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}])
        assert whole.choices[0].message.content == "Hello, wörld"
        assert tries == 2
        tries = 0
        stream = await client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "x"}], stream=True
        )
        with pytest.raises(Exception, match="broke") as caught:
            async for _ in stream:
                pass
        assert not isinstance(caught.value, InternalServerError)


# --- waiting


async def test_headers_go_early_and_comments_keep_the_stream_alive(connect: Connect) -> None:
    three_comments = asyncio.Event()

    async def late(held: Held) -> None:
        await held.accept()
        await three_comments.wait()
        await held.final("at last")

    async with edge(connect, late, config=settings(api=EARLY)) as e:
        loop = asyncio.get_running_loop()
        began = loop.time()
        async with e.http.stream("POST", CHAT, json=body()) as response:
            assert loop.time() - began > 0.2
            assert response.status_code == 200
            assert "x-talaria-instance" not in response.headers
            assert "x-talaria-cache" not in response.headers
            assert response.headers["x-talaria-session-source"] == "prefix"
            text = ""
            async for part in response.aiter_text():
                text += part
                if text.count(": keep-alive\n\n") >= 3:
                    three_comments.set()
        assert text.startswith(": keep-alive\n\n")
        assert data(text)[0]["choices"][0]["delta"]["content"] == "at last"


async def test_a_failure_before_the_early_headers_keeps_its_status(connect: Connect) -> None:
    async with edge(connect, rejects) as e:
        assert (await e.chat(stream=True)).status_code == 429


async def test_a_failure_after_the_early_headers_is_an_error_frame(connect: Connect) -> None:
    headers_came = asyncio.Event()

    async def late(held: Held) -> None:
        await held.accept()
        await headers_came.wait()
        await held.error("engine_error", retryable=False)

    async with edge(connect, late, config=settings(api=EARLY)) as e:
        async with e.http.stream("POST", CHAT, json=body()) as response:
            assert response.status_code == 200
            headers_came.set()
            text = "".join([part async for part in response.aiter_text()])
        assert data(text)[-1]["error"]["code"] == "engine_error"


async def test_a_call_moves_even_after_the_early_headers(connect: Connect) -> None:
    async with edge(connect, falls_silent, answers, config=settings(api=QUICK | EARLY)) as e:
        response = await e.chat(stream=True)
        assert response.text.startswith(": keep-alive")
        assert "wörld" in response.text
        assert "[DONE]" in response.text


@pytest.mark.parametrize("stream", [False, True])
async def test_deadline(connect: Connect, stream: bool) -> None:
    async with edge(connect, only_accepts) as e:
        response = await e.chat({"X-Talaria-Timeout-S": "2"}, stream=stream)
        assert response.status_code == 504
        assert response.json()["error"]["code"] == "deadline_exceeded"
        assert (await asyncio.wait_for(e.instance.held[0].cancelled, 5)).reason == "deadline"
        assert e.instance.held[0].head.placement.deadline_ms == e.router.asked[0].deadline_ms


# --- clients that leave


async def leave(e: Edge, until: Any, **more: Any) -> None:
    """Start a request on a connection of its own, wait for `until`, and go."""
    raw = json.dumps(body(**more)).encode()
    _, writer = await asyncio.open_connection("127.0.0.1", int(e.url.rpartition(":")[2]))
    writer.write(b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % (CHAT.encode(), len(raw)) + raw)
    await asyncio.wait_for(until(), 5)
    writer.close()


async def cancelled(e: Edge) -> Cancel:
    return await asyncio.wait_for(e.instance.held[0].cancelled, 10)


@pytest.mark.parametrize("stream", [False, True])
async def test_leaving_while_waiting_for_the_first_token(connect: Connect, stream: bool) -> None:
    async with edge(connect, only_accepts) as e:
        await leave(e, e.instance.took.wait, stream=stream)
        assert (await cancelled(e)).reason == "client_gone"
        await e.idle()


async def test_leaving_mid_stream(connect: Connect) -> None:
    async with edge(connect, one_token) as e:
        async with e.http.stream("POST", CHAT, json=body()) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: "):
                    break
        assert (await cancelled(e)).reason == "client_gone"
        await e.idle()


async def test_leaving_before_there_is_a_place(connect: Connect) -> None:
    async with edge(connect, answers, config=settings(api=QUICK)) as e:
        e.router.decide = lambda _: None
        await leave(e, e.router.came.wait)
        await e.idle()
        asked = len(e.router.asked)
        await asyncio.sleep(0.7)  # whoever still waited would have asked twice more
        assert len(e.router.asked) == asked
        assert e.instance.held == []


async def test_leaving_while_sending_the_body(connect: Connect) -> None:
    async with edge(connect, answers) as e:
        _, writer = await asyncio.open_connection("127.0.0.1", int(e.url.rpartition(":")[2]))
        writer.write(b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{" % CHAT.encode())
        await writer.drain()
        writer.close()
        await writer.wait_closed()
        assert (await e.chat()).status_code == 200
        assert len(e.router.asked) == 1


async def test_a_slow_reader_is_cut_and_holds_up_nobody(connect: Connect) -> None:
    async def floods(held: Held) -> None:
        await held.accept()
        if b"quick" in held.body:
            await held.final("quick answer")
            return
        text = "x" * 20_000
        while not held.cancelled.done():
            await held.delta(text)
            await asyncio.sleep(0)

    async with edge(connect, floods, config=settings(api={"max_pending_frames": 64})) as e:
        raw = json.dumps(body()).encode()
        with socket.socket() as s:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            await asyncio.to_thread(s.connect, ("127.0.0.1", int(e.url.rpartition(":")[2])))
            s.sendall(b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % (CHAT.encode(), len(raw)) + raw)
            await asyncio.wait_for(e.instance.took.wait(), 5)
            quick = await asyncio.wait_for(e.chat(messages=[{"role": "user", "content": "quick"}]), 5)
            assert quick.status_code == 200
            assert (await asyncio.wait_for(e.instance.held[0].cancelled, 10)).reason == "slow_client"
            await e.idle()
            await until(lambda: not e.server.server_state.tasks)  # the connection went, with what was not read


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("size", [6 << 20, 3 << 20], ids=["long", "in one write"])
@pytest.mark.parametrize("stream", [True, False])
async def test_who_never_reads_the_end_of_an_answer_loses_the_connection(
    connect: Connect, stream: bool, size: int, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call has ended well, so neither its deadline nor its instance minds any more."""
    for module in (sinks, endpoint, protocol):
        monkeypatch.setattr(module, "READ_WITHIN_S", 0.5)

    async def long(held: Held) -> None:
        await held.accept()
        await held.delta("x" * size)
        await held.final("the end")

    async with edge(connect, long) as e:
        raw = json.dumps(body(stream=stream)).encode()
        with socket.socket() as s:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            await asyncio.to_thread(s.connect, ("127.0.0.1", int(e.url.rpartition(":")[2])))
            head = b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n" % (CHAT.encode(), len(raw))
            s.sendall(head + (b"" if kept else b"connection: close\r\n") + b"\r\n" + raw)
            await asyncio.wait_for(e.instance.took.wait(), 5)
            await until(lambda: not e.server.server_state.connections and not e.server.server_state.tasks)
            assert not e.instance.held[0].cancelled.done()


async def test_a_reset_connection_is_a_client_that_left(connect: Connect) -> None:
    async with edge(connect, one_token) as e:
        raw = json.dumps(body()).encode()
        s = socket.create_connection(("127.0.0.1", int(e.url.rpartition(":")[2])))
        s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        s.sendall(b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % (CHAT.encode(), len(raw)) + raw)
        await asyncio.wait_for(e.instance.took.wait(), 5)
        s.close()
        assert (await cancelled(e)).reason == "client_gone"


# --- the process and the bus


async def test_shutdown_lets_streams_finish_and_takes_nothing_new(connect: Connect) -> None:
    more = asyncio.Event()

    async def waits(held: Held) -> None:
        await one_token(held)
        await more.wait()
        await held.final("two")

    async with edge(connect, waits) as e:
        async with e.http.stream("POST", CHAT, json=body()) as response:
            lines = response.aiter_lines()
            await anext(lines)
            e.api.readiness.draining = True
            e.server.stop()
            await until(lambda: not e.server.servers[0].is_serving())
            with pytest.raises(httpx.ConnectError):
                async with httpx.AsyncClient() as other:
                    await other.get(e.url + "/livez")
            more.set()
            rest = [line async for line in lines]
        assert "data: [DONE]" in rest


async def test_shutdown_is_bounded_and_frees_the_instance(connect: Connect) -> None:
    async with edge(connect, one_token, config=settings(api={"drain_s": 1.0})) as e:
        async with e.http.stream("POST", CHAT, json=body()) as response:
            lines = response.aiter_lines()
            await anext(lines)
            e.server.stop()
            with pytest.raises(httpx.RemoteProtocolError):
                async for _ in lines:
                    pass
        assert (await cancelled(e)).reason == "client_gone"


async def test_an_outage_of_the_bus_is_survived() -> None:
    hub = MemoryHub()

    async def connect() -> Bus:
        return hub.connect()

    release = asyncio.Event()

    async def waits(held: Held) -> None:
        await held.accept()
        await release.wait()
        await held.final("survived")

    own = hub.connect()
    assert isinstance(own, MemoryBus)
    async with edge(connect, waits, api_bus=own, config=settings(api=QUICK)) as e:
        call = asyncio.create_task(e.chat())
        await asyncio.wait_for(e.instance.took.wait(), 5)
        hub.disconnect(own)
        response = await e.http.get("/readyz")
        assert response.json()["reasons"] == ["bus: not connected"]
        await asyncio.sleep(1.3)  # longer than silence_s: nothing can be heard, so it is nobody's silence
        hub.reconnect(own)
        release.set()
        assert (await call).json()["choices"][0]["message"]["content"] == "survived"
        await e.ready()


async def test_nats_restart(nats_server: NatsServer) -> None:
    buses: list[NatsBus] = []

    async def connect() -> Bus:
        buses.append(await NatsBus.connect(nats_server.url, name="test"))
        return buses[-1]

    async with edge(connect, answers) as e:
        assert (await e.chat()).status_code == 200
        nats_server.stop(kill=True)
        await e.ready(wanted=False)
        during = asyncio.create_task(e.chat())
        await asyncio.sleep(0.3)
        nats_server.start()
        assert (await asyncio.wait_for(during, 15)).status_code == 200
        await e.ready()
    for bus in buses:
        await bus.close()


async def test_a_dead_sweep_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = MemoryHub()

    async def connect() -> Bus:
        return hub.connect()

    with pytest.raises(AttributeError):  # noqa: PT012 - raised when `edge` ends; without the sweep no wait would end: better no api than such a one
        async with edge(connect, answers) as e:
            monkeypatch.setattr(e.api.link, "_calls", {"x": None})
            await until(lambda: e.server.should_exit)
            monkeypatch.setattr(e.api.link, "_calls", {})


async def test_two_apis_of_one_name_do_not_mix(connect: Connect) -> None:
    async with edge(connect, answers) as a, edge(connect, answers) as b:
        b.instance.epoch = a.instance.epoch  # one life: two would count as a restart under each call
        # both routers and instances hear both apis here: twice placed, twice forwarded, twice answered
        assert a.api.link.api != b.api.link.api
        for e in (a, b):
            response = await e.chat(stream=True)
            assert data(response.text)[-1] == "[DONE]"
            assert response.text.count("wörld") == 1


async def test_unreadable_messages_are_counted_and_harmless(connect: Connect) -> None:
    async with edge(connect, answers) as e:
        for junk in (b"", b"{}", b'{"iid":5}', b"\xff", b'{"iid":"i-0","epoch":"e","frames":[{}]}'):
            await e.router.bus.publish(f"talaria.v1.tokens.{e.api.link.api}", junk)
            await e.router.bus.publish("talaria.v1.cluster", junk)
        assert (await e.chat()).status_code == 200
        assert "talaria_api_unreadable_total 10.0" in (await e.http.get("/metrics")).text


async def test_many_streams_at_once(connect: Connect) -> None:
    async def paced(held: Held) -> None:
        await held.accept()
        for n in range(20):
            await held.delta(f"{n} ")
            await asyncio.sleep(0.005)
        await held.final()

    async with edge(connect, paced) as e:
        responses = await asyncio.gather(*(e.chat(stream=n % 2 == 0, model="org/free") for n in range(40)))
        for n, response in enumerate(responses):
            if n % 2:
                text = response.json()["choices"][0]["message"]["content"]
            else:
                text = "".join(c["choices"][0]["delta"].get("content", "") for c in data(response.text)[:-1])
            assert text == "".join(f"{n} " for n in range(20))
        await e.idle()


async def test_placement_is_on_time(connect: Connect) -> None:
    async with edge(connect, answers) as e:
        e.router.decide = lambda r: place(r, "i-0", via="lease", continuation=True)
        response = await e.chat(stream=True)
        assert response.headers["x-talaria-route"] == "lease"
        assert e.instance.held[0].head.is_continuation
