"""The way out to the bus: one queue and one task, so that messages leave in the order in which they were decided."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

import msgspec
import structlog

from talaria_common.bus import Bus, Message
from talaria_common.errors import TalariaError
from talaria_common.wire import Event, ForwardReply, encode

log = structlog.get_logger(__name__)


EVENT_WITHIN_S = 0.02
ACCEPTED_WITHIN_S = 0.005
"""A first token that comes sooner brings the news of its call's acceptance along."""


def _patience_s(message: msgspec.Struct) -> float:
    if isinstance(message, Event):
        return EVENT_WITHIN_S
    return ACCEPTED_WITHIN_S if isinstance(message, ForwardReply) and message.accepted else 0.0


class Sender:
    """Args: bus: where to; refused: called with a message's type name when the bus does not take it."""

    def __init__(self, bus: Bus, refused: Callable[[str], None]) -> None:
        self._bus = bus
        self._refused = refused
        self._queue: deque[tuple[str | Message, msgspec.Struct]] = deque()
        self._wake = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()
        self._failing = False

    def put(self, to: str | Message, message: msgspec.Struct) -> None:
        """Publish on the subject `to`, or answer the request `to`: at once if nothing waits, without a task's turn.

        Events, and the news that a call was accepted, go with what is in more of a hurry, if that comes soon.
        """
        if self._empty.is_set() and self._posted(to, message, _patience_s(message)):
            return
        self._queue.append((to, message))
        self._empty.clear()
        self._wake.set()

    async def flush(self) -> None:
        """Return when the queue is empty."""
        await self._empty.wait()

    async def run(self) -> None:
        """Send until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._queue:
                to, message = self._queue.popleft()
                await self._send(to, message)
            self._empty.set()

    def _posted(self, to: str | Message, message: msgspec.Struct, within_s: float) -> bool:
        try:
            posted = self._bus.post(to, encode(message), within_s=within_s)
        except TalariaError as e:
            self._lost(message, e)
            return True
        self._failing = self._failing and not posted
        return posted

    async def _send(self, to: str | Message, message: msgspec.Struct) -> None:
        try:
            data = encode(message)
            if isinstance(to, str):
                await self._bus.publish(to, data)
            else:
                await self._bus.respond(to, data)
        except TalariaError as e:
            self._lost(message, e)
        else:
            self._failing = False

    def _lost(self, message: msgspec.Struct, error: TalariaError) -> None:
        """Frames and completions may be lost: a seq gap or the snapshots tell the other side."""
        self._refused(type(message).__name__)
        if not self._failing:
            log.warning("the bus does not take messages", error=error.message, message=type(message).__name__)
        self._failing = True
