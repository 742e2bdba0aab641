"""A mock OpenAI-compatible worker: what LiteLLM and sglang-router stand in front of, and the direct reference.

It is as cheap as Python gets (httptools on uvloop, no framework, the body's messages are skipped rather than parsed)
and paces tokens by the sim engine's rule: a step either admits everything that waits (`ttft_ms`) or gives one token to
each running call (`step_ms`). The model's name picks the pace.

    python -m bench.gateway.worker --port 9000 --model paced=20,10 --model fast=0,0
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import time
from typing import Any, cast

import httptools
import msgspec
import uvloop


class _StreamOptions(msgspec.Struct):
    include_usage: bool = False


class _Request(msgspec.Struct):
    """What the worker reads of a body; the prompt is skipped."""

    model: str
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stream: bool | None = False
    stream_options: _StreamOptions | None = None


_decoder = msgspec.json.Decoder(_Request)
_HEAD_STREAM = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ncache-control: no-cache\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class Call:
    """One completion under way; `token` is called once per step."""

    __slots__ = ("created", "done", "protocol", "request", "rid", "sent", "wanted")

    def __init__(self, protocol: Http, request: _Request, rid: str) -> None:
        self.protocol = protocol
        self.request = request
        self.rid = rid
        self.created = int(time.time())
        self.wanted = request.max_completion_tokens or request.max_tokens or 16
        self.sent = 0
        self.done = False

    def token(self) -> None:
        """Produce one token; the last one ends the call."""
        self.sent += 1
        last = self.sent == self.wanted
        if self.request.stream:
            self._stream(last)
        elif last:
            self._whole()
        self.done = last

    def _event(self, choices: str, usage: str = "null") -> bytes:
        text = (
            f'data: {{"id":"{self.rid}","object":"chat.completion.chunk","created":{self.created},'
            f'"model":"{self.request.model}","choices":{choices},"usage":{usage}}}\n\n'
        )
        return _chunk(text.encode())

    def _usage(self) -> str:
        return f'{{"prompt_tokens":100,"completion_tokens":{self.sent},"total_tokens":{100 + self.sent}}}'

    def _stream(self, last: bool) -> None:
        out = b""
        role = ""
        if self.sent == 1:
            out, role = _HEAD_STREAM, '"role":"assistant",'
        finish = '"length"' if last else "null"
        delta = f'{{{role}"content":" t{self.sent}"}}'
        out += self._event(f'[{{"index":0,"delta":{delta},"logprobs":null,"finish_reason":{finish}}}]')
        if last:
            options = self.request.stream_options
            if options is not None and options.include_usage:
                out += self._event("[]", self._usage())
            out += _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
        self.protocol.write(out)

    def _whole(self) -> None:
        text = "".join(f" t{n + 1}" for n in range(self.sent))
        answer = (
            f'{{"id":"{self.rid}","object":"chat.completion","created":{self.created},"model":"{self.request.model}",'
            f'"choices":[{{"index":0,"message":{{"role":"assistant","content":"{text}"}},"logprobs":null,'
            f'"finish_reason":"length"}}],"usage":{self._usage()}}}'
        )
        self.protocol.answer(200, answer.encode())


CATCH_UP_S = 0.1
"""As the sim engine: how far a starved process may lag behind the modelled device and still make it up."""


class Pacer:
    """One model's step loop."""

    def __init__(self, ttft_ms: float, step_ms: float) -> None:
        self.ttft_s = ttft_ms / 1e3
        self.step_s = step_ms / 1e3
        self.waiting: list[Call] = []
        self.running: list[Call] = []
        self._work = asyncio.Event()

    def submit(self, call: Call) -> None:
        """Queue a call."""
        self.waiting.append(call)
        self._work.set()

    async def run(self) -> None:
        """Step for ever. As in the sim engine a decode follows the step before without a gap, even if seen late."""
        now = asyncio.get_running_loop().time
        free_at = now()
        while True:
            if not self.waiting and not self.running:
                self._work.clear()
                await self._work.wait()
            batch, self.waiting = self.waiting, []
            began = now()
            if batch:
                free_at = began + self.ttft_s
            else:
                free_at = (free_at if began - free_at < max(self.step_s, CATCH_UP_S) else began) + self.step_s
            await asyncio.sleep(max(0.0, free_at - now()))
            live = batch or self.running
            for call in live:
                if not call.protocol.closed:
                    call.token()
            if batch:
                self.running += batch
            self.running = [c for c in self.running if not c.done and not c.protocol.closed]


class Http(asyncio.Protocol):
    """One kept-alive connection; requests are answered in order, one at a time."""

    def __init__(self, pacers: dict[str, Pacer]) -> None:
        self.pacers = pacers
        self.closed = False
        self._parser: Any = httptools.HttpRequestParser(self)
        self._url = b""
        self._body: list[bytes] = []
        self._number = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002, the base class's name
        self.closed = True

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):  # sglang-router asks for HTTP/2 first
            self._transport.close()

    # --- httptools' callbacks

    def on_message_begin(self) -> None:
        self._body = []

    def on_url(self, url: bytes) -> None:
        self._url = url

    def on_header(self, name: bytes, _value: bytes) -> None:
        if name.lower() == b"expect":
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, data: bytes) -> None:
        self._body.append(data)

    def on_message_complete(self) -> None:
        path = self._url.partition(b"?")[0]
        if path == b"/v1/chat/completions":
            self._chat(b"".join(self._body))
        elif path == b"/v1/models":
            cards = [{"id": m, "object": "model", "created": 0, "owned_by": "bench"} for m in self.pacers]
            self.answer(200, json.dumps({"object": "list", "data": cards}).encode())
        elif path in {b"/get_model_info", b"/model_info"}:
            self.answer(200, b'{"model_path":"bench","is_generation":true}')
        elif path in {b"/get_server_info", b"/server_info"}:
            self.answer(200, b'{"model_path":"bench","dp_size":1,"tp_size":1}')
        elif path in {b"/health", b"/health_generate"}:
            self.answer(200, b"{}")
        else:
            self.answer(404, b'{"error":{"message":"no such path","type":"invalid_request_error"}}')

    # --- answers

    def _chat(self, body: bytes) -> None:
        try:
            request = _decoder.decode(body)
            pacer = self.pacers[request.model]
        except (msgspec.DecodeError, KeyError) as e:
            self.answer(400, json.dumps({"error": {"message": str(e), "type": "invalid_request_error"}}).encode())
            return
        self._number += 1
        pacer.submit(Call(self, request, f"chatcmpl-{id(self):x}-{self._number}"))

    def write(self, data: bytes) -> None:
        """Send bytes unless the client has gone."""
        if not self.closed:
            self._transport.write(data)

    def answer(self, status: int, body: bytes) -> None:
        """A whole JSON answer."""
        reason = {200: "OK", 400: "Bad Request", 404: "Not Found"}[status]
        head = f"HTTP/1.1 {status} {reason}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        self.write(head.encode() + body)


async def serve(port: int, paces: dict[str, tuple[float, float]]) -> None:
    """Serve on loopback until cancelled."""
    loop = asyncio.get_running_loop()
    pacers = {model: Pacer(ttft_ms, step_ms) for model, (ttft_ms, step_ms) in paces.items()}
    server = await loop.create_server(lambda: Http(pacers), "127.0.0.1", port, backlog=1024)
    async with server:
        await asyncio.gather(*(p.run() for p in pacers.values()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model", action="append", default=[], metavar="NAME=TTFT_MS,STEP_MS")
    args = parser.parse_args()
    paces = {}
    for row in args.model:
        name, _, pace = row.partition("=")
        ttft, _, step = pace.partition(",")
        paces[name] = (float(ttft), float(step))
    uvloop.run(serve(args.port, paces))


if __name__ == "__main__":
    main()
