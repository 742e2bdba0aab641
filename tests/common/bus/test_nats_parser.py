"""The short way through the protocol: whatever the reads cut, the same messages come out, in order."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from talaria_common.bus import Message
from talaria_common.bus._nats_parser import DirectParser, headers_of

STREAM = (
    b"MSG a.b 1 5\r\nhello\r\n"
    b"PING\r\n"
    b"MSG a.b 1 _INBOX.x.1 0\r\n\r\n"
    b"HMSG c 1 21 26\r\nNATS/1.0\r\nname: v\r\n\r\nworld\r\n"
    b"HMSG c 1 back 16 16\r\nNATS/1.0 503\r\n\r\n\r\n"
    b"MSG d 2 4\r\n\r\n\r\n\r\n"
    b"PONG\r\n"
    b"MSG a.b 1 2\r\nok\r\n"
)


class Client:
    """What the parser calls of nats-py's client."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes | None) -> None:
        self.seen.append((sid, subject.decode(), reply.decode(), data, headers))

    async def _process_ping(self) -> None:
        self.seen.append("ping")

    async def _process_pong(self) -> None:
        self.seen.append("pong")


def run(pieces: list[bytes]) -> list[Any]:
    client = Client()

    def take(message: Message) -> bool:
        client.seen.append((message.subject, message.reply, message.data, dict(message.headers)))
        return True

    parser = DirectParser(client, {1: take}, lambda: None)

    async def feed() -> None:
        for piece in pieces:
            await parser.parse(piece)

    asyncio.run(feed())
    assert not parser.buf
    # What came by nats-py's way reads like the rest.
    return [_alike(s) for s in client.seen]


def _alike(seen: Any) -> Any:
    if isinstance(seen, tuple) and len(seen) == 5 and seen[0] == 1:
        return (seen[1], seen[2] or None, seen[3], headers_of(seen[4]) if seen[4] else {})
    return seen


EXPECTED = [
    ("a.b", None, b"hello", {}),
    "ping",
    ("a.b", "_INBOX.x.1", b"", {}),
    ("c", None, b"world", {"name": "v"}),
    ("c", "back", b"", {"Status": "503"}),
    (2, "d", "", b"\r\n\r\n", None),
    "pong",
    ("a.b", None, b"ok", {}),
]


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_any_cut_gives_the_same(cuts: list[int]):
    at = [0, *sorted(cuts), len(STREAM)]
    assert run([STREAM[a:b] for a, b in itertools.pairwise(at)]) == EXPECTED


def test_byte_by_byte():
    assert run([STREAM[i : i + 1] for i in range(len(STREAM))]) == EXPECTED


@pytest.mark.parametrize(
    ("block", "fields"),
    [
        (b"NATS/1.0\r\nA: b\r\nC:d \r\n\r\n", {"A": "b", "C": "d"}),
        (b"NATS/1.0 503 No Responders\r\n\r\n", {"Status": "503"}),
        (b'NATS/1.0\r\nJ: {"x": "a:b"}\r\n\r\n', {"J": '{"x": "a:b"}'}),
        (b"NATS/1.0\r\nU: \xc3\xa9\r\n\r\n", {"U": "é"}),
    ],
)
def test_headers(block: bytes, fields: dict[str, str]):
    assert headers_of(block) == fields
