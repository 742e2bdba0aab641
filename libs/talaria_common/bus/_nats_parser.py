"""nats-py's protocol parser with a short way for messages: no regular expressions, no state between reads, no task."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nats.protocol.parser import Parser

from talaria_common.bus.interface import Message

Direct = Callable[[Message], bool]
"""Takes a message in the read loop; False: it is not one of its own, nats-py is to have it."""

_CRLF = b"\r\n"
_VERSION = len("NATS/1.0")


def headers_of(block: bytes) -> dict[str, str]:
    """A header block's fields; its inline status, as of 'no responders', under "Status"."""
    first, _, rest = block.partition(_CRLF)
    out: dict[str, str] = {}
    if len(first) > _VERSION:
        out["Status"] = first[_VERSION:].strip().split(b" ", 1)[0].decode("ascii", "replace")
    for line in rest.split(_CRLF):
        name, colon, value = line.partition(b":")
        if colon:
            out[name.strip().decode("ascii", "replace")] = value.strip().decode("utf-8", "replace")
    return out


class DirectParser(Parser):  # type: ignore[misc] # nats-py's types are not followed
    """Delivers MSG and HMSG straight to `direct[sid]`; everything else goes nats-py's own way.

    `heard` is called before what was read is delivered.
    """

    buf: bytearray

    def __init__(self, client: Any, direct: dict[int, Direct], heard: Callable[[], None]) -> None:
        super().__init__(client)
        self._direct = direct
        self._heard = heard
        self.caught_up = False
        """Whether nothing waits for `parse`: then `take` may have what is read next."""
        self.unread: Callable[[], bool] = bool
        """Whether more than `parse` has been given waits for it."""

    def take(self, data: bytes) -> bool:
        """Deliver what was read, without waiting for anything. What is not complete stays in `buf`.

        Returns False when what `buf` now begins with is not for us: `parse` is to go on.
        """
        self._heard()
        buffer = self.buf
        buffer += data
        at = 0
        try:
            while (found := _item(buffer, at)) is not None:
                end, payload, args, block = found
                if payload is None:
                    return False
                take = self._direct.get(int(args[2]))
                if take is None or not take(_message(args, payload, block)):
                    return False
                at = end
            return True
        finally:
            if at:
                del buffer[:at]

    async def parse(self, data: bytes = b"") -> None:
        """The same for what does have to wait, in order."""
        while not self.take(data):
            data = b""
            buffer = self.buf
            found = _item(buffer, 0)
            assert found is not None
            end, payload, args, block = found
            rest = buffer[end:]
            if payload is None:
                self.buf = line = buffer[:end]
                await super().parse()
            else:
                self.buf = line = bytearray()
                subject, sid, reply = args[1], int(args[2]), _reply(args)
                await self.nc._process_msg(sid, subject, reply, payload, block)  # noqa: SLF001 - as the parser itself calls it
            if self.buf is not line:  # the connection was given up meanwhile
                return
            self.buf = rest
        self.caught_up = not self.unread()


_Item = tuple[int, bytes | None, list[bytes], bytes | None]


def _item(buffer: bytearray, at: int) -> _Item | None:
    """The operation at `at`: its end; of a message also payload, its line's words and header block. None: not whole."""
    end = buffer.find(_CRLF, at)
    if end < 0:
        return None
    args = bytes(buffer[at:end]).split()
    op = args[0] if args else b""
    start = end + len(_CRLF)
    if op == b"MSG":
        block = 0
    elif op == b"HMSG":
        block = int(args[-2])
    else:
        return start, None, args, None
    stop = start + int(args[-1])
    if len(buffer) < stop + len(_CRLF):
        return None
    with memoryview(buffer) as view:
        payload = bytes(view[start + block : stop])
    return stop + len(_CRLF), payload, args, bytes(buffer[start : start + block]) if block else None


def _reply(args: list[bytes]) -> bytes:
    return args[3] if len(args) == (5 if args[0] == b"MSG" else 6) else b""


def _message(args: list[bytes], payload: bytes, block: bytes | None) -> Message:
    return Message(args[1].decode(), payload, headers_of(block) if block else {}, _reply(args).decode() or None)
