"""Closed-loop agent sessions over HTTP, and what became of each call."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any

import httpx


@dataclass
class Outcome:
    """One call. Exactly one of `done` and `error` says how it ended."""

    session: str
    call: int
    model: str
    status: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    prompt_token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    started: bool = False
    """A token has reached the client."""
    done: bool = False
    error: str = ""
    ttft_s: float = 0.0
    total_s: float = 0.0

    @property
    def cached(self) -> int:
        return int(self.usage.get("prompt_tokens_details", {}).get("cached_tokens", 0))


async def stream_chat(
    http: httpx.AsyncClient, model: str, messages: list[dict[str, str]], *, session: str, call: int = 0, **body: Any
) -> Outcome:
    """One streamed call, read to its end; never raises for what the server or the connection does."""
    it = Outcome(session, call, model)
    t0 = time.monotonic()
    payload = {"model": model, "messages": messages, "stream": True, "stream_options": {"include_usage": True}}
    payload |= {"return_token_ids": True} | body
    try:
        async with http.stream(
            "POST", "/v1/chat/completions", json=payload, headers={"X-Talaria-Session-ID": session}
        ) as response:
            it.status = response.status_code
            it.headers = dict(response.headers)
            if response.status_code != 200:
                it.error = (await response.aread()).decode()
                return it
            async for line in response.aiter_lines():
                if not line.startswith("data: "):
                    continue
                if line == "data: [DONE]":
                    it.done = True
                    break
                _chunk(it, json.loads(line[6:]), t0)
                if it.error:
                    break
    except httpx.HTTPError as e:
        it.error = f"{type(e).__name__}: {e}"
    if not it.done and not it.error:
        it.error = "the stream ended without [DONE]"
    it.total_s = time.monotonic() - t0
    return it


async def whole_chat(
    http: httpx.AsyncClient, model: str, messages: list[dict[str, str]], *, session: str, call: int = 0, **body: Any
) -> Outcome:
    """One call whose answer comes in one piece; never raises for what the server or the connection does."""
    it = Outcome(session, call, model)
    t0 = time.monotonic()
    payload = {"model": model, "messages": messages, "return_token_ids": True} | body
    try:
        response = await http.post("/v1/chat/completions", json=payload, headers={"X-Talaria-Session-ID": session})
        it.status, it.headers = response.status_code, dict(response.headers)
        if response.status_code != 200:
            it.error = response.text
        else:
            answer = response.json()
            (choice,) = answer["choices"]
            it.text, it.finish_reason = choice["message"]["content"], choice["finish_reason"]
            it.token_ids, it.prompt_token_ids = choice["token_ids"], answer["prompt_token_ids"]
            it.usage, it.started, it.done = answer["usage"], True, True
    except httpx.HTTPError as e:
        it.error = f"{type(e).__name__}: {e}"
    it.total_s = time.monotonic() - t0
    return it


def _chunk(it: Outcome, chunk: dict[str, Any], t0: float) -> None:
    if "error" in chunk:
        it.error = json.dumps(chunk["error"])
        return
    it.prompt_token_ids = it.prompt_token_ids or chunk.get("prompt_token_ids") or []
    for choice in chunk["choices"]:
        ids = choice.get("token_ids") or []
        if ids and not it.started:
            it.started, it.ttft_s = True, time.monotonic() - t0
        it.token_ids += ids
        it.text += choice["delta"].get("content") or ""
        it.finish_reason = choice.get("finish_reason") or it.finish_reason
    if chunk.get("usage"):
        it.usage = chunk["usage"]


async def session(
    http: httpx.AsyncClient,
    name: str,
    model: str,
    *,
    calls: int,
    first: str,
    grow: str,
    max_tokens: int,
    gap_s: float = 0.0,
    stop_on_error: bool = False,
    stream: bool = True,
    **body: Any,
) -> list[Outcome]:
    """An agent: each call appends the last answer and a tool result of text `grow`, after `gap_s`."""
    ask = stream_chat if stream else whole_chat
    messages = [{"role": "user", "content": first}]
    out: list[Outcome] = []
    for call in range(calls):
        it = await ask(http, model, messages, session=name, call=call, max_tokens=max_tokens, temperature=0, **body)
        out.append(it)
        if it.error and stop_on_error:
            break
        messages.append({"role": "assistant", "content": it.text or "-"})
        messages.append({"role": "user", "content": f"{grow} {call}"})
        if gap_s and call + 1 < calls:
            await asyncio.sleep(gap_s)
    return out
