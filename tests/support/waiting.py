"""Waiting for events, not for seconds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from talaria_common.bus import Message


async def until(condition: Callable[[], object], timeout_s: float = 20.0, what: str = "the condition") -> None:
    """Return once `condition()` is true; it is tried on every turn of the loop, then every few ms."""
    start = time.monotonic()
    while not condition():
        waited = time.monotonic() - start
        assert waited < timeout_s, f"{what} did not come true within {timeout_s} s"
        await asyncio.sleep(0 if waited < 0.02 else 0.005)


class Inbox:
    """A handler that keeps what it gets."""

    def __init__(self) -> None:
        self.messages: list[Message] = []

    def __call__(self, message: Message) -> None:
        self.messages.append(message)

    @property
    def data(self) -> list[bytes]:
        return [m.data for m in self.messages]

    async def wait(self, count: int, timeout_s: float = 10.0) -> list[Message]:
        await until(lambda: len(self.messages) >= count, timeout_s, f"{count} messages (have {len(self.messages)})")
        return self.messages
