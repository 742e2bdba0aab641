"""The call endpoints as plain ASGI: no framework between the socket and the frames (GATEWAY 5)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import structlog
from starlette.types import Receive, Scope, Send

from talaria_api import errors
from talaria_api.auth import Authenticator
from talaria_api.call import Call
from talaria_api.cluster import Cluster
from talaria_api.errors import ClientGoneError, Header
from talaria_api.intake import (
    HEADROOM_BYTES,
    call_priority,
    call_timeout_s,
    check_content_type,
    read_body,
    too_large,
)
from talaria_api.link import Link, LiveCall, Sink
from talaria_api.messages import ClientGone, Facts, Limits
from talaria_api.metrics import ApiMetrics
from talaria_api.peers import Peers
from talaria_api.protocol import EDGE, EdgeProtocol
from talaria_api.render import KEEP_ALIVE, Answer, StreamWriter, Whole
from talaria_api.sessions import SessionRef, identify
from talaria_api.sinks import READ_WITHIN_S, FrameQueue, Gatherer
from talaria_api.validate import Request
from talaria_common import tracing
from talaria_common.clock import Clock
from talaria_common.errors import ContextLengthError, ModelNotFoundError, TalariaError
from talaria_common.ids import new_rid
from talaria_common.settings import Settings
from talaria_common.wire import TRACE_HEADER, Frame

log = structlog.get_logger(__name__)

_JSON: Header = (b"content-type", b"application/json")
_SSE: list[Header] = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


@dataclass(frozen=True, slots=True)
class Parts:
    """What the endpoints share."""

    settings: Settings
    clock: Clock
    link: Link
    peers: Peers
    cluster: Cluster
    metrics: ApiMetrics
    auth: Authenticator
    limits: Limits
    api_epoch: str


@dataclass(slots=True)
class _Exchange:
    """One HTTP request and what is known of its answer so far."""

    scope: Scope
    send: Send
    rid: str
    headers: list[Header]
    began: float
    edge: EdgeProtocol | None
    status: int = 0
    sent_bytes: int = 0
    started: bool = False

    async def start(self, status: int, headers: list[Header], length: int | None = None) -> None:
        self.status, self.started = status, True
        headers = headers + self.headers
        if self.edge is not None and self.edge.start(self.scope, status, headers, length):
            return
        if length is not None:
            headers.append((b"content-length", b"%d" % length))
        await self.send({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, data: bytes, *, more: bool) -> None:
        if not self.write_now(data, more=more):
            self.sent_bytes += len(data)
            await self.send({"type": "http.response.body", "body": data, "more_body": more})

    def write_now(self, data: bytes, *, more: bool = True) -> bool:
        """Write if that can be done without waiting."""
        if self.edge is None or not self.edge.writable(self.scope):
            return False
        self.sent_bytes += len(data)
        self.edge.write(data, more=more)
        return True

    async def whole(self, status: int, headers: list[Header], data: bytes) -> None:
        await self.start(status, [_JSON, *headers], len(data))
        await self.write(data, more=False)

    async def fail(self, error: TalariaError, *, tokens_made: bool = False) -> None:
        """The whole answer is an error. A client that is gone gets nothing."""
        if isinstance(error, ClientGoneError):
            self.status = error.status
            return
        await self.whole(error.status, errors.headers(error, tokens_made=tokens_made), errors.body(error))


class CallEndpoint:
    """ASGI application of one call endpoint."""

    def __init__(self, name: str, parse: Callable[[bytes], Request], parts: Parts) -> None:
        self._name = name
        self._parse = parse
        self._parts = parts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        rid = new_rid()
        edge: EdgeProtocol | None = (scope.get("extensions") or {}).get(EDGE)
        began = asyncio.get_running_loop().time()
        it = _Exchange(scope, send, rid, [(b"x-talaria-request", rid.encode())], began, edge)
        try:
            await self._serve(scope, receive, it)
        except TalariaError as e:
            await it.fail(e)
        except Exception as e:
            log.exception("unexpected error", error=repr(e))
            if it.started:
                raise  # the server closes the connection: the client must not take this for an end
            await it.fail(TalariaError("an unexpected error happened; it was logged"))
        finally:
            self._parts.metrics.request(self._name, it.status or 499)

    async def _serve(self, scope: Scope, receive: Receive, it: _Exchange) -> None:
        p = self._parts
        headers: dict[bytes, bytes] = dict(scope["headers"])
        tenant = p.auth.tenant(headers.get(b"authorization"))
        check_content_type(headers)
        timeout_s = call_timeout_s(headers, p.settings.api.request_timeout_s)
        deadline = p.clock.now() + timeout_s
        limit = self._limit_bytes()
        body = None if it.edge is None else it.edge.body(scope)
        if body is None:
            body = await read_body(receive, headers, limit)
        elif len(body) > limit:
            raise too_large(limit)
        request = self._parse(body)
        self._check_model(request)
        session = identify(headers, request.hints, tenant)
        priority = call_priority(headers, p.settings.router.max_priority(tenant))
        it.headers += [
            (b"x-talaria-session", session.echo()),
            (b"x-talaria-session-source", session.source.encode()),
        ]
        it.began = asyncio.get_running_loop().time()
        facts = self._facts(it.rid, request, tenant, session, deadline)
        call = Call(replace(facts, priority=priority) if priority else facts, p.limits, p.peers)
        answer = Answer(it.rid, request, int(time.time()))
        edge = it.edge
        trace = _trace(headers)

        def open_call(sink: Sink) -> _Watched:
            return _Watched(p.link, LiveCall(call, sink, body, trace), receive, edge)

        p.metrics.started(len(body))
        try:
            if request.stream:
                await self._stream(call, open_call, answer, it)
            else:
                await self._whole(call, open_call, answer, it)
        finally:
            p.metrics.ended(it.sent_bytes)

    # --- before the call

    def _limit_bytes(self) -> int:
        bus = self._parts.link.bus
        limit = self._parts.settings.bus.max_payload_bytes if bus is None else bus.max_payload_bytes
        return limit - HEADROOM_BYTES

    def _check_model(self, request: Request) -> None:
        p = self._parts
        configured = p.settings.models.get(request.model)
        if configured is None and not p.cluster.knows(request.model):
            raise ModelNotFoundError(f"the model {request.model!r} does not exist; see /v1/models", param="model")
        context = configured.context_tokens if configured is not None else None
        if context is None and p.cluster.fresh(p.clock.now()):
            context = p.cluster.model(request.model).context_tokens
        # A prompt has one token at least. Anything finer is for the instance to say: it counts tokens.
        if context and request.max_tokens is not None and request.max_tokens >= context:
            raise ContextLengthError(
                f"{request.max_tokens} new tokens and a prompt do not fit the model's context of {context} tokens",
                param="max_tokens",
            )

    def _facts(self, rid: str, request: Request, tenant: str, session: SessionRef, deadline: float) -> Facts:
        return Facts(
            rid=rid,
            endpoint=request.endpoint,
            api=self._parts.link.api,
            api_epoch=self._parts.api_epoch,
            tenant=tenant,
            session=session.key(tenant),
            session_source=session.source,
            model=request.model,
            prompt_bytes=request.prompt_bytes,
            max_tokens=request.max_tokens,
            stream=request.stream,
            deadline=deadline,
            parent_session=session.parent_key(tenant),
            session_final=session.final,
            prefix_id=request.prefix_id,
            prefix_bytes=request.prefix_bytes,
        )

    # --- the call

    async def _whole(self, call: Call, open_call: _OpenCall, answer: Answer, it: _Exchange) -> None:
        whole = Whole(answer)
        sink = Gatherer(whole)
        async with open_call(sink):
            await sink.wait()
        self._first_token(sink.first_at, it)
        it.headers += _placed(call)
        if sink.error is not None:
            self._log_failure(call, sink.error)
            await it.fail(sink.error, tokens_made=call.tokens_made)
            return
        final = whole.final
        if final is not None and final.usage is not None:
            it.headers.append((b"x-talaria-cache", final.usage.cache_source.encode()))
        reading = None if it.edge is None else asyncio.get_running_loop().call_later(READ_WITHIN_S, it.edge.abort)
        try:
            await it.whole(200, [], whole.body())
        finally:
            if reading is not None:
                reading.cancel()

    async def _stream(self, call: Call, open_call: _OpenCall, answer: Answer, it: _Exchange) -> None:
        s = self._parts.settings.api
        edge = it.edge
        queue = FrameQueue(s.max_pending_frames, None if edge is None else edge.abort)
        writer = StreamWriter(answer)
        if edge is not None:
            queue.direct, queue.quiet_s = partial(_write_now, writer, it), s.keepalive_s
        try:
            async with open_call(queue):
                await self._pump(call, queue, writer, it)
        finally:
            queue.close()
            self._first_token(queue.first_at, it)

    async def _pump(self, call: Call, queue: FrameQueue, writer: StreamWriter, it: _Exchange) -> None:
        """Write frames as they come, all that wait at once; comments while there are none."""
        s = self._parts.settings.api
        loop = asyncio.get_running_loop()
        nudge_at = it.began + s.early_headers_s
        while True:
            await queue.wait(nudge_at)
            frames, error = queue.take(), queue.error
            ended = queue.ended
            if error is not None:
                self._log_failure(call, error)
                if not it.started and not frames:
                    it.headers += _placed(call)
                    await it.fail(error, tokens_made=call.tokens_made)
                    return
            chunks = [writer.frame(frame) for frame in frames]
            if isinstance(error, ClientGoneError):
                it.status = error.status
                return
            if error is not None:
                self._parts.metrics.broken(error.code)
                chunks.append(writer.error(error))
            if not chunks and not ended and loop.time() >= nudge_at:
                chunks.append(KEEP_ALIVE)
            data = b"".join(chunks)
            if not data and not ended:
                continue
            queue.writing = True
            if not it.started:
                # Before the first frame the call may still move to another instance: those headers stay out then.
                known = [*_placed(call), (b"x-talaria-cache", frames[0].cache_source.encode())] if frames else []
                await it.start(200, [*_SSE, *known])
            await it.write(data, more=not ended)
            queue.writing = False
            if ended:
                return
            nudge_at = loop.time() + s.keepalive_s

    def _first_token(self, at: float | None, it: _Exchange) -> None:
        if at is not None:
            self._parts.metrics.first_token(self._name, at - it.began)

    def _log_failure(self, call: Call, error: TalariaError) -> None:
        log.info(
            "call failed",
            rid=call.facts.rid,
            model=call.facts.model,
            instance=call.iid,
            attempt=call.attempt,
            code=error.code,
            error=error.message,
        )


def _write_now(writer: StreamWriter, it: _Exchange, frame: Frame) -> bool:
    """Write a delta without a task's turn, if that can be done without waiting."""
    edge = it.edge
    if edge is None or not it.started or not edge.writable(it.scope):
        return False
    data = writer.frame(frame)
    if data:
        it.sent_bytes += len(data)
        edge.write(data, more=True)
    return True


class _Watched:
    """Runs a call while watching for the client to go away; leaving before its end cancels it."""

    def __init__(self, link: Link, live: LiveCall, receive: Receive, edge: EdgeProtocol | None) -> None:
        self._edge = edge
        self._link = link
        self._live = live
        self._receive = receive
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> None:
        self._link.open(self._live)
        if self._edge is not None:
            self._edge.watch(self._gone)
        else:  # another ASGI server
            self._task = asyncio.create_task(self._watch())

    async def __aexit__(self, *_: object) -> None:
        if self._edge is not None:
            self._edge.watch(None)
        if self._task is not None:
            self._task.cancel()
        self._link.feed(self._live, ClientGone())  # does nothing if the call has ended

    def _gone(self) -> None:
        self._link.feed(self._live, ClientGone())

    async def _watch(self) -> None:
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self._gone()
                return


def _trace(headers: dict[bytes, bytes]) -> str:
    """A traceparent for this call: a span of the caller's trace, else the root of a new one."""
    parent = tracing.parse(headers.get(TRACE_HEADER.encode(), b"").decode("latin-1"))
    return (tracing.new(sampled=False) if parent is None else parent.child()).header()


_OpenCall = Callable[[Sink], _Watched]


def _placed(call: Call) -> list[Header]:
    placement = call.placement
    if placement is None:
        return []
    return [(b"x-talaria-instance", placement.iid.encode()), (b"x-talaria-route", placement.via.encode())]
