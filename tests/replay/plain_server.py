"""A tiny OpenAI-compatible server that knows nothing of Talaria: one token per character, answers of "x"."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

FRAME = 5


def count(messages: list[dict[str, Any]]) -> int:
    return 3 + sum(FRAME + len(m.get("content") or "") for m in messages)


async def at_once(_session: str) -> None:
    pass


class PlainServer:
    """`refuse` may answer a request with (status, headers, body) instead; `bodies` are all requests, in order.

    `hold` is awaited before each answer, with the request's session.
    """

    def __init__(
        self,
        refuse: Callable[[int, dict[str, Any]], tuple[int, str, str] | None] = lambda _n, _b: None,
        hold: Callable[[str], Awaitable[None]] = at_once,
    ) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.usage = True
        self.url = ""
        self.connections = 0
        self._open: list[tuple[Any, asyncio.StreamWriter]] = []
        self._refuse = refuse
        self._hold = hold

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._open.append((asyncio.current_task(), writer))
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                headers = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if ": " in line)
                body = json.loads(await reader.readexactly(int(headers["content-length"])))
                self.bodies.append(body)
                self.headers.append(headers)
                await self._hold(headers.get("x-talaria-session-id", ""))
                refusal = self._refuse(len(self.bodies) - 1, body)
                if refusal is not None:
                    status, extra, text = refusal
                    writer.write(f"HTTP/1.1 {status} no\r\n{extra}content-length: {len(text)}\r\n\r\n{text}".encode())
                    continue
                writer.write(
                    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
                )
                n = body["max_tokens"]
                prompt = count(body["messages"])
                events: list[Any] = [{"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}]
                events += [{"choices": [{"index": 0, "delta": {"content": "x"}}]} for _ in range(n)]
                events.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]})
                if self.usage:
                    events.append({"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": n}})
                text = "".join(f"data: {json.dumps(e)}\n\n" for e in events) + "data: [DONE]\n\n"
                writer.write(f"{len(text):x}\r\n{text}\r\n0\r\n\r\n".encode())
                await writer.drain()
        writer.close()

    async def close(self) -> None:
        """End all connections."""
        for _, writer in self._open:
            writer.close()
        await asyncio.gather(*(task for task, _ in self._open))


@contextlib.asynccontextmanager
async def plain_server(**options: Any) -> AsyncIterator[PlainServer]:
    it = PlainServer(**options)
    server = await asyncio.start_server(it.handle, "127.0.0.1", 0)
    it.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield it
    finally:
        server.close()
        await it.close()
