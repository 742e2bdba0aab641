"""Tasks that will not hear a cancellation the first time."""

from __future__ import annotations

import asyncio

from talaria_common.tasks import end


async def test_a_swallowed_cancellation_is_repeated():
    heard = 0

    async def deaf() -> None:
        nonlocal heard
        while heard < 3:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                heard += 1

    async def fails() -> None:
        raise ValueError("not ours to judge")

    tasks = [asyncio.ensure_future(deaf()), asyncio.ensure_future(fails())]
    await asyncio.sleep(0)
    await end(tasks)
    assert heard == 3
    assert all(t.done() for t in tasks)
    assert isinstance(tasks[1].exception(), ValueError)
