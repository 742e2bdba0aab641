"""One streamed chat call, as a client of any OpenAI-compatible server makes and times it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec

RETRY_STATUS = frozenset({429, 503})
MAX_RETRY_WAIT_S = 60.0
DRAIN_S = 0.5
"""How long an answered call waits for the end of its response, which leaves the connection for the next call."""
BAD_ENDS = frozenset({"abort", "error"})
"""A finish_reason that is none: the server gave the call up."""
CLOSED = (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError)


@dataclass(slots=True)
class Answer:
    """What came of one call. Times in seconds of the caller's clock; 0: did not happen."""

    text: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    cache_reported: bool = False
    """The server tells how much of a prompt was cached; where it does not, `cached_tokens` 0 means nothing."""
    cache_source: str = ""
    instance: str = ""
    route: str = ""
    request_id: str = ""
    sent: float = 0.0
    """When the request that was answered went out; earlier ones, refused or lost, are in `retries`."""
    first: float = 0.0
    """First token."""
    done: float = 0.0
    """Its last event, or the failure."""
    retries: int = 0
    error: str = ""


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: Any = None
    reasoning: Any = None
    tool_calls: Any = None

    @property
    def says(self) -> bool:
        """A token is in it, wherever the server puts those that are no content."""
        return bool(self.content or self.reasoning_content or self.reasoning or self.tool_calls)


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None
    cache_source: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cache_source: str | None = None
    prompt_tokens_details: _Details | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None


_chunks = msgspec.json.Decoder(_Chunk)


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

    def encode(self, model: str, messages: list[dict[str, Any]], max_tokens: int) -> bytes:
        """The body of a call. A long one takes ms: before the call is due, and in a thread."""
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

    async def call(self, body: bytes, session: str) -> Answer:
        """Make the call, again after 429 and 503 as the server asks, as OpenAI's SDK does. Errors are in the answer.

        It is made again at once where the server closed a connection that it had kept before it answered anything: that
        is how a server ends idle connections, and the request may have crossed with it.
        """
        answer = Answer()
        deadline = self._now() + self._deadline_s
        try:
            async with asyncio.timeout(self._deadline_s):
                while True:
                    wait = await self._once(answer, body, session)
                    if wait is None:
                        break
                    if self._now() + wait >= deadline:
                        answer.done = self._now()
                        return answer
                    answer.retries += 1
                    await asyncio.sleep(wait)
        except TimeoutError:
            if not answer.done:
                answer.error = f"no end after {self._deadline_s:g} s"
        except (httpx.HTTPError, CallError, ValueError) as e:
            answer.error = str(e) or type(e).__name__
        else:
            answer.error = ""
        answer.done = answer.done or self._now()
        return answer

    async def _once(self, answer: Answer, body: bytes, session: str) -> float | None:
        """One request. Returns the seconds to wait before another, None when it was answered."""
        headers = {"Content-Type": "application/json"}
        if not self._plain:
            headers["X-Talaria-Session-ID"] = session
        steps: list[str] = []
        answered = False

        async def trace(step: str, _: object) -> None:
            steps.append(step)

        answer.sent, answer.first, answer.text = self._now(), 0.0, ""
        try:
            async with self._http.stream(
                "POST", "/v1/chat/completions", content=body, headers=headers, extensions={"trace": trace}
            ) as response:
                answered = True
                if response.status_code in RETRY_STATUS:
                    answer.error = f"HTTP {response.status_code}: {reason(await response.aread())}"
                    return _retry_after(response.headers.get("retry-after"))
                if response.status_code != 200:
                    raise CallError(f"HTTP {response.status_code}: {reason(await response.aread())}")
                answer.instance = response.headers.get("x-talaria-instance", "")
                answer.route = response.headers.get("x-talaria-route", "")
                answer.cache_source = response.headers.get("x-talaria-cache", "")
                answer.request_id = response.headers.get("x-talaria-request", "")
                await self._read(answer, response)
        except CLOSED as e:
            if answered or not steps or not steps[0].startswith("http11."):  # else a kept connection: none was made
                raise
            answer.error = str(e) or type(e).__name__
            return 0.0
        return None

    async def _read(self, answer: Answer, response: httpx.Response) -> None:
        parts: list[str] = []
        ended = False
        chunks = 0
        events = _events(response)
        try:
            async for data in events:
                if data == b"[DONE]":
                    ended = True
                    break
                chunk = _chunk(data)
                for choice in chunk.choices or ():
                    delta = choice.delta or _Delta()
                    if (delta.says or choice.finish_reason) and not answer.first:
                        answer.first = self._now()
                    parts.append(delta.content or "")
                    chunks += delta.says
                    ended = ended or bool(choice.finish_reason)
                if chunk.usage:
                    _count(answer, chunk.usage)
        except CLOSED:
            if not ended:
                raise
        if not ended:
            raise CallError("the stream ended without a finish reason")
        if not answer.first:
            raise CallError("the stream ended without a token")
        answer.text, answer.done = "".join(parts), self._now()
        answer.completion_tokens = answer.completion_tokens or chunks
        await _drain(events)


def _count(answer: Answer, usage: _Usage) -> None:
    details = usage.prompt_tokens_details or _Details()
    answer.prompt_tokens = usage.prompt_tokens or 0
    answer.completion_tokens = usage.completion_tokens or 0
    answer.cached_tokens = details.cached_tokens or 0
    answer.cache_reported = details.cached_tokens is not None
    answer.cache_source = usage.cache_source or details.cache_source or answer.cache_source


async def _events(response: httpx.Response) -> AsyncIterator[bytes]:
    """The data of an event stream, line by line. httpx's lines also end at U+2028, U+0085 and others of an answer."""
    rest = b""
    async for data in response.aiter_bytes():
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:") and (said := line[5:].strip()):
                yield said
    if rest.startswith(b"data:") and (said := rest[5:].strip()):
        yield said


async def _drain(events: AsyncIterator[bytes]) -> None:
    with contextlib.suppress(httpx.HTTPError, TimeoutError):
        async with asyncio.timeout(DRAIN_S):
            async for _ in events:
                pass


def _chunk(data: bytes) -> _Chunk:
    try:
        chunk = _chunks.decode(data)
    except msgspec.DecodeError as e:
        raise CallError(f"the stream holds what is no chunk: {e}") from e
    if chunk.error:
        raise CallError(f"the stream ended with an error: {reason(data)}")
    for choice in chunk.choices or ():
        if choice.finish_reason in BAD_ENDS:
            raise CallError(f"the stream ended with finish_reason {choice.finish_reason!r}")
    return chunk


def _retry_after(value: str | None) -> float:
    try:
        return min(MAX_RETRY_WAIT_S, max(0.05, float(value or 1.0)))
    except ValueError:
        return 1.0


def reason(body: bytes) -> str:
    """The message in OpenAI's error shape, else the beginning of the body."""
    try:
        error = json.loads(body).get("error")
    except (ValueError, AttributeError):
        error = None
    if isinstance(error, dict) and error.get("message"):
        return str(error["message"])
    return body[:200].decode("utf-8", "replace")
