"""Asynchronous bus errors, aggregated: the client library reports each dropped message on its own (NATS trap 6)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from talaria_common.errors import BusError

log = structlog.get_logger(__name__)

WINDOW_S = 1.0
"""At most one report per kind in this time."""


class BusFaultError(BusError):
    """Something went wrong that no call can raise: messages dropped, a permission refused, a handler failed.

    `fault` groups them ("slow_consumer", "permission", "handler", "connection", "client"); `count` is how often this
    one happened since the last report of its kind, `cause` the first exception.
    """

    def __init__(self, kind: str, message: str, count: int = 1, cause: Exception | None = None) -> None:
        super().__init__(message)
        self.fault = kind
        self.count = count
        self.cause = cause


class FaultReporter:
    """Reports the first fault of a kind at once, and what follows within a second as one more report with its count.

    A kind is (kind, where): faults on different subjects do not hide each other.
    """

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        self._callbacks: list[Callable[[Exception], None]] = []
        self._held: dict[tuple[str, str], tuple[int, str, Exception | None]] = {}
        self._timers: dict[tuple[str, str], asyncio.TimerHandle] = {}

    def add(self, callback: Callable[[Exception], None]) -> None:
        """Also tell `callback`."""
        self._callbacks.append(callback)

    def report(self, kind: str, where: str, message: str, cause: Exception | None = None) -> None:
        """A fault happened; `where` is the subject or the like."""
        key = (kind, where)
        if key in self._timers:
            count = self._held[key][0] if key in self._held else 0
            self._held[key] = (count + 1, message, cause)
            return
        self._timers[key] = asyncio.get_running_loop().call_later(self._window_s, self._window_over, key)
        self._tell(BusFaultError(kind, message, 1, cause))

    def close(self) -> None:
        """Report what is held and forget the timers."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        for (kind, _), (count, message, cause) in self._held.items():
            self._tell(BusFaultError(kind, message, count, cause))
        self._held.clear()

    def _window_over(self, key: tuple[str, str]) -> None:
        del self._timers[key]
        held = self._held.pop(key, None)
        if held is not None:
            count, message, cause = held
            self._timers[key] = asyncio.get_running_loop().call_later(self._window_s, self._window_over, key)
            self._tell(BusFaultError(key[0], message, count, cause))

    def _tell(self, fault: BusFaultError) -> None:
        log.warning("bus fault", fault=fault.fault, message=fault.message, count=fault.count, exc_info=fault.cause)
        for callback in self._callbacks:
            try:
                callback(fault)
            except Exception:
                log.exception("an on_error callback failed")
