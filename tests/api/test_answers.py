"""What a client gets for a good request, over a real server and both buses."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI

from talaria_common.ids import hash_id, partition_of
from tests.api.doubles import Connect, Held, answers, edge

HI = [{"role": "user", "content": "hi"}]


def events(response: httpx.Response) -> list[Any]:
    """The data of all events; "[DONE]" as it is."""
    assert response.headers["content-type"].startswith("text/event-stream")
    data = [block.removeprefix("data: ") for block in response.text.split("\n\n") if block.startswith("data: ")]
    return [d if d == "[DONE]" else json.loads(d) for d in data]


async def test_whole_chat(connect: Connect) -> None:
    async with edge(connect, answers) as e:
        response = await e.chat({"X-Talaria-Session-ID": "s 1"})
        assert response.status_code == 200
        body = response.json()
        assert body["object"] == "chat.completion"
        assert body["id"] == "chatcmpl-" + response.headers["x-talaria-request"]
        assert body["model"] == "m"
        assert body["choices"] == [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello, wörld", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ]
        assert body["usage"] == {
            "prompt_tokens": 7,
            "completion_tokens": 3,
            "total_tokens": 10,
            "prompt_tokens_details": {"cached_tokens": 4, "cache_source": "device"},
        }
        told = {k: v for k, v in response.headers.items() if k.startswith("x-talaria") and k != "x-talaria-request"}
        assert told == {
            "x-talaria-session": "s 1",
            "x-talaria-session-source": "header",
            "x-talaria-instance": "i-0",
            "x-talaria-route": "cost",
            "x-talaria-cache": "device",
        }


async def test_streamed_chat(connect: Connect) -> None:
    async with edge(connect, answers) as e:
        response = await e.chat(stream=True, stream_options={"include_usage": True})
        chunks = events(response)
        assert chunks[-1] == "[DONE]"
        deltas = [c["choices"][0]["delta"] for c in chunks[:3]]
        assert deltas == [{"role": "assistant", "content": "Hello"}, {"content": ", "}, {"content": "wörld"}]
        assert [c["choices"][0]["finish_reason"] for c in chunks[:4]] == [None, None, None, "stop"]
        assert chunks[3]["choices"][0]["delta"] == {}
        assert [c["usage"] for c in chunks[:4]] == [None] * 4
        assert chunks[4]["choices"] == []
        assert chunks[4]["usage"]["prompt_tokens_details"] == {"cached_tokens": 4, "cache_source": "device"}
        assert {c["object"] for c in chunks[:-1]} == {"chat.completion.chunk"}
        assert len({(c["id"], c["created"], c["model"], c["system_fingerprint"]) for c in chunks[:-1]}) == 1
        assert response.headers["x-talaria-instance"] == "i-0"
        assert response.headers["x-talaria-cache"] == "device"


async def test_no_usage_unless_asked_for(connect: Connect) -> None:
    async with edge(connect, answers) as e:
        chunks = events(await e.chat(stream=True))
        assert all("usage" not in c for c in chunks[:-1])
        assert len(chunks) == 5


@pytest.mark.parametrize("stream", [False, True])
async def test_token_ids(connect: Connect, stream: bool) -> None:
    async with edge(connect, answers) as e:
        response = await e.chat(stream=stream, return_token_ids=True)
        if not stream:
            body = response.json()
            assert body["choices"][0]["token_ids"] == [1, 2, 3]
            assert body["prompt_token_ids"] == [9, 8, 7]
            return
        chunks = events(response)[:-1]
        assert [i for c in chunks for i in c["choices"][0].get("token_ids", [])] == [1, 2, 3]
        assert [c.get("prompt_token_ids") for c in chunks] == [[9, 8, 7], None, None, None]


@pytest.mark.parametrize("stream", [False, True])
async def test_chat_logprobs(connect: Connect, stream: bool) -> None:
    async with edge(connect, answers) as e:
        response = await e.chat(stream=stream, logprobs=True, top_logprobs=1)
        if stream:
            content = [t for c in events(response)[:3] for t in c["choices"][0]["logprobs"]["content"]]
        else:
            content = response.json()["choices"][0]["logprobs"]["content"]
        assert [t["token"] for t in content] == ["Hello", ", ", "wörld"]
        assert content[2]["bytes"] == list("wörld".encode())
        assert content[0]["top_logprobs"] == [{"token": "x", "logprob": -9999.0, "bytes": [120]}]


@pytest.mark.parametrize("stream", [False, True])
async def test_text_completion(connect: Connect, stream: bool) -> None:
    async with edge(connect, answers) as e:
        body = {"model": "m", "prompt": ["once"], "logprobs": 1, "stream": stream, "return_token_ids": True}
        response = await e.http.post("/v1/completions", json=body)
        chunks = events(response)[:-1] if stream else [response.json()]
        choices = [c["choices"][0] for c in chunks]
        assert "".join(c["text"] for c in choices) == "Hello, wörld"
        assert choices[-1]["finish_reason"] == "stop"
        logprobs = [c["logprobs"] for c in choices if c["logprobs"]]
        assert [t for part in logprobs for t in part["tokens"]] == ["Hello", ", ", "wörld"]
        assert [o for part in logprobs for o in part["text_offset"]] == [0, 5, 7]
        assert choices[0]["prompt_token_ids"] == chunks[0]["prompt_token_ids"] == [9, 8, 7]
        assert {c["object"] for c in chunks} == {"text_completion"}
        assert chunks[0]["id"].startswith("cmpl-")


async def test_body_reaches_the_instance_byte_for_byte(connect: Connect) -> None:
    async with edge(connect, answers) as e:
        body = b'{ "model":"m","unknown":[1.50,"\\u00e9"],\n"messages" : [{"role":"user","content":"\xc3\xa9"}] ,"n":1}'
        response = await e.http.post("/v1/chat/completions", content=body)
        assert response.status_code == 200
        assert e.instance.held[0].body == body


async def test_router_gets_facts_and_hashes_only(connect: Connect) -> None:
    async with edge(connect, answers) as e:
        headers = {
            "X-Talaria-Session-ID": "secret",
            "X-Talaria-Parent-Session-ID": "p",
            "X-Talaria-Session-Final": "true",
        }
        await e.chat(headers, max_completion_tokens=5, max_tokens=50, stream=True)
        [request] = e.router.asked
        assert request.session == hash_id("local", "secret")
        assert request.parent_session == hash_id("local", "p")
        assert (request.session_final, request.session_source) == (True, "header")
        assert (request.max_tokens, request.stream, request.prompt_bytes) == (5, True, 2)
        assert request.api == e.api.link.api
        assert e.api.link.api.startswith("api-0-")
        head = e.instance.held[0].head
        assert (head.session, head.session_final, head.endpoint) == (request.session, True, "chat")
        assert 0 <= partition_of(head.tenant, head.session, head.model) < 256


async def test_trace_context_is_passed_on(connect: Connect) -> None:
    async with edge(connect, answers) as e:
        await e.chat({"traceparent": "00-" + "a" * 32 + "-" + "b" * 16 + "-01"})
        parent = e.instance.held[0].message.headers["traceparent"]
        assert parent.startswith("00-" + "a" * 32 + "-")
        assert parent.endswith("-01")
        assert "b" * 16 not in parent


async def test_empty_deltas_show_nothing_but_count(connect: Connect) -> None:
    async def half_characters(held: Held) -> None:
        await held.accept()
        await held.delta("", token_ids=[1])
        await held.delta("", token_ids=[2])
        await held.delta("é", token_ids=[3])
        await held.final("!", "length")

    async with edge(connect, half_characters) as e:
        chunks = events(await e.chat(stream=True))
        assert [c["choices"][0]["delta"] for c in chunks[:-1]] == [
            {"role": "assistant", "content": ""},
            {"content": "é"},
            {"content": "!"},
            {},
        ]
        assert chunks[-2]["choices"][0]["finish_reason"] == "length"


async def test_final_alone_is_an_answer(connect: Connect) -> None:
    async def at_once(held: Held) -> None:
        await held.accept()
        await held.final("all of it")

    async with edge(connect, at_once) as e:
        chunks = events(await e.chat(stream=True))
        assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": "all of it"}
        assert (await e.chat()).json()["choices"][0]["message"]["content"] == "all of it"


async def test_openai_client(connect: Connect) -> None:
    async with edge(connect, answers) as e, AsyncOpenAI(base_url=e.url + "/v1", api_key="any") as client:
        whole = await client.chat.completions.create(model="m", messages=HI)  # type: ignore[arg-type]
        assert whole.choices[0].message.content == "Hello, wörld"
        assert whole.usage is not None
        assert whole.usage.prompt_tokens_details is not None
        assert whole.usage.prompt_tokens_details.cached_tokens == 4
        stream = await client.chat.completions.create(model="m", messages=HI, stream=True)  # type: ignore[arg-type]
        assert "".join([c.choices[0].delta.content or "" async for c in stream]) == "Hello, wörld"
        legacy = await client.completions.create(model="m", prompt="x")
        assert legacy.choices[0].text == "Hello, wörld"
        assert [m.id async for m in client.models.list()] == ["m", "org/free"]
        assert (await client.models.retrieve("org/free")).id == "org/free"
