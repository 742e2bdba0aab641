"""One call's way through real processes, with sim engines: what a client and a tap see."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from itertools import pairwise

import pytest
import pytest_asyncio
from openai import AsyncOpenAI

from tests.mesh.settings import PATIENT, sim
from tests.support.load import session, stream_chat
from tests.support.mesh import Mesh, mesh

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(90), pytest.mark.asyncio(loop_scope="module")]

PACED = {"ttft_ms": 5.0, "decode_step_ms": 5.0, "switch_ms": 20.0}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Mesh]:
    settings = sim(
        {"id": "hot-0", "pool": "hot", "models": ["model-a"], "sim": PACED},
        {"id": "cold-0", "sim": PACED, "slot_ms": 200.0, "drain_ms": 50.0},
        router={"tau_s": 30.0},
        api=PATIENT,
    )
    async with mesh(tmp_path_factory.mktemp("mesh"), settings) as it:
        yield it


async def test_whole_answer_has_openai_shape(running: Mesh) -> None:
    answer = await running.chat("model-a", [{"role": "user", "content": "hello"}], session="shape", max_tokens=8)
    assert answer.status_code == 200
    body = answer.json()
    assert body["object"] == "chat.completion"
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 8
    assert body["usage"]["total_tokens"] == body["usage"]["prompt_tokens"] + 8
    assert answer.headers["x-talaria-session"] == "shape"
    assert answer.headers["x-talaria-session-source"] == "header"
    assert answer.headers["x-talaria-route"] == "cost"
    assert answer.headers["x-talaria-instance"] in {"hot-0", "cold-0"}
    assert answer.headers["x-talaria-cache"] == "none"


async def test_stream_equals_whole(running: Mesh) -> None:
    messages = [{"role": "user", "content": "tell me the same twice"}]
    whole = await running.chat("model-b", messages, session="s-1", max_tokens=12, temperature=0)
    streamed = await stream_chat(running.http, "model-b", messages, session="s-2", max_tokens=12, temperature=0)
    assert streamed.error == ""
    assert streamed.text == whole.json()["choices"][0]["message"]["content"]
    assert streamed.usage["completion_tokens"] == 12


async def test_returning_call_takes_the_lease_and_reports_cached_tokens(running: Mesh) -> None:
    calls = await session(
        running.http, "returns", "model-a", calls=4, first="a long question " * 40, grow="result", max_tokens=6
    )
    assert [c.error for c in calls] == [""] * 4
    assert {c.headers["x-talaria-instance"] for c in calls} == {calls[0].headers["x-talaria-instance"]}
    assert [c.headers["x-talaria-route"] for c in calls][1:] == ["lease"] * 3
    for before, after in pairwise(calls):
        assert after.cached > 0
        assert after.cached <= before.usage["prompt_tokens"] + before.usage["completion_tokens"]
        assert after.headers["x-talaria-cache"] == "device"


async def test_openai_client(running: Mesh) -> None:
    async with AsyncOpenAI(base_url=running.url + "/v1", api_key="none") as client:
        assert {m.id async for m in client.models.list()} == {"model-a", "model-b", "model-c"}
        text = ""
        stream = await client.chat.completions.create(
            model="model-c", messages=[{"role": "user", "content": "hi"}], stream=True, max_tokens=5
        )
        async for chunk in stream:
            text += chunk.choices[0].delta.content or ""
        assert text
        legacy = await client.completions.create(model="model-b", prompt="once upon", max_tokens=5)
        assert legacy.usage is not None
        assert legacy.usage.completion_tokens == 5


async def test_many_models_at_once_all_finish(running: Mesh) -> None:
    runs = await asyncio.gather(
        *(
            session(
                running.http,
                f"many-{n}",
                f"model-{'abc'[n % 3]}",
                calls=5,
                first=f"task {n}",
                grow="go on",
                max_tokens=6,
            )
            for n in range(18)
        )
    )
    assert [c.error for calls in runs for c in calls if c.error] == []
    assert all(c.usage["completion_tokens"] == 6 for calls in runs for c in calls)


async def test_tap_sees_what_happens_and_changes_nothing(running: Mesh) -> None:
    bus = await running.bus()
    seen: list[str] = []
    await bus.subscribe("talaria.>", lambda m: seen.append(m.subject))
    await bus.flush()
    models = ["model-b", "model-c"]
    for n in range(4):
        it = await stream_chat(
            running.http, models[n % 2], [{"role": "user", "content": "tapped"}], session=f"tap-{n}", max_tokens=4
        )
        assert it.error == ""

    def complete() -> bool:
        wanted = [
            "rpc.route",
            "forward",
            ".tokens.",
            ".completion.",
            ".snapshot.",
            ".cluster",
            "event.route",
            "event.switch",
        ]
        return all(any(w in s for s in seen) for w in wanted)

    async with asyncio.timeout(10):
        while not complete():
            await asyncio.sleep(0.05)
    await bus.close()
    assert complete(), sorted(set(seen))


async def test_metrics_and_openapi(running: Mesh) -> None:
    assert "talaria_" in (await running.http.get("/metrics")).text
    doc = (await running.http.get("/openapi.json")).json()
    assert "/v1/chat/completions" in doc["paths"]
    assert (await running.http.get("/livez")).status_code == 200


BAD = [
    ({"model": "nobody", "messages": [{"role": "user", "content": "x"}]}, 404, "model_not_found", "model"),
    ({"model": "model-a"}, 400, "invalid_request", "messages"),
    ({"model": "model-a", "messages": []}, 400, "invalid_request", "messages"),
    ({"model": "model-a", "messages": [{"role": "user", "content": "x"}], "n": 2}, 400, "unsupported_parameter", "n"),
    (
        {"model": "model-a", "messages": [{"role": "user", "content": "x"}], "tools": [{}]},
        400,
        "unsupported_parameter",
        "tools",
    ),
    (
        {"model": "model-a", "messages": [{"role": "user", "content": "x"}], "temperature": 9},
        400,
        "invalid_request",
        "temperature",
    ),
    (
        {"model": "model-a", "messages": [{"role": "user", "content": "x"}], "max_tokens": 0},
        400,
        "invalid_request",
        "max_tokens",
    ),
]


@pytest.mark.parametrize(("body", "status", "code", "param"), BAD)
async def test_bad_input_is_refused_and_nothing_queued(
    running: Mesh, body: dict, status: int, code: str, param: str
) -> None:
    bus = await running.bus()
    forwarded: list[str] = []
    await bus.subscribe("talaria.v1.rpc.instance.*.forward", lambda m: forwarded.append(m.subject))
    await bus.flush()
    answer = await running.http.post("/v1/chat/completions", content=json.dumps(body))
    await bus.flush()
    await bus.close()
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == (code, param)
    assert set(error) == {"message", "type", "param", "code"}
    assert forwarded == []


async def test_prompt_longer_than_the_context_is_400(running: Mesh) -> None:
    answer = await running.chat("model-a", [{"role": "user", "content": "x" * (1 << 18)}], session="long", max_tokens=4)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["code"] == "context_length_exceeded"


async def test_body_above_the_bus_limit_is_413(running: Mesh) -> None:
    answer = await running.chat("model-a", [{"role": "user", "content": "x" * (9 << 20)}], session="huge", max_tokens=4)
    assert answer.status_code == 413, answer.text
    assert answer.json()["error"]["code"] == "payload_too_large"
