"""Ending tasks for certain."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

AGAIN_S = 0.1


async def end(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel `tasks` and return when all have ended, whatever they raise.

    Cancels again until they have: before Python 3.12, `asyncio.wait_for` (the bus client waits for every answer with
    it) swallows a cancellation that comes in the same turn of the loop as the answer, and a loop around it lives on.
    """
    left = {task for task in tasks if task is not asyncio.current_task()}
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=AGAIN_S)
