"""uvicorn's httptools protocol, with a few small changes of ours."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from talaria_api import errors
from talaria_common.errors import BadRequestError

EDGE = "talaria.edge"
"""ASGI extension: the connection's `EdgeProtocol`."""


class EdgeProtocol(HttpToolsProtocol):
    """uvicorn's, with TCP_NODELAY, bad HTTP refused with JSON, and more for the application.

    As the extension EDGE it gives what ASGI lacks: to cut off a client that does not read, to be told that one is gone,
    and to write a chunk without a task.
    """

    _gone: Callable[[], None] | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # uvicorn's own narrowing
        """A client has connected."""
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            # Nagle with delayed ACK costs 44 ms per stream on kept-alive connections (GATEWAY 7).
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        super().connection_made(transport)

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self.scope["extensions"] = {EDGE: self}  # type: ignore[dict-item] # the object itself, not a dict

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone."""
        super().connection_lost(exc)
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

    def writable(self) -> bool:
        """Whether `write_now` may be called: the headers of a chunked body are out, and the client reads."""
        cycle = self.cycle
        return bool(cycle.chunked_encoding) and not (
            self.flow.write_paused or cycle.disconnected or cycle.response_complete
        )

    def write_now(self, data: bytes) -> None:
        """Write a piece of a chunked body."""
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not HTTP, in the shape of all other errors."""
        body = errors.body(BadRequestError(msg))
        head = STATUS_LINE[
            400
        ] + b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        self.transport.write(head + body)
        self.transport.close()
