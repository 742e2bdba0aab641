"""What every bus owes its users: the same tests in memory and on a real server."""

from __future__ import annotations

import asyncio

import pytest

from talaria_common.bus import Bus, Message
from talaria_common.errors import BusError, BusNameError, BusTimeoutError, NoRespondersError, PayloadTooLargeError
from tests.support.waiting import Inbox, until


async def test_a_message_reaches_every_subscriber_with_its_headers(bus_pair: tuple[Bus, Bus]):
    one, other = bus_pair
    here, there = Inbox(), Inbox()
    await one.subscribe("a.b", here)
    await other.subscribe("a.b", there)
    await other.flush()
    await one.publish("a.b", b"x", headers={"Talaria-Forward": '{"a": "ü"}'})
    for inbox in (here, there):
        (message,) = await inbox.wait(1)
        assert message == Message("a.b", b"x", {"Talaria-Forward": '{"a": "ü"}'}, None)


@pytest.mark.parametrize(
    ("pattern", "heard"),
    [
        ("a.*", ["a.b"]),
        ("a.>", ["a.b", "a.b.c"]),
        ("*.b.*", ["a.b.c"]),
        ("a.b", ["a.b"]),
        (">", ["a.b", "a.b.c", "x"]),
    ],
)
async def test_wildcards(bus: Bus, pattern: str, heard: list[str]):
    inbox, end = Inbox(), Inbox()
    await bus.subscribe(pattern, inbox)
    await bus.subscribe("end.of.test", end)
    for subject in ("a.b", "a.b.c", "x", "end.of.test"):
        await bus.publish(subject, b"")
    await end.wait(1)
    await until(lambda: len(inbox.messages) >= len(heard))
    assert [m.subject for m in inbox.messages if m.subject != "end.of.test"] == heard


async def test_a_queue_group_shares_and_others_get_all(bus_pair: tuple[Bus, Bus]):
    one, other = bus_pair
    group = [Inbox(), Inbox()]
    tap = Inbox()
    await one.subscribe("work", group[0], queue="g")
    await other.subscribe("work", group[1], queue="g")
    await other.subscribe("work", tap)
    await other.flush()
    for i in range(200):
        await one.publish("work", str(i).encode())
    await tap.wait(200)
    await until(lambda: sum(len(i.messages) for i in group) >= 200)
    shared = sorted(int(d) for inbox in group for d in inbox.data)
    assert shared == list(range(200))
    assert all(inbox.messages for inbox in group)


async def test_request_and_reply(bus_pair: tuple[Bus, Bus]):
    server, client = bus_pair
    tasks: set[asyncio.Task[None]] = set()

    def answer(message: Message) -> None:
        tasks.add(asyncio.ensure_future(server.respond(message, message.data.upper())))

    await server.subscribe("rpc", answer)
    await server.flush()
    answers = await asyncio.gather(*(client.request("rpc", f"q{i}".encode(), timeout_s=5) for i in range(50)))
    assert [a.data for a in answers] == [f"Q{i}".encode() for i in range(50)]


async def test_nobody_there_is_told_apart_from_no_answer(bus: Bus):
    with pytest.raises(NoRespondersError):
        await bus.request("nobody", b"", timeout_s=5)
    await bus.subscribe("silent", lambda _: None)
    with pytest.raises(BusTimeoutError):
        await bus.request("silent", b"", timeout_s=0.05)


async def test_answering_what_is_no_request_does_nothing(bus: Bus):
    await bus.respond(Message("x", b"", {}, None), b"answer")


async def test_order_of_one_publisher_holds_over_20_000_messages(bus: Bus):
    inbox = Inbox()
    await bus.subscribe("o.>", inbox)
    for i in range(20_000):
        await bus.publish(f"o.{i % 7}", b"%d" % i)
    await inbox.wait(20_000, 30)
    assert inbox.data == [b"%d" % i for i in range(20_000)]


async def test_a_handler_never_runs_inside_publish(bus: Bus):
    inside = False
    seen: list[bool] = []
    await bus.subscribe("a", lambda _: seen.append(inside))
    await bus.flush()
    inside = True
    await bus.publish("a", b"")
    inside = False
    await until(lambda: seen)
    assert seen == [False]


async def test_the_payload_limit_counts_headers_and_is_exact(bus: Bus):
    inbox = Inbox()
    await bus.subscribe("big", inbox)
    limit = bus.max_payload_bytes
    await bus.publish("big", bytes(limit))
    with pytest.raises(PayloadTooLargeError, match=str(limit)):
        await bus.publish("big", bytes(limit + 1))
    with pytest.raises(PayloadTooLargeError):
        await bus.request("big", bytes(limit + 1), timeout_s=1)
    headers = {"K": "v" * 100}
    block = len("NATS/1.0\r\nK: \r\n\r\n") + 100
    await bus.publish("big", bytes(limit - block), headers=headers)
    with pytest.raises(PayloadTooLargeError):
        await bus.publish("big", bytes(limit - block + 1), headers=headers)
    await inbox.wait(2)
    await bus.flush()
    assert bus.connected
    assert [len(d) for d in inbox.data] == [limit, limit - block]


@pytest.mark.parametrize("subject", ["", "a..b", ".a", "a.", "x.*.y", "a.>", "a b", "a\r\nPUB x 0", "a\x00"])
async def test_illegal_subjects_are_refused_before_they_are_sent(bus: Bus, subject: str):
    with pytest.raises(BusNameError):
        await bus.publish(subject, b"")
    with pytest.raises(BusNameError):
        await bus.request(subject, b"", timeout_s=1)


@pytest.mark.parametrize("subject", ["", "a..b", "a.>.b", "a*", ">a", "a b"])
async def test_illegal_filters_are_refused(bus: Bus, subject: str):
    with pytest.raises(BusNameError):
        await bus.subscribe(subject, lambda _: None)


async def test_a_failing_handler_is_reported_and_goes_on(bus: Bus):
    errors: list[Exception] = []
    bus.on_error(errors.append)
    inbox = Inbox()

    def handler(message: Message) -> None:
        inbox(message)
        if message.data == b"bad":
            raise RuntimeError("broken")

    await bus.subscribe("h", handler)
    for data in (b"bad", b"good"):
        await bus.publish("h", data)
    await inbox.wait(2)
    await until(lambda: errors)
    assert isinstance(errors[0], BusError)
    assert "broken" in str(errors[0])


async def test_stop_drops_and_drain_handles_what_had_arrived(bus: Bus):
    drained, stopped = Inbox(), Inbox()
    sub = await bus.subscribe("d", drained)
    other = await bus.subscribe("s", stopped)
    await bus.flush()
    for _ in range(100):
        await bus.publish("d", b"")
    await sub.drain()
    assert len(drained.messages) == 100
    await other.stop()
    await bus.publish("d", b"")
    await bus.publish("s", b"")
    await bus.flush()
    assert (len(drained.messages), len(stopped.messages)) == (100, 0)
    await sub.drain()
    await sub.stop()
    await other.stop()
    await other.drain()


async def test_close_handles_what_is_queued_and_lets_handlers_answer(bus_pair: tuple[Bus, Bus]):
    server, client = bus_pair
    tasks: set[asyncio.Task[None]] = set()

    def answer(message: Message) -> None:
        tasks.add(asyncio.ensure_future(server.respond(message, b"done")))

    await server.subscribe("rpc", answer)
    await server.flush()
    asking = [asyncio.ensure_future(client.request("rpc", b"", timeout_s=5)) for _ in range(20)]
    await asyncio.sleep(0)
    await client.flush()
    await server.close()
    assert [a.data for a in await asyncio.gather(*asking)] == [b"done"] * 20
    assert not server.connected
    with pytest.raises(BusError):
        await server.publish("x", b"")
    with pytest.raises(BusError):
        await server.subscribe("x", lambda _: None)
    with pytest.raises(BusError):
        await server.request("x", b"", timeout_s=1)
    with pytest.raises(BusError):
        await server.flush()
    await server.close()


async def test_ensure_stream_can_be_repeated_and_changed(bus: Bus):
    await bus.ensure_stream("EVENTS", ["e.>"], max_age_s=60, max_bytes=1 << 20)
    await bus.ensure_stream("EVENTS", ["e.>"], max_age_s=60, max_bytes=1 << 20)
    await bus.publish("e.switch.x", b"1")
    await bus.flush()
    await bus.ensure_stream("EVENTS", ["e.>"], max_age_s=30, max_bytes=1 << 19)
    await bus.publish("e.switch.x", b"2")
    await bus.flush()

    async def held() -> list[bytes]:
        return [m.data async for m in bus.read_stream("EVENTS", "e.>")]

    async with asyncio.timeout(20):
        while len(await held()) < 2:  # the server may not have stored it yet
            await asyncio.sleep(0.02)
    assert await held() == [b"1", b"2"]


async def test_a_stream_answers_requests_on_its_subjects(bus: Bus):
    """NATS trap 2, the reason why the only stream filter is talaria.v1.event.>."""
    await bus.ensure_stream("EVENTS", ["e.>"], max_age_s=60, max_bytes=1 << 20)
    answer = await bus.request("e.x", b"", timeout_s=5)
    assert b'"stream"' in answer.data


async def test_a_tap_hides_no_responders(bus_pair: tuple[Bus, Bus]):
    """NATS trap 1: so liveness never rests on it."""
    bus, tap = bus_pair
    seen = Inbox()
    await tap.subscribe("talaria.>", seen)
    await tap.flush()
    with pytest.raises(BusTimeoutError):
        await bus.request("talaria.v1.rpc.instance.gone.health", b"", timeout_s=0.1)
    await seen.wait(1)
    assert len(seen.messages) == 1


class TestReadStream:
    async def filled(self, bus: Bus) -> None:
        await bus.ensure_stream("EVENTS", ["e.>"], max_age_s=60, max_bytes=1 << 20)
        for n in range(700):
            await bus.publish(f"e.{'odd' if n % 2 else 'even'}.x", str(n).encode())
        await bus.flush()
        async with asyncio.timeout(10):  # the server stores what it has received a little later
            while len([m async for m in bus.read_stream("EVENTS", "e.>")]) < 700:
                await asyncio.sleep(0.02)

    async def test_everything_on_a_subject_in_order_and_then_it_ends(self, bus: Bus):
        await self.filled(bus)
        odd = [m async for m in bus.read_stream("EVENTS", "e.odd.*")]
        assert [int(m.data) for m in odd] == list(range(1, 700, 2))
        assert {(m.subject, m.reply) for m in odd} == {("e.odd.x", None)}
        assert len([m async for m in bus.read_stream("EVENTS", "e.>")]) == 700

    async def test_of_the_last_seconds(self, bus: Bus):
        await self.filled(bus)
        assert len([m async for m in bus.read_stream("EVENTS", "e.>", since_s=60)]) == 700
        assert [m async for m in bus.read_stream("EVENTS", "e.>", since_s=-1)] == []

    async def test_nothing_there(self, bus: Bus):
        await bus.ensure_stream("EVENTS", ["e.>"], max_age_s=60, max_bytes=1 << 20)
        assert [m async for m in bus.read_stream("EVENTS", "e.odd.*")] == []

    async def test_no_such_stream(self, bus: Bus):
        with pytest.raises(BusError, match="NONE"):
            _ = [m async for m in bus.read_stream("NONE", "e.>")]

    async def test_a_reader_may_leave_early(self, bus: Bus):
        await self.filled(bus)
        async for message in bus.read_stream("EVENTS", "e.>"):
            assert message.data == b"0"
            break
        assert len([m async for m in bus.read_stream("EVENTS", "e.>")]) == 700
