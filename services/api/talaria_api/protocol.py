"""uvicorn's httptools protocol, with a few small changes of ours."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from http import HTTPStatus

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from talaria_api import errors
from talaria_api.errors import Header, HeadersTimeoutError, HeadersTooLargeError
from talaria_api.sinks import READ_WITHIN_S
from talaria_common.errors import BadRequestError, TalariaError

EDGE = "talaria.edge"
"""ASGI extension: the connection's `EdgeProtocol`."""
HEAD_BYTES = 64 << 10
"""The most that a request line with its headers may have, with some slack for what arrives in one piece."""
GATHER_BYTES = 2 << 20
HEAD_TIMEOUT_S = 30.0
"""A request's headers must be whole this long after the connection, or after their first byte on a kept one."""


class EdgeProtocol(HttpToolsProtocol):
    """uvicorn's, with TCP_NODELAY, bounds on headers, bad HTTP refused with JSON, and more for the application.

    As the extension EDGE it gives what ASGI lacks: to cut off a client that does not read, to be told that one is gone,
    and to read and write without a task's turn and the checks of headers that are our own.
    """

    _gone: Callable[[], None] | None = None
    _head_bytes = 0
    """Of the headers that are not whole yet; 0 while none are awaited."""
    _head_timer: asyncio.TimerHandle | None = None
    _in_head = False
    _unread_timer: asyncio.TimerHandle | None = None
    """Runs while the client has not read all of an answer that is complete."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # uvicorn's own narrowing
        """A client has connected."""
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            # Nagle with delayed ACK costs 44 ms per stream on kept-alive connections (GATEWAY 7).
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        super().connection_made(transport)
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._head_late)

    def data_received(self, data: bytes) -> None:
        """Bytes from the client. What follows a refusal is not read."""
        if self.transport.is_closing():
            return
        super().data_received(data)
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_BYTES:
                self._refuse(HeadersTooLargeError(f"the request's headers are larger than {HEAD_BYTES} bytes"))
            elif self._head_timer is None:
                self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._head_late)
        elif self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def on_headers_complete(self) -> None:
        """The headers are whole."""
        self._in_head, self._head_bytes = False, 0
        super().on_headers_complete()

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        if self._unread_timer is not None and not self.transport.get_write_buffer_size():
            self._unread_timer.cancel()
            self._unread_timer = None
        self._in_head = True
        self.scope["extensions"] = {EDGE: self}  # type: ignore[dict-item] # the object itself, not a dict

    def on_body(self, body: bytes) -> None:
        """A piece of the body. The application hears of it once it is whole, or perhaps too large.

        uvicorn stops reading at 64 KB until the application has taken them: at 400 KB that is seven turns of the loop.
        """
        cycle = self.cycle
        if cycle.response_complete:
            return
        cycle.body += body
        if len(cycle.body) > GATHER_BYTES:
            self.flow.pause_reading()
            cycle.message_event.set()

    def on_response_complete(self) -> None:
        """The answer is written, which does not say that it is read: a closing connection, too, waits for that."""
        super().on_response_complete()
        if self._unread_timer is None and self.transport.get_write_buffer_size():
            self._unread_timer = self.loop.call_later(READ_WITHIN_S, self._unread)

    def _unread(self) -> None:
        self._unread_timer = None
        if self.transport.get_write_buffer_size():
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone."""
        super().connection_lost(exc)
        for timer in (self._head_timer, self._unread_timer):
            if timer is not None:
                timer.cancel()
        if self._gone is not None:
            self._gone()

    def abort(self) -> None:
        """Drop the connection with whatever the client has not read."""
        self.transport.abort()

    def watch(self, gone: Callable[[], None] | None) -> None:
        """Call `gone` when the client goes away, at once if it has; None: no longer. The body has been read."""
        self._gone = gone
        if gone is not None:
            self.flow.resume_reading()  # with reading paused, its going would show in nothing
            if self.cycle.disconnected or self.transport.is_closing():
                gone()

    # --- short ways past ASGI, for the request that is being answered; what they cannot do goes the usual way

    def body(self, scope: Scope) -> bytes | None:
        """The whole body of the request `scope`, if it has come."""
        cycle = self.cycle
        if cycle.scope is not scope or cycle.more_body or cycle.waiting_for_100_continue or cycle.disconnected:
            return None
        body = bytes(cycle.body)
        cycle.body = bytearray()
        cycle.message_event.clear()
        return body

    def start(self, scope: Scope, status: int, headers: list[Header], length: int | None) -> bool:
        """Write the head of an answer whose body has `length` bytes (None: in chunks). False: it cannot be done."""
        cycle = self.cycle
        if cycle.scope is not scope or cycle.response_started or cycle.disconnected or self.flow.write_paused:
            return False
        cycle.response_started, cycle.waiting_for_100_continue = True, False
        cycle.chunked_encoding, cycle.expected_content_length = length is None, length or 0
        lines = [b"%b: %b\r\n" % header for header in (*cycle.default_headers, *headers)]
        lines.append(b"transfer-encoding: chunked\r\n" if length is None else b"content-length: %d\r\n" % length)
        if not cycle.keep_alive:
            lines.append(b"connection: close\r\n")
        self.transport.write(b"%b%b\r\n" % (STATUS_LINE[status], b"".join(lines)))
        return True

    def writable(self, scope: Scope) -> bool:
        """Whether `write` may be called: the headers are out, and the client reads."""
        cycle = self.cycle
        return (
            cycle.scope is scope
            and cycle.response_started
            and not (self.flow.write_paused or cycle.disconnected or cycle.response_complete)
        )

    def write(self, data: bytes, *, more: bool) -> None:
        """Write a piece of the body; without `more` the last one."""
        cycle = self.cycle
        if not cycle.chunked_encoding:
            cycle.expected_content_length -= len(data)
        elif data:
            data = b"%x\r\n%b\r\n" % (len(data), data)
        if not more and cycle.chunked_encoding:
            data += b"0\r\n\r\n"
        self.transport.write(data)
        if more:
            return
        cycle.response_complete = True
        cycle.message_event.set()
        if not cycle.keep_alive:
            self.transport.close()
        cycle.on_response()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not HTTP, in the shape of all other errors."""
        self._refuse(BadRequestError(msg))

    def _head_late(self) -> None:
        self._head_timer = None
        if self._in_head:
            self._refuse(HeadersTimeoutError(f"the headers did not arrive within {HEAD_TIMEOUT_S:.0f} s"))
        else:
            self.transport.close()  # nothing ever came: there is nobody to tell

    def _refuse(self, error: TalariaError) -> None:
        """Answer what never became a request, and hang up; not into an answer that is being written."""
        answering = self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete
        if not answering and not self.transport.is_closing():
            body = errors.body(error)
            self.transport.write(
                b"HTTP/1.1 %d %b\r\n" % (error.status, HTTPStatus(error.status).phrase.encode())
                + b"content-type: application/json\r\ncontent-length: %d\r\n" % len(body)
                + b"connection: close\r\n\r\n"
                + body
            )
        self.transport.close()
