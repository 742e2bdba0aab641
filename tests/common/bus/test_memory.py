"""What only the in-memory bus can show: cutting one connection off, and looking into the hub."""

from __future__ import annotations

import asyncio

import pytest

from talaria_common.bus import KvEntry, MemoryHub, Message
from talaria_common.bus import memory as memory_module
from talaria_common.errors import BusError, BusTimeoutError
from tests.support.waiting import Inbox, until


async def test_a_cut_connection_hears_nothing_and_sends_later():
    hub = MemoryHub()
    mine, theirs = hub.connect(), hub.connect()
    ups: list[bool] = []
    mine.on_connection(ups.append)
    here, there = Inbox(), Inbox()
    await mine.subscribe("a", here)
    await theirs.subscribe("b", there)
    hub.disconnect(mine)
    await until(lambda: ups == [False])
    assert not mine.connected
    await theirs.publish("a", b"lost")
    await mine.publish("b", b"1")
    await mine.publish("b", b"2")
    await theirs.flush()
    assert there.messages == []
    with pytest.raises(BusTimeoutError):
        await mine.flush(0.1)
    hub.reconnect(mine)
    await there.wait(2)
    assert there.data == [b"1", b"2"]
    await theirs.publish("a", b"heard")
    await here.wait(1)
    assert here.data == [b"heard"]
    assert ups == [False, True]


async def test_buckets_fail_at_once_while_cut_off_and_watches_catch_up():
    hub = MemoryHub()
    mine, theirs = hub.connect(), hub.connect()
    kv, other = await mine.kv("b"), await theirs.kv("b")
    for key in ("stays", "changes", "goes"):
        await other.put(key, b"1")
    watch = await kv.watch()
    items = watch.__aiter__()
    for _ in range(3):
        await anext(items)
    hub.disconnect(mine)
    for call in (kv.get("k"), kv.put("k", b"x"), kv.keys(), kv.watch(), mine.kv("b")):
        with pytest.raises(BusError, match="not connected"):
            await call
    changed = await other.put("changes", b"2")
    await other.delete("goes")
    hub.reconnect(mine)
    news = dict([await asyncio.wait_for(anext(items), 5) for _ in range(2)])
    assert news == {"changes": KvEntry("changes", b"2", changed), "goes": None}


async def test_a_request_sent_while_cut_off_is_answered_after_the_reconnect():
    hub = MemoryHub()
    mine, theirs = hub.connect(), hub.connect()
    tasks: set[asyncio.Task[None]] = set()
    await theirs.subscribe("rpc", lambda m: tasks.add(asyncio.ensure_future(theirs.respond(m, b"late"))))
    hub.disconnect(mine)
    asking = asyncio.ensure_future(mine.request("rpc", b"", timeout_s=5))
    await asyncio.sleep(0)
    hub.reconnect(mine)
    assert (await asking).data == b"late"


async def test_the_send_buffer_is_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(memory_module, "MAX_BUFFERED_BYTES", 100)
    hub = MemoryHub()
    bus = hub.connect()
    hub.disconnect(bus)
    await bus.publish("a", bytes(100))
    with pytest.raises(BusError, match="buffer is full"):
        await bus.publish("a", b"x")


async def test_a_slow_consumer_loses_messages_and_is_reported_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(memory_module, "MAX_PENDING_MESSAGES", 10)
    bus = MemoryHub().connect()
    faults: list[Exception] = []
    bus.on_error(faults.append)
    inbox = Inbox()
    await bus.subscribe("a", inbox)
    for i in range(50):
        await bus.publish("a", b"%d" % i)
    await bus.flush()
    assert inbox.data == [b"%d" % i for i in range(10)]
    assert len(faults) == 1


async def test_streams_keep_what_fits():
    hub = MemoryHub()
    bus = hub.connect()
    await bus.ensure_stream("EVENTS", ["e.>"], max_age_s=60, max_bytes=25)
    for i in range(5):
        await bus.publish("e.x", b"%d" % i * 10)
    await bus.publish("other", b"x")
    assert [m.data for _, m in hub.streams["EVENTS"].messages] == [b"3" * 10, b"4" * 10]


async def test_ended_subscriptions_leave_nothing_in_the_hub():
    hub = MemoryHub()
    bus = hub.connect()
    for pattern in ("a", "a.*", ">"):
        await (await bus.subscribe(pattern, lambda _: None)).stop()
    with pytest.raises(BusError):
        await bus.request("nobody", b"", timeout_s=1)
    assert not hub._exact
    assert not hub._wild
    assert hub.deliver(Message("a", b"", {}, None)) == 0
