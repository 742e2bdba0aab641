"""nats-py's client with its faults mended and with short ways for what every call pays for.

Faults (seen in 2.16; test_nats_traps.py shows both): pings that overtake, pongs that kill the read loop.

Short ways: messages are delivered as they are read, without a task's turn (`_Reading`, `DirectParser`); what is
published in one turn of the event loop is written at its end without waking a task, and what is in no hurry waits for
company; a request is one future and one timer.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import nats.aio.client
import nats.errors
from nats.aio.client import Client
from nats.aio.transport import TcpTransport
from nats.protocol.parser import PING_OP

from talaria_common.bus._nats_parser import Direct, DirectParser
from talaria_common.bus.interface import Message

READ_BUFFER_BYTES = 1 << 20
"""nats-py reads 32 KB at a time, which costs a third of the CPU of a 400 KB hop. It has no option for it."""
nats.aio.client.DEFAULT_BUFFER_SIZE = READ_BUFFER_BYTES
DIRECT_PENDING_BYTES = 8 << 20
"""With more waiting than this, publishers go nats-py's way, which makes them wait."""
SOCKET_BUFFER_BYTES = 1 << 20
"""With more than this in the socket's buffer, writing is the flusher's, which waits until it has drained."""
SMALL_BYTES = 16 << 10
"""Up to here a copy is cheaper than another buffer for the socket."""
NO_RESPONDERS = "503"


class MendedClient(Client):  # type: ignore[misc] # nats-py's types are not followed
    """nats-py's client, mended and shortened: see this module."""

    def __init__(self) -> None:
        super().__init__()
        self.direct: dict[int, Direct] = {}
        """Subscriptions served in the read loop, by sid."""
        self._ps = DirectParser(self, self.direct, self.heard)
        self.quiet = False
        """Set by whoever wants to know whether anything is read; reading unsets it."""
        self.on_sound: Callable[[], None] | None = None
        """Called once, before what is read next is delivered."""
        self._asked: dict[str, asyncio.Future[Message]] = {}
        self._tokens = itertools.count()
        self._pending: list[bytes] = []
        self._kicked = False
        self._late: asyncio.TimerHandle | None = None
        """When those that wait for company go without."""

    # --- faults mended

    async def _send_ping(self, future: asyncio.Future[Any] | None = None) -> None:
        """Queue a PING behind what was queued before.

        The original writes it straight to the socket, ahead of commands that wait for the flusher: `flush` then
        returns before they are sent, and a drain loses what arrives between its early pong and its late UNSUB.
        """
        self._pongs.append(asyncio.get_running_loop().create_future() if future is None else future)
        await self._send_command(PING_OP + b"\r\n")
        await self._flush_pending()

    async def _process_pong(self) -> None:
        """Match a PONG with its PING.

        The original sets a result even on a future that its flush has given up on; the InvalidStateError ends the
        read loop without a word, and the connection is deaf from then on.
        """
        if self._pongs:
            future = self._pongs.pop(0)
            self._pongs_received += 1
            self._pings_outstanding = 0
            if not future.done():
                future.set_result(True)

    # --- a server that hangs

    def heard(self) -> None:
        """Something was read."""
        self.quiet = False
        if self.on_sound is not None:
            tell, self.on_sound = self.on_sound, None
            tell()

    async def ping(self) -> None:
        """Send a PING; nobody waits for its PONG, but it will be heard."""
        await self._send_ping()

    # --- short ways

    def send(
        self, subject: str, reply: str, payload: bytes, headers: Mapping[str, str] | None, *, within_s: float = 0.0
    ) -> bool:
        """Queue a message that was checked; False: it is not as simple as that, use `publish`.

        `within_s`: so long it may wait for others to be written with.
        """
        if self._status != Client.CONNECTED or self._pending_data_size > DIRECT_PENDING_BYTES:
            return False
        if len(payload) > self._max_payload:
            return False
        if headers:
            fields = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
            if fields.count("\n") != len(headers) or fields.count("\r") != len(headers):
                return False
            block = f"NATS/1.0\r\n{fields}\r\n".encode()
            command = b"HPUB %b %b %d %d\r\n%b" % (
                subject.encode(),
                reply.encode(),
                len(block),
                len(block) + len(payload),
                block,
            )
        else:
            command = b"PUB %b %b %d\r\n" % (subject.encode(), reply.encode(), len(payload))
        if len(payload) < SMALL_BYTES:
            self._pending.append(b"%b%b\r\n" % (command, payload))
        else:
            self._pending += (command, payload, b"\r\n")
        self._pending_data_size += len(command) + len(payload) + 2
        self.stats["out_msgs"] += 1
        self.stats["out_bytes"] += len(payload)
        if within_s:
            self._kick_within(within_s)
        else:
            self._kick()
        return True

    async def ask(self, subject: str, payload: bytes, timeout_s: float, headers: Mapping[str, str] | None) -> Message:
        """Send and wait for one answer.

        Raises:
            TimeoutError: none came.
            nats.errors.Error: as `publish`; NoRespondersError: nobody listens.
        """
        if not self._resp_sub_prefix:
            await self._init_request_sub()
        loop = asyncio.get_running_loop()
        token = str(next(self._tokens))
        future: asyncio.Future[Message] = loop.create_future()
        self._asked[token] = future
        timer = loop.call_later(timeout_s, _give_up, future)
        try:
            reply = f"{self._resp_sub_prefix.decode()}{token}"
            if not self.send(subject, reply, payload, headers):
                await self.publish(subject, payload, reply=reply, headers=dict(headers) if headers else None)
            answer = await future
        finally:
            timer.cancel()
            del self._asked[token]
        if answer.headers.get("Status") == NO_RESPONDERS and not answer.data:
            raise nats.errors.NoRespondersError
        return answer

    # --- reading

    async def _read_loop(self) -> None:
        """nats-py's, which gets only what `_Reading` cannot deliver on the spot."""
        io = self._transport
        if type(io) is TcpTransport:
            transport = io._io_writer.transport  # noqa: SLF001 - nats-py shows its streams to nobody
            streams = transport.get_protocol()
            if isinstance(streams, asyncio.StreamReaderProtocol):
                transport.set_protocol(_Reading(self._ps, io._io_reader, streams))  # noqa: SLF001 - as above
        await super()._read_loop()

    async def _init_request_sub(self) -> None:
        await super()._init_request_sub()
        self.direct[self._sid] = self._answered

    def _answered(self, message: Message) -> bool:
        future = self._asked.get(message.subject.rpartition(".")[2])
        if future is None:  # late, or of a request that nats-py itself has made
            return False
        if not future.done():
            future.set_result(message)
        return True

    async def _flush_pending(self, force_flush: bool = False) -> Any:
        """Write at the end of this turn of the loop; `force_flush` or a dead flusher: as nats-py does it."""
        if force_flush or self._flusher_task is None or self._flusher_task.done():
            return await super()._flush_pending(force_flush)
        self._kick()
        return None

    def _kick(self) -> None:
        if not self._kicked:
            self._kicked = True
            asyncio.get_running_loop().call_soon(self._write_out)

    def _kick_within(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        at = loop.time() + seconds
        if self._kicked or (self._late is not None and self._late.when() <= at):
            return
        if self._late is not None:
            self._late.cancel()
        self._late = loop.call_at(at, self._write_out)

    def _write_out(self) -> None:
        self._kicked = False
        if self._late is not None:
            self._late.cancel()
            self._late = None
        if not self._pending or not self.is_connected or self._transport is None:
            return  # a reconnect flushes what waits
        socket = self._transport._io_writer.transport  # noqa: SLF001 - nats-py shows its writer to nobody
        if socket.is_closing():
            return
        if socket.get_write_buffer_size() > SOCKET_BUFFER_BYTES:
            if self._flush_queue.empty():
                self._flush_queue.put_nowait(asyncio.get_running_loop().create_future())
            return
        socket.writelines(self._pending)
        self._pending = []
        self._pending_data_size = 0


class _Reading(asyncio.Protocol):
    """Parses what arrives as it arrives; hands to nats-py's stream reader what has to wait, and all behind it."""

    def __init__(
        self, parser: DirectParser, reader: asyncio.StreamReader, streams: asyncio.StreamReaderProtocol
    ) -> None:
        self._parser = parser
        self._streams = streams
        parser.caught_up = not reader._buffer  # type: ignore[attr-defined] # noqa: SLF001 - it has no public name
        parser.unread = lambda: bool(reader._buffer)  # type: ignore[attr-defined] # noqa: SLF001 - as above

    def data_received(self, data: bytes) -> None:
        parser = self._parser
        if parser.caught_up:
            if parser.take(data):
                return
            parser.caught_up = False
            data, parser.buf = bytes(parser.buf), bytearray()
        self._streams.data_received(data)

    def eof_received(self) -> bool | None:
        return self._streams.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._streams.connection_lost(exc)

    def pause_writing(self) -> None:
        self._streams.pause_writing()

    def resume_writing(self) -> None:
        self._streams.resume_writing()


def _give_up(future: asyncio.Future[Message]) -> None:
    if not future.done():
        future.set_exception(TimeoutError())
