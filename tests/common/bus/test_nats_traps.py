"""One regression test for each thing about NATS that has bitten somebody. What the server does is shown on nats-py
itself, what the bus makes of it on `NatsBus`."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import nats
import pytest
from nats.aio.client import Client
from nats.js.kv import KeyValue

from talaria_common import subjects
from talaria_common.bus import Bus, KvEntry, Message, NatsBus, _nats_silence
from talaria_common.bus._nats_client import READ_BUFFER_BYTES, MendedClient
from talaria_common.bus._nats_kv import _mend_start
from talaria_common.bus._nats_silence import MUTE_S, PROBE_S, Silence
from talaria_common.bus.names import overlaps
from talaria_common.bus.server_conf import ServerConf
from tests.support.nats_server import NatsServer
from tests.support.waiting import Inbox, until


@pytest.fixture
async def raw(nats_url: str) -> AsyncIterator[Client]:
    client = await nats.connect(nats_url)
    yield client
    await client.close()


@pytest.fixture
async def bus(nats_url: str) -> AsyncIterator[NatsBus]:
    bus = await NatsBus.connect(nats_url)
    yield bus
    await bus.close()


def every_subject() -> list[str]:
    return [
        subjects.route(0),
        subjects.forward("cold-0"),
        subjects.cancel("cold-0"),
        *(subjects.control("cold-0", verb) for verb in subjects.CONTROL_VERBS),
        subjects.tokens("api-0"),
        subjects.completion("cold-0"),
        subjects.snapshot("cold-0"),
        subjects.CLUSTER,
        subjects.ALL_COMPLETIONS,
        subjects.ALL_SNAPSHOTS,
    ]


@pytest.mark.parametrize("subject", every_subject())
def test_2_the_stream_covers_nothing_but_events(subject: str):
    assert not overlaps(subjects.ALL_EVENTS, subject)


@pytest.mark.parametrize("kind", subjects.EVENT_KINDS)
def test_2_the_stream_covers_all_events(kind: str):
    assert overlaps(subjects.ALL_EVENTS, subjects.event(kind, "router-0"))


async def test_2_with_the_stream_there_requests_are_answered_by_their_responder_alone(bus: NatsBus):
    await bus.ensure_stream(subjects.EVENTS_STREAM, [subjects.ALL_EVENTS], max_age_s=60, max_bytes=1 << 20)
    tasks = set()
    await bus.subscribe(subjects.route(7), lambda m: tasks.add(asyncio.ensure_future(bus.respond(m, b"placed"))))
    for _ in range(20):
        assert (await bus.request(subjects.route(7), b"", timeout_s=5)).data == b"placed"


async def test_3_a_slow_answer_holds_up_no_other(bus: NatsBus):
    """nats-py runs one subscription's handler serially; ours are plain functions that start tasks."""
    slow_may_end = asyncio.Event()
    tasks: set[asyncio.Task[None]] = set()

    async def answer(message: Message) -> None:
        if message.data == b"slow":
            await slow_may_end.wait()
        await bus.respond(message, message.data)

    await bus.subscribe("rpc", lambda m: tasks.add(asyncio.ensure_future(answer(m))))
    slow = asyncio.ensure_future(bus.request("rpc", b"slow", timeout_s=20))
    for _ in range(10):
        assert (await bus.request("rpc", b"quick", timeout_s=5)).data == b"quick"
    assert not slow.done()
    slow_may_end.set()
    assert (await slow).data == b"slow"


async def test_4_expired_markers_count_as_none_and_create_works_over_them(bus: NatsBus, raw: Client):
    """A bucket with marker TTLs, as an operator might make it: the server leaves empty entries where keys expired."""
    js = raw.jetstream()
    theirs = await js.create_key_value(bucket="markers", limit_marker_ttl=60)
    kv = await bus.kv("markers")
    watch = await kv.watch()
    items = watch.__aiter__()
    await theirs.create("k", b"v", msg_ttl=1)
    key, entry = await anext(items)
    assert (key, entry.value if entry else None) == ("k", b"v")

    assert await asyncio.wait_for(anext(items), 10) == ("k", None)  # the marker, one second later
    left = await theirs.get("k")
    assert left.value in (None, b"")  # nats-py shows it as an entry
    assert await kv.get("k") is None
    assert await kv.keys() == []
    revision = await kv.create("k", b"again")
    assert await kv.get("k") == KvEntry("k", b"again", revision)
    assert revision > (left.revision or 0)


async def test_4_garbage_leaves_by_the_bucket_ttl_and_create_works_after_it(bus: NatsBus):
    kv = await bus.kv("garbage", ttl_s=1.0)
    first = await kv.create("k", b"v")
    for _ in range(100):
        if await kv.get("k") is None:
            break
        await asyncio.sleep(0.05)
    assert await kv.create("k", b"w") > first


async def test_4_a_bucket_takes_over_a_changed_ttl(bus: NatsBus, raw: Client):
    await bus.kv("b")
    await bus.kv("b", ttl_s=30)
    await bus.kv("b")
    info = await raw.jetstream().stream_info("KV_b")
    assert info.config.max_age == 30


async def test_4_listing_keys_leaves_no_consumers_behind(bus: NatsBus, raw: Client, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("talaria_common.bus._nats_kv._LISTING_IDLE_S", 0.2)
    kv = await bus.kv("b")
    await kv.put("k", b"v")
    for _ in range(10):
        assert await kv.keys() == ["k"]
    for _ in range(200):
        if not await raw.jetstream().consumers_info("KV_b"):
            return
        await asyncio.sleep(0.05)
    raise AssertionError("consumers are left")


async def test_5_nats_takes_illegal_subjects_silently(raw: Client):
    """The reason for our own check: nothing happens, not even an error."""
    await raw.publish("a..b", b"")
    await raw.publish("x.*.y", b"")
    await raw.flush()
    assert raw.last_error is None


async def test_6_a_slow_handler_loses_nothing(nats_url: str):
    """nats-py drops what its own queue has no room for; ours holds up the socket, and then the server buffers."""
    bus = await NatsBus.connect(nats_url)
    faults: list[Exception] = []
    bus.on_error(faults.append)
    seen: list[bytes] = []

    def slow(message: Message) -> None:
        time.sleep(0.0005)
        seen.append(message.data)

    await bus.subscribe("slow", slow)
    await bus.flush()
    for i in range(1000):
        await bus.publish("slow", b"%d" % i)
    await until(lambda: len(seen) == 1000)
    assert seen == [b"%d" % i for i in range(1000)]
    assert not faults
    await bus.close()


async def test_7_a_large_batch_keeps_order_across_the_read_buffer(bus: NatsBus):
    inbox = Inbox()
    await bus.subscribe("big", inbox)
    sizes = [1, READ_BUFFER_BYTES - 1, READ_BUFFER_BYTES, READ_BUFFER_BYTES + 1, 3 * READ_BUFFER_BYTES, 2]
    for i, size in enumerate(sizes):
        await bus.publish("big", bytes([i]) * size)
    await inbox.wait(len(sizes), 20)
    assert [(d[0], len(d)) for d in inbox.data] == list(enumerate(sizes))


async def test_8_the_limit_is_the_servers(tmp_path):
    server = NatsServer(tmp_path, ServerConf("", max_payload_bytes=200_000)).start()
    try:
        bus = await NatsBus.connect(server.url)
        assert bus.max_payload_bytes == 200_000
        await bus.close()
    finally:
        server.stop()


async def test_9_draining_a_queue_group_loses_no_request(bus: NatsBus, nats_url: str):
    """Two members; one drains while requests pour in. Every one is answered: a drain unsubscribes first."""
    leaver = await NatsBus.connect(nats_url)
    tasks: set[asyncio.Task[None]] = set()

    def serve(member: Bus) -> None:
        def answer(message: Message) -> None:
            tasks.add(asyncio.ensure_future(member.respond(message, message.data)))

        return answer

    await bus.subscribe("rpc", serve(bus), queue="q")
    leaving = await leaver.subscribe("rpc", serve(leaver), queue="q")
    await leaver.flush()
    asking = []
    drained = None
    for i in range(400):
        asking.append(asyncio.ensure_future(bus.request("rpc", b"%d" % i, timeout_s=10)))
        if i == 200:
            drained = asyncio.ensure_future(leaving.drain())
        if i % 10 == 0:
            await asyncio.sleep(0)
    assert [a.data for a in await asyncio.gather(*asking)] == [b"%d" % i for i in range(400)]
    assert drained is not None
    await drained
    await leaver.close()


async def test_flush_waits_for_what_was_published_before(bus: NatsBus, nats_url: str):
    """nats-py's own PING overtakes commands that wait for its flusher."""
    other = await NatsBus.connect(nats_url)
    for i in range(50):
        inbox = Inbox()
        sub = await other.subscribe(f"flushed.{i}", inbox)
        await other.flush()
        await bus.publish(f"flushed.{i}", b"")
        await bus.flush()
        await sub.drain()
        assert len(inbox.messages) == 1
    await other.close()


async def test_a_late_pong_does_not_end_the_read_loop(bus: NatsBus):
    """nats-py sets a result on the future that its timed-out flush has cancelled."""
    inbox = Inbox()
    await bus.subscribe("a", inbox)
    given_up: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
    given_up.cancel()
    await bus._client._send_ping(given_up)
    await bus.flush()
    await bus.publish("a", b"x")
    await inbox.wait(1)


def test_the_overridden_methods_are_still_there():
    for method in (
        "_send_ping",
        "_process_pong",
        "_send_command",
        "_flush_pending",
        "_init_request_sub",
        "_process_msg",
    ):
        assert callable(getattr(Client, method))
        assert callable(getattr(MendedClient, method))
    assert isinstance(KeyValue, type)


async def test_a_server_that_hangs_is_away_until_it_answers(tmp_path: Path):
    """Its connections stand, and the kernel takes what is written to them: only its silence shows it."""
    server = NatsServer(tmp_path).start()
    bus, other = await NatsBus.connect(server.url), await NatsBus.connect(server.url)
    told: list[bool] = []
    inbox = Inbox()
    bus.on_connection(told.append)
    bus.on_connection(lambda up: inbox.messages.append(Message("connection", str(up).encode(), {}, None)))
    await bus.subscribe("a.b", inbox)
    await bus.flush()
    os.kill(server.pid, signal.SIGSTOP)
    try:
        await until(lambda: told == [False], what="being told that it is away")
        assert not bus.connected
        await other.publish("a.b", b"late")
    finally:
        os.kill(server.pid, signal.SIGCONT)
    await until(lambda: [m.subject for m in inbox.messages][-1:] == ["a.b"], what="what was sent meanwhile")
    assert [m.data for m in inbox.messages] == [b"False", b"True", b"late"], "told before anything is delivered"
    assert bus.connected
    await bus.close()
    await other.close()
    server.stop()


def test_a_hang_is_judged_in_time():
    """Within `MUTE_S` of the last sound and one interval, in which that sound may have come at any time."""
    silence = Silence()
    intervals = round(MUTE_S / PROBE_S)
    assert silence.judge(PROBE_S, quiet=False) == ""
    told = [silence.judge(PROBE_S, quiet=True) for _ in range(intervals)]
    assert told == ["ask", *[""] * (intervals - 2), "mute"]


def test_what_we_could_not_hear_neither_counts_as_silence_nor_ends_it():
    silence = Silence()
    assert silence.judge(PROBE_S, quiet=True) == "ask"
    assert {silence.judge(2 * PROBE_S + 0.1, quiet=True) for _ in range(99)} == {""}
    told = [silence.judge(PROBE_S, quiet=True) for _ in range(round(MUTE_S / PROBE_S) - 1)]
    assert told[-1] == "mute"


def test_a_sound_ends_the_silence_even_in_a_late_interval():
    for lasted_s in (PROBE_S, 9 * PROBE_S):
        silence = Silence()
        for _ in range(round(MUTE_S / PROBE_S) - 1):
            assert silence.judge(PROBE_S, quiet=True) != "mute"
        assert silence.judge(lasted_s, quiet=False) == ""
        assert silence.judge(PROBE_S, quiet=True) == "ask", "it is asked anew"


async def test_a_quiet_server_is_not_away(nats_url: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        _nats_silence, "MUTE_S", 3.0
    )  # a busy machine's server may need more than a second for an answer
    bus = await NatsBus.connect(nats_url)
    told: list[bool] = []
    bus.on_connection(told.append)
    await asyncio.sleep(2 * _nats_silence.MUTE_S)  # nothing is said in all this time but pings and pongs
    assert told == []
    await bus.close()


@pytest.mark.parametrize("come", [0, 1, 2])
async def test_4_entries_overtaken_by_the_word_that_nothing_is_pending(bus: NatsBus, raw: Client, come: int):
    """The marker of an empty bucket, put by nats-py while entries are on their way: `come` of them already here."""
    kv = await bus.kv("b")
    for key in ("k1", "k2"):
        await kv.put(key, b"v")
    watcher = await (await raw.jetstream().key_value("b")).watchall()
    entries = [await watcher.updates() for _ in range(2)]
    assert [await watcher.updates(), watcher._updates.qsize()] == [None, 0]
    for item in (None, *entries[:come]):
        watcher._updates.put_nowait(item)
    watcher._sub._sub._received = 0
    await _mend_start(watcher)
    if come < 2:
        assert not watcher._init_done
        return
    assert [(await watcher.updates()).key for _ in range(2)] == ["k1", "k2"]
    assert await watcher.updates() is None
    await watcher.stop()
