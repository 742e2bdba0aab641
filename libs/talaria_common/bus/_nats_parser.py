"""nats-py's protocol parser with a short way for messages: no regular expressions, no state between reads, no task."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nats.protocol.parser import AWAITING_CONTROL_LINE, Parser

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

    def __init__(self, client: Any, direct: dict[int, Direct], heard: Callable[[], None]) -> None:
        super().__init__(client)
        self._direct = direct
        self._heard = heard

    async def parse(self, data: bytes = b"") -> None:
        """Take what was read; what is not complete waits for the next read."""
        self._heard()
        if self.state != AWAITING_CONTROL_LINE:  # nats-py is within a message
            await super().parse(data)
            return
        buffer = self.buf
        buffer += data
        at = 0
        try:
            while True:
                end = buffer.find(_CRLF, at)
                if end < 0:
                    break
                line = bytes(buffer[at:end]).split()
                op = line[0] if line else b""
                if op == b"MSG":
                    block = 0
                elif op == b"HMSG":
                    block = int(line[-2])
                else:
                    del buffer[:at]
                    at = 0
                    await super().parse()  # the rest of this read too
                    return
                start = end + len(_CRLF)
                stop = start + int(line[-1])
                if len(buffer) < stop + len(_CRLF):
                    break
                at = stop + len(_CRLF)
                payload = bytes(memoryview(buffer)[start + block : stop])
                raw = bytes(buffer[start : start + block]) if block else None
                subject, sid, reply = line[1], int(line[2]), line[3] if len(line) == (6 if block else 5) else b""
                take = self._direct.get(sid)
                if take is not None and take(
                    Message(subject.decode(), payload, headers_of(raw) if raw else {}, reply.decode() or None)
                ):
                    continue
                await self.nc._process_msg(sid, subject, reply, payload, raw)  # noqa: SLF001 - as the parser itself calls it
                if self.buf is not buffer:  # the connection was given up meanwhile
                    return
        finally:
            if at:
                del buffer[:at]
