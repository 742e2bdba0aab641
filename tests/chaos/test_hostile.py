"""A harsh world on real processes with sim engines: hostile HTTP, garbage on the bus, overload, clients that vanish."""

from __future__ import annotations

import asyncio
import json
import random
import signal
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import pytest
import pytest_asyncio

from talaria_common.bus import Message, NatsBus
from talaria_common.wire import (
    FORWARD_HEADER,
    Cancel,
    ForwardHead,
    ForwardReply,
    ModelState,
    Snapshot,
    decode,
    encode,
)
from tests.mesh.settings import sim
from tests.support.load import Outcome, stream_chat
from tests.support.mesh import Mesh, mesh

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.mesh,
    pytest.mark.timeout(90),
    pytest.mark.asyncio(loop_scope="module"),
]

PACED = {"ttft_ms": 20.0, "decode_step_ms": 10.0, "switch_ms": 20.0}
SMALL = {"sim": PACED, "slot_ms": 200.0, "drain_ms": 50.0, "max_queued": 4, "max_running": 4}
MODELS = ("model-a", "model-b", "model-c")
HUGE = "1" + "0" * 320  # as a float it is infinite
DEEP = "[" * 20_000 + "]" * 20_000


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Mesh]:
    async with mesh(tmp_path_factory.mktemp("mesh"), sim({"id": "cold-0", **SMALL}, {"id": "cold-1", **SMALL})) as it:
        yield it


async def call(it: Mesh, model: str = "model-a", session: str = "", **body: Any) -> Outcome:
    messages = [{"role": "user", "content": f"hello {session}"}]
    return await stream_chat(it.http, model, messages, session=session, **({"max_tokens": 5} | body))


async def all_well(it: Mesh) -> None:
    """Every part is the process that it was, and every model answers."""
    dead = [p.name for p in it.parts.values() if p.process is None or p.process.poll() is not None]
    assert dead == []
    await it.wait_ready(20)
    for model in MODELS:
        outcome = await call(it, model, session="well")
        assert outcome.error == ""


async def idle(it: Mesh) -> None:
    """Until snapshots of both instances say that nothing waits or runs there."""
    free: dict[str, bool] = {}

    def heard(message: Message) -> None:
        snapshot = decode(message.data, Snapshot)
        free[snapshot.iid] = not any(m.queued or m.running for m in snapshot.models)

    bus = await it.bus()
    await bus.subscribe("talaria.v1.snapshot.*", heard)
    async with asyncio.timeout(15):
        while len(free) < 2 or not all(free.values()):
            await asyncio.sleep(0.05)
    await bus.close()


# --- HTTP


def chat(more: str = "", content: str = '"x"') -> bytes:
    text = f'{{"model":"model-a","max_tokens":2,"messages":[{{"role":"user","content":{content}}}]{more}}}'
    return text.encode("utf-8", "surrogatepass")


def request(body: bytes, *headers: bytes) -> bytes:
    lines = [b"POST /v1/chat/completions HTTP/1.1", b"Host: x", b"Content-Type: application/json", *headers]
    return b"\r\n".join([*lines, b"Content-Length: %d" % len(body), b"", body])


async def raw(it: Mesh, data: bytes, *, half_close: bool = False) -> bytes:
    """What the api says to `data` until it closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", httpx.URL(it.url).port)
    try:
        writer.write(data)
        if half_close:
            writer.write_eof()
        async with asyncio.timeout(20):
            return await reader.read(-1)
    finally:
        writer.close()


@pytest.mark.parametrize(
    ("status", "body", "headers"),
    [
        (400, b"", []),
        (400, b"null", []),
        (400, chat() * 2, []),
        (400, b"\xef\xbb\xbf" + chat(), []),
        (400, chat(content='"\\ud800"'), []),
        (400, chat(content='"\ud800"'), []),
        (400, chat(content="null"), []),
        (400, chat(',"temperature":NaN'), []),
        (400, chat(',"temperature":1e999'), []),
        (400, chat(f',"seed":{HUGE}'), []),
        (400, chat(f',"anything":{DEEP}'), []),
        (400, chat(content=DEEP), []),
        (400, chat(',"stop":""'), []),
        (400, chat(',"stream_options":{}'), []),
        (400, chat(), [b"X-Talaria-Timeout-S: nan"]),
        (400, chat(), [b"X-Talaria-Timeout-S: -1"]),
        (400, chat(), [b"X-Folded: a\r\n b"]),
        (400, chat(), [b"Transfer-Encoding: chunked"]),
        (404, chat(',"model":"model-a\\u0000"'), []),
        (415, chat(), [b"Content-Encoding: gzip"]),
        (200, chat(content='""'), []),
        (200, chat(content='"\\u0000"'), []),
        (200, chat(',"stop":[],"stream_options":null,"max_tokens":3'), []),
        (200, chat(f',"anything":{HUGE}'), []),
        (200, chat(), [b"X-Talaria-Session-ID: a..b.*.> \xff"]),
        (200, chat(), [b"X-Talaria-Session-ID: " + b"x" * 10_240]),
        (200, chat(), [b"X-Talaria-Timeout-S: inf", b"traceparent: 00-\xff-zz"]),
    ],
)
async def test_hostile_request(running: Mesh, status: int, body: bytes, headers: list[bytes]) -> None:
    answer = await raw(running, request(body, b"Connection: close", *headers))
    head, _, content = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status), answer[:300]
    if status != 200:
        assert set(json.loads(content)["error"]) == {"message", "type", "param", "code"}


async def test_pipelined_calls_are_answered_in_turn(running: Mesh) -> None:
    calls = request(chat()) * 3 + request(chat(',"stream":true')) + b"GET /livez HTTP/1.1\r\nConnection: close\r\n\r\n"
    answer = await raw(running, calls)
    assert answer.count(b"HTTP/1.1 200 ") == 5
    assert answer.index(b"data: [DONE]") < answer.index(b'{"live":true}')


async def test_bodies_that_stop_are_given_up(running: Mesh) -> None:
    start = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n"
    assert await raw(running, start + b"{", half_close=True) == b""
    assert (await raw(running, start + b"abcde\r\nzz\r\n")).startswith(b"HTTP/1.1 400 ")
    await all_well(running)


# --- clients, many and fickle


async def test_overload_is_told_and_passes(running: Mesh) -> None:
    outcomes = await asyncio.gather(*(call(running, MODELS[n % 3], f"many-{n}", max_tokens=20) for n in range(60)))
    assert {o.status for o in outcomes} == {200, 429}
    for o in outcomes:
        assert o.done if o.status == 200 else int(o.headers["retry-after"]) >= 1, o.error
    await idle(running)
    await all_well(running)


async def test_calls_of_one_session_at_once(running: Mesh) -> None:
    outcomes = await asyncio.gather(*(call(running, "model-a", "same") for _ in range(6)))
    assert [o.error for o in outcomes] == [""] * 6
    assert len({o.text for o in outcomes}) == 1


@pytest.mark.parametrize("after_s", [0.0, 0.01, 0.05, 0.3])
async def test_clients_that_vanish_leave_nothing_behind(running: Mesh, after_s: float) -> None:
    calls = [asyncio.create_task(call(running, MODELS[n % 3], f"gone-{n}", max_tokens=5000)) for n in range(6)]
    await asyncio.sleep(after_s)
    for one in calls:
        one.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    await idle(running)  # 5000 tokens would take 50 s


@pytest.mark.parametrize("part", ["api-0", "router-0", "telemetry-0"])
async def test_a_part_that_stands_still_costs_time_only(running: Mesh, part: str) -> None:
    calls = [asyncio.create_task(call(running, MODELS[n % 3], f"still-{n}", max_tokens=30)) for n in range(4)]
    await asyncio.sleep(0.1)
    running.parts[part].kill(signal.SIGSTOP)
    await asyncio.sleep(2.5)  # longer than any silence that is taken for death
    running.parts[part].kill(signal.SIGCONT)
    assert [(await one).error for one in calls] == [""] * 4


# --- the bus


async def heard_on(bus: NatsBus, it: Mesh) -> dict[str, Message]:
    """One real message of each subject."""
    found: dict[str, Message] = {}

    def keep(message: Message) -> None:
        found.setdefault(message.subject, message)

    sub = await bus.subscribe("talaria.v1.>", keep)
    await bus.flush()
    for model in MODELS:
        await call(it, model, f"heard-{model}")
    await sub.stop()
    return found


def twisted(dice: random.Random, data: bytes | str) -> bytes:
    """The message with some numbers and texts replaced, and fields of a later version."""

    def twist(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: twist(v) for k, v in value.items()} | {"of_a_later_version": {"x": [1]}}
        if isinstance(value, list):
            return [twist(v) for v in value]
        if dice.random() > 0.15:
            return value
        if isinstance(value, bool | int | float):
            return dice.choice([-1, 0, 2**53, -(10**19), int(HUGE), 0.5, 1e300])
        return dice.choice(["", "a.b *", ">", "\u0000", "é" * 99, None])

    return json.dumps(twist(json.loads(data or b"{}"))).encode()


async def test_garbage_on_every_subject_ends_nothing(running: Mesh) -> None:
    dice = random.Random(1)
    bus = await running.bus()
    found = await heard_on(bus, running)
    plain = [f"talaria.v1.rpc.instance.cold-0.{verb}" for verb in ("cancel", "health", "open", "close", "resume")]
    plain += ["talaria.v1.snapshot.stranger", "talaria.v1.event.health.stranger"]
    for _ in range(25):
        for subject in [*found, *plain]:
            message = found.get(subject)
            data, headers = (message.data, message.headers) if message else (b"{}", {})
            if FORWARD_HEADER in headers:
                headers = {FORWARD_HEADER: twisted(dice, headers[FORWARD_HEADER]).decode()}
            junk = [dice.randbytes(40), b"", DEEP.encode(), b'{"v":99,"x":' + DEEP.encode() + b"}"]
            junk += [twisted(dice, data)] * 6
            await bus.publish(subject, dice.choice(junk), headers=headers)
    await bus.flush()
    await bus.close()
    await asyncio.sleep(2.0)  # heartbeats with what was taken in; what was wrongly believed fades
    await all_well(running)


async def test_a_snapshot_without_measure_ends_nothing(running: Mesh) -> None:
    """It fits the schema but for its size; once let in it would fail every decision and every heartbeat."""
    bus = await running.bus()
    model = ModelState(name="model-a", state="host", context_tokens=4096, max_running=8, queued=7777)
    snapshot = Snapshot(iid="stranger", epoch="e", version=1, at_ms=1, pool="cold", status="ready", models=(model,))
    await bus.publish("talaria.v1.snapshot.stranger", encode(snapshot).replace(b"7777", HUGE.encode()))
    views: asyncio.Queue[Message] = asyncio.Queue()
    await bus.subscribe("talaria.v1.cluster", views.put_nowait)
    await bus.flush()
    for _ in range(2):
        await asyncio.wait_for(views.get(), 5)
    await bus.close()
    await all_well(running)


async def test_commands_that_come_too_late_are_refused(running: Mesh) -> None:
    bus = await running.bus()
    found = await heard_on(bus, running)
    message = next(m for m in found.values() if FORWARD_HEADER in m.headers)
    head = decode(message.headers[FORWARD_HEADER], ForwardHead)
    place, fence = head.placement, head.placement.fence
    new = msgspec.structs.replace(fence, rid="f" * 32)
    late = [
        place,  # a repeat
        msgspec.structs.replace(place, fence=msgspec.structs.replace(new, owner_rev=fence.owner_rev - 1)),
        msgspec.structs.replace(place, fence=new, deadline_ms=1),
        msgspec.structs.replace(place, fence=msgspec.structs.replace(new, attempt=1), accept_by_ms=1),
        msgspec.structs.replace(place, fence=msgspec.structs.replace(new, attempt=2), iid="another"),
    ]
    for placement in late:
        headers = {FORWARD_HEADER: encode(msgspec.structs.replace(head, placement=placement)).decode()}
        answer = await bus.request(message.subject, chat(), timeout_s=5, headers=headers)
        reply = decode(answer.data, ForwardReply)
        assert not reply.accepted, placement
        assert reply.error is not None
    for iid in ("cold-0", "cold-1"):  # of calls that nobody knows
        await bus.publish(f"talaria.v1.rpc.instance.{iid}.cancel", encode(Cancel(rid="e" * 32, attempt=0)))
    await bus.close()
    await all_well(running)
