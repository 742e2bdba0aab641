"""The server configuration, on a real server: limits, users, and what the read-only tap user may see."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest

from talaria_common import subjects
from talaria_common.bus import NatsBus
from talaria_common.bus.faults import BusFaultError
from talaria_common.bus.server_conf import ServerConf
from talaria_common.errors import BusError
from tests.support.nats_server import NatsServer
from tests.support.waiting import Inbox, until

CONF = ServerConf("", user="mesh", password='se"cret', tap_password="look")


@pytest.fixture
def server(tmp_path) -> Iterator[NatsServer]:
    server = NatsServer(tmp_path, CONF).start()
    yield server
    server.stop()


@pytest.fixture
async def mesh(server: NatsServer) -> AsyncIterator[NatsBus]:
    bus = await NatsBus.connect(server.url, user="mesh", password='se"cret')
    yield bus
    await bus.close()


@pytest.fixture
async def tap(server: NatsServer) -> AsyncIterator[NatsBus]:
    bus = await NatsBus.connect(server.url, user="tap", password="look")
    yield bus
    await bus.close()


@pytest.mark.parametrize(("user", "password"), [("", ""), ("mesh", "wrong"), ("tap", 'se"cret')])
async def test_who_may_not_come_in(server: NatsServer, user: str, password: str):
    with pytest.raises(BusError, match=r"(?i)authorization"):
        await asyncio.wait_for(NatsBus.connect(server.url, user=user, password=password, timeout_s=10), 5)


async def test_the_mesh_user_may_do_all_it_needs(mesh: NatsBus):
    await mesh.ensure_stream(subjects.EVENTS_STREAM, [subjects.ALL_EVENTS], max_age_s=60, max_bytes=1 << 20)
    kv = await mesh.kv(subjects.KV_SESSIONS)
    await kv.put("k", b"v")
    assert mesh.max_payload_bytes == 8 << 20


async def test_the_tap_user_sees_all_but_bodies_tokens_and_answers(mesh: NatsBus, tap: NatsBus):
    seen = Inbox()
    await tap.subscribe("talaria.>", seen)
    await tap.subscribe(">", seen)
    await tap.flush()
    hidden = [subjects.forward("cold-0"), subjects.tokens("api-0"), "_INBOX.somebody.1"]
    shown = [
        subjects.route(3),
        subjects.cancel("cold-0"),
        subjects.control("cold-0", "health"),
        subjects.completion("cold-0"),
        subjects.snapshot("cold-0"),
        subjects.CLUSTER,
        subjects.event("switch", "cold-0"),
    ]
    for subject in [*hidden, *shown]:
        await mesh.publish(subject, b"x")
    await mesh.flush()
    await tap.flush()
    await until(lambda: len(seen.messages) >= 2 * len(shown))
    assert {m.subject for m in seen.messages} == set(shown)


@pytest.mark.parametrize(
    "subject", ["talaria.v1.tokens.api-0", "talaria.v1.tokens.>", "talaria.v1.rpc.instance.*.forward"]
)
async def test_the_tap_user_cannot_ask_for_bodies_and_tokens(tap: NatsBus, subject: str):
    faults: list[Exception] = []
    tap.on_error(faults.append)
    await tap.subscribe(subject, Inbox())
    await until(lambda: faults)
    assert isinstance(faults[0], BusFaultError)
    assert faults[0].fault == "permission"
    assert tap.connected


async def test_the_tap_user_can_say_nothing(mesh: NatsBus, tap: NatsBus):
    """NATS trap 10: a denied publish shows only in the error callback."""
    faults: list[Exception] = []
    tap.on_error(faults.append)
    heard = Inbox()
    await mesh.subscribe("talaria.>", heard)
    await mesh.flush()
    for subject in (subjects.cancel("cold-0"), subjects.control("cold-0", "close"), subjects.event("lease", "x")):
        await tap.publish(subject, b"x")
    await tap.flush()
    await mesh.flush()
    await until(lambda: faults)
    assert "permissions violation for publish" in str(faults[0])
    assert heard.messages == []


@pytest.mark.parametrize(
    "conf",
    [
        ServerConf("/s", user="mesh"),
        ServerConf("/s", password="p"),
        ServerConf("/s", tap_password="p"),
        ServerConf("/s", user="tap", password="p", tap_password="q"),
        ServerConf("/s\n"),
    ],
)
def test_mistakes_are_refused(conf: ServerConf):
    with pytest.raises(ValueError):
        conf.render()


def test_without_a_user_there_is_no_authorization():
    text = ServerConf("/var/lib/nats", port=4333, monitor_port=8222).render()
    assert "authorization" not in text
    assert 'listen: "127.0.0.1:4333"' in text
    assert 'http: "127.0.0.1:8222"' in text
