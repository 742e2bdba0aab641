"""Losing a real server and finding it again."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator

import pytest

from talaria_common.bus import KvEntry, NatsBus
from talaria_common.bus import nats as nats_bus
from talaria_common.errors import BusError, BusTimeoutError
from tests.support.nats_server import NatsServer
from tests.support.waiting import Inbox, until


@pytest.fixture
async def bus(nats_server: NatsServer) -> AsyncIterator[NatsBus]:
    bus = await NatsBus.connect(nats_server.url, name="mine", reconnect_wait_s=0.05)
    yield bus
    await bus.close()


async def test_nobody_listens(unused_tcp_port: int):
    with pytest.raises(BusError, match=f"127.0.0.1:{unused_tcp_port}"):
        await NatsBus.connect(f"nats://127.0.0.1:{unused_tcp_port}", timeout_s=0.3)


@pytest.mark.parametrize("kill", [False, True])
async def test_a_server_restart(nats_server: NatsServer, bus: NatsBus, kill: bool):
    ups: list[bool] = []
    bus.on_connection(ups.append)
    inbox = Inbox()
    await bus.subscribe("a", inbox)
    kv = await bus.kv("bucket")
    first = await kv.put("kept", b"1")
    watch = await kv.watch()
    items = watch.__aiter__()
    assert await anext(items) == ("kept", KvEntry("kept", b"1", first))

    nats_server.stop(kill=kill)
    await until(lambda: not bus.connected)
    assert ups == [False]
    for call in (kv.get("kept"), kv.put("kept", b"2"), kv.keys(), kv.watch(), bus.kv("new")):
        with pytest.raises(BusError, match="not connected"):
            await call
    with pytest.raises(BusTimeoutError):
        await bus.flush(0.1)
    await bus.publish("a", b"sent while away")

    nats_server.start()
    await until(lambda: bus.connected)
    assert ups == [False, True]
    await inbox.wait(1)
    await bus.publish("a", b"live again")
    await inbox.wait(2)
    assert inbox.data == [b"sent while away", b"live again"]

    assert await kv.get("kept") == KvEntry("kept", b"1", first)
    second = await kv.update("kept", b"2", first)
    assert await asyncio.wait_for(anext(items), 10) == ("kept", KvEntry("kept", b"2", second))


async def test_a_watch_learns_what_it_missed(nats_server: NatsServer, bus: NatsBus):
    """The connection alone is cut, and another client changes the bucket meanwhile."""
    other = await NatsBus.connect(nats_server.url)
    kv, theirs = await bus.kv("b"), await other.kv("b")
    for key in ("stays", "changes", "goes"):
        await theirs.put(key, b"1")
    watch = await kv.watch()
    items = watch.__aiter__()
    seen = dict([await anext(items) for _ in range(3)])

    blocked = asyncio.Event()

    async def wait_then_connect(*args: object, **kwargs: object) -> None:
        await blocked.wait()
        await original(*args, **kwargs)

    original = bus._client._connect_to_server
    bus._client._connect_to_server = wait_then_connect
    bus._client._transport._io_writer.transport.abort()
    await until(lambda: not bus.connected)
    changed = await theirs.put("changes", b"2")
    await theirs.delete("goes")
    added = await theirs.put("comes", b"1")
    blocked.set()
    await until(lambda: bus.connected)
    news = dict([await asyncio.wait_for(anext(items), 10) for _ in range(3)])
    assert news == {
        "changes": KvEntry("changes", b"2", changed),
        "goes": None,
        "comes": KvEntry("comes", b"1", added),
    }
    assert seen["stays"] is not None
    await other.close()


async def test_a_watch_sees_a_bucket_that_counts_from_one_again(nats_server: NatsServer, bus: NatsBus):
    """The server lost its store: what others write now has lower revisions, or an old one with another value."""
    kv = await bus.kv("b")
    for value in (b"1", b"2", b"3"):
        await kv.put("rewritten", value)
    same = await kv.put("same", b"old")
    watch = await kv.watch()
    items = watch.__aiter__()
    assert {(await anext(items))[0] for _ in range(2)} == {"rewritten", "same"}

    nats_server.stop(kill=True)
    await until(lambda: not bus.connected)
    nats_server.lose_store()
    nats_server.start()
    other = await NatsBus.connect(nats_server.url)
    theirs = await other.kv("b")
    await theirs.put("rewritten", b"4")
    while await theirs.put("same", b"new") < same:
        pass
    await until(lambda: bus.connected)
    news: dict[str, KvEntry | None] = {}
    while news.get("same") != KvEntry("same", b"new", same) or "rewritten" not in news:
        news |= [await asyncio.wait_for(anext(items), 10)]
    assert news["rewritten"] == KvEntry("rewritten", b"4", 1)
    await other.close()


async def test_the_send_buffer_is_bounded_while_away(
    nats_server: NatsServer, bus: NatsBus, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(nats_bus, "MAX_BUFFERED_BYTES", 10_000)
    inbox = Inbox()
    await bus.subscribe("a", inbox)
    nats_server.stop()
    await until(lambda: not bus.connected)
    sent = 0
    with pytest.raises(BusError, match="buffer is full"):  # noqa: PT012 - where it is full depends on the framing
        while sent < 100:
            await bus.publish("a", bytes(1000))
            sent += 1
    with pytest.raises(BusError, match="buffer is full"):
        await bus.request("a", bytes(1000), timeout_s=1)
    assert 5 <= sent <= 10
    assert not bus._client._resp_map
    nats_server.start()
    await inbox.wait(sent)


async def test_an_error_of_the_server_that_ends_the_client_for_good_does_not_end_the_bus(
    nats_server: NatsServer, bus: NatsBus
):
    """nats-py closes, never to reconnect, on every -ERR it does not know: 'Maximum Payload Violation' is one."""
    ups: list[bool] = []
    bus.on_connection(ups.append)
    inbox = Inbox()
    await bus.subscribe("a", inbox)
    kv = await bus.kv("b")
    watch = await kv.watch()
    items = watch.__aiter__()
    dead = bus._client
    dead._max_payload = 1 << 40  # so that it lets through what the server refuses
    await dead.publish("a", bytes((8 << 20) + 1))
    await until(lambda: dead.is_closed)
    await until(lambda: bus.connected and bus._client is not dead)
    assert ups == [False, True]
    await bus.publish("a", b"alive")
    await inbox.wait(1)
    assert inbox.data == [b"alive"]
    revision = await kv.put("k", b"v")
    assert await asyncio.wait_for(anext(items), 10) == ("k", KvEntry("k", b"v", revision))


async def test_a_half_open_connection_is_noticed(nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch):
    """The server stands still: no TCP error ever comes, only the pings tell."""
    monkeypatch.setattr(nats_bus, "PING_S", 0.1)
    bus = await NatsBus.connect(nats_server.url, reconnect_wait_s=0.05)
    inbox = Inbox()
    await bus.subscribe("a", inbox)
    os.kill(nats_server.pid, signal.SIGSTOP)
    try:
        await until(lambda: not bus.connected)
    finally:
        os.kill(nats_server.pid, signal.SIGCONT)
    await until(lambda: bus.connected)
    await bus.publish("a", b"x")
    await inbox.wait(1)
    await bus.close()


async def test_a_half_open_connection_is_given_up_for_a_new_one(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
):
    """The way to the server swallows everything for good, as a firewall that forgot the connection: a new one works."""
    monkeypatch.setattr(nats_bus, "PING_S", 0.1)
    port = int(nats_server.url.rpartition(":")[2])
    swallows: list[asyncio.Event] = []
    writers: list[asyncio.StreamWriter] = []

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, lost: asyncio.Event) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                if not lost.is_set():
                    writer.write(data)

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        lost = asyncio.Event()
        swallows.append(lost)
        there, back = await asyncio.open_connection("127.0.0.1", port)
        writers.extend((writer, back))
        await asyncio.gather(carry(reader, back, lost), carry(there, writer, lost))

    proxy = await asyncio.start_server(accept, "127.0.0.1", 0)
    url = f"nats://127.0.0.1:{proxy.sockets[0].getsockname()[1]}"
    bus = await NatsBus.connect(url, reconnect_wait_s=0.05)
    inbox = Inbox()
    await bus.subscribe("a", inbox)
    await bus.flush()
    swallows[0].set()
    await until(lambda: len(swallows) == 2, what="a second connection")
    await until(lambda: bus.connected)
    await bus.publish("a", b"x")
    await inbox.wait(1)
    await bus.close()
    proxy.close()
    for writer in writers:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def test_close_while_the_server_is_away_returns(nats_server: NatsServer, bus: NatsBus):
    nats_server.stop()
    await until(lambda: not bus.connected)
    await asyncio.wait_for(bus.close(), 5)
    assert not bus.connected


async def test_jetstream_is_waited_for(nats_server: NatsServer, bus: NatsBus):
    """Right after a start the server takes connections before JetStream answers."""
    for i in range(3):
        nats_server.stop(kill=True)
        await until(lambda: not bus.connected)
        nats_server.start()
        await until(lambda: bus.connected)
        await bus.ensure_stream("EVENTS", ["e.>"], max_age_s=60, max_bytes=1 << 20)
        kv = await bus.kv("bucket")
        await kv.put("k", b"%d" % i)
        entry = await kv.get("k")
        assert entry is not None
        assert entry.value == b"%d" % i


async def test_a_reconnect_in_the_midst_of_traffic_keeps_order_and_doubles_nothing(
    nats_server: NatsServer, bus: NatsBus
):
    inbox = Inbox()
    await bus.subscribe("a", inbox)
    for i in range(3000):
        await bus.publish("a", b"%d" % i)
        if i == 1000:
            bus._client._transport._io_writer.transport.abort()
        if i % 100 == 0:
            await asyncio.sleep(0)
    await until(lambda: bus.connected)
    await bus.publish("a", b"3000")
    await until(lambda: inbox.data and inbox.data[-1] == b"3000")
    got = [int(d) for d in inbox.data]
    assert got == sorted(set(got))
