"""A heartbeat: called at a steady pace, without drift and without a pile-up after a stall."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from talaria_common.clock import Clock, SystemClock


async def every(
    period_s: float, step: Callable[[], Awaitable[None] | None], *, clock: Clock | None = None, at_once: bool = True
) -> None:
    """Call `step` every `period_s` seconds until cancelled.

    Ticks stand on a fixed grid of the loop's monotonic time. A step that takes longer than a period, or a loop that
    stood still, skips the ticks it missed: heartbeats that come in a burst would say nothing.

    Args:
        period_s: seconds between ticks.
        step: a function or a coroutine function; its exceptions end the ticker.
        clock: resynchronised before each tick if it is a SystemClock, so that its UTC follows the machine's.
        at_once: tick now, not after the first period.
    """
    if period_s <= 0:
        raise ValueError(f"period_s = {period_s}: expected more than 0")
    loop = asyncio.get_running_loop()
    due = loop.time() if at_once else loop.time() + period_s
    while True:
        await asyncio.sleep(max(0.0, due - loop.time()))
        if isinstance(clock, SystemClock):
            clock.resync()
        result = step()
        if result is not None:
            await result
        due += period_s * max(1, -int((due - loop.time()) // period_s))
