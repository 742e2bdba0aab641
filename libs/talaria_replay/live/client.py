"""One streamed chat call, as a client of any OpenAI-compatible server makes and times it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx

RETRY_STATUS = frozenset({429, 503})
MAX_RETRY_WAIT_S = 60.0


@dataclass(slots=True)
class Answer:
    """What came of one call. Times in seconds of the caller's clock; 0: did not happen."""

    text: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    cache_source: str = ""
    instance: str = ""
    route: str = ""
    request_id: str = ""
    sent: float = 0.0
    """When the request that was answered went out; earlier refused ones are in `retries`."""
    first: float = 0.0
    """First token."""
    done: float = 0.0
    retries: int = 0
    error: str = ""


class CallError(Exception):
    """The call failed for good; the message is for people."""


class Client:
    """Makes calls.

    Args:
        http: with its base URL.
        plain: strictly OpenAI's fields: no session header, no `ignore_eos`.
        deadline_s: longest for one call, refusals included.
        now: the clock.
    """

    def __init__(self, http: httpx.AsyncClient, *, plain: bool, deadline_s: float, now: Callable[[], float]) -> None:
        self._http = http
        self._plain = plain
        self._deadline_s = deadline_s
        self._now = now

    async def call(self, model: str, messages: list[dict[str, Any]], max_tokens: int, session: str) -> Answer:
        """Make the call, again after 429 and 503 as the server asks, as OpenAI's SDK does. Errors are in the answer."""
        answer = Answer()
        deadline = self._now() + self._deadline_s
        try:
            async with asyncio.timeout(self._deadline_s):
                while True:
                    wait = await self._once(answer, self._body(model, messages, max_tokens), session)
                    if wait is None:
                        break
                    if self._now() + wait >= deadline:
                        answer.done = self._now()
                        return answer
                    answer.retries += 1
                    await asyncio.sleep(wait)
        except TimeoutError:
            answer.error = f"no end after {self._deadline_s:g} s"
        except (httpx.HTTPError, CallError, ValueError) as e:
            answer.error = str(e) or type(e).__name__
        else:
            answer.error = ""
        answer.done = self._now()
        return answer

    def _body(self, model: str, messages: list[dict[str, Any]], max_tokens: int) -> bytes:
        body: dict[str, Any] = {
            "model": model,
            "messages": messages,
            "max_tokens": max(1, max_tokens),
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if not self._plain:
            body["ignore_eos"] = True
        return json.dumps(body).encode()

    async def _once(self, answer: Answer, body: bytes, session: str) -> float | None:
        """One request. Returns the seconds to wait before another, None when it was answered."""
        headers = {"Content-Type": "application/json"}
        if not self._plain:
            headers["X-Talaria-Session-ID"] = session
        answer.sent, answer.first, answer.text = self._now(), 0.0, ""
        async with self._http.stream("POST", "/v1/chat/completions", content=body, headers=headers) as response:
            if response.status_code in RETRY_STATUS:
                answer.error = f"HTTP {response.status_code}: {_reason(await response.aread())}"
                return _retry_after(response.headers.get("retry-after"))
            if response.status_code != 200:
                raise CallError(f"HTTP {response.status_code}: {_reason(await response.aread())}")
            answer.instance = response.headers.get("x-talaria-instance", "")
            answer.route = response.headers.get("x-talaria-route", "")
            answer.cache_source = response.headers.get("x-talaria-cache", "")
            answer.request_id = response.headers.get("x-talaria-request", "")
            await self._read(answer, response)
        return None

    async def _read(self, answer: Answer, response: httpx.Response) -> None:
        parts: list[str] = []
        ended = False
        chunks = 0
        async for line in response.aiter_lines():
            if not line.startswith("data:"):
                continue
            data = line[5:].strip()
            if data == "[DONE]":
                ended = True
                break
            chunk = json.loads(data)
            if chunk.get("error"):
                raise CallError(f"the stream ended with an error: {_reason(data.encode())}")
            for choice in chunk.get("choices") or ():
                text = (choice.get("delta") or {}).get("content") or ""
                if (text or choice.get("finish_reason")) and not answer.first:
                    answer.first = self._now()
                if text:
                    parts.append(text)
                    chunks += 1
                ended = ended or bool(choice.get("finish_reason"))
            usage = chunk.get("usage")
            if usage:
                answer.prompt_tokens = usage.get("prompt_tokens") or 0
                answer.completion_tokens = usage.get("completion_tokens") or 0
                details = usage.get("prompt_tokens_details") or {}
                answer.cached_tokens = details.get("cached_tokens") or 0
                answer.cache_source = usage.get("cache_source") or details.get("cache_source") or answer.cache_source
        answer.text = "".join(parts)
        if not ended:
            raise CallError("the stream ended without a finish reason")
        answer.completion_tokens = answer.completion_tokens or chunks


def _retry_after(value: str | None) -> float:
    try:
        return min(MAX_RETRY_WAIT_S, max(0.05, float(value or 1.0)))
    except ValueError:
        return 1.0


def _reason(body: bytes) -> str:
    """The message in OpenAI's error shape, else the beginning of the body."""
    try:
        error = json.loads(body).get("error")
    except (ValueError, AttributeError):
        error = None
    if isinstance(error, dict) and error.get("message"):
        return str(error["message"])
    return body[:200].decode("utf-8", "replace")
