from __future__ import annotations

import asyncio

import pytest

from talaria_common import ticker as ticker_module
from talaria_common.clock import SystemClock
from talaria_common.ticker import every


class Loop:
    """Virtual time under the ticker: sleeping moves it, and steps may take time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(ticker_module.asyncio, "get_running_loop", lambda: self)
        monkeypatch.setattr(ticker_module.asyncio, "sleep", self.sleep)

    def time(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds


async def ticks(loop: Loop, costs: list[float], *, at_once: bool = True) -> list[float]:
    """When the ticker ticked, its steps taking `costs`."""
    at: list[float] = []

    def step() -> None:
        if len(at) == len(costs):
            raise StopAsyncIteration
        at.append(loop.now - 100.0)
        loop.now += costs[len(at) - 1]

    with pytest.raises((StopAsyncIteration, RuntimeError)):
        await every(1.0, step, at_once=at_once)
    return at


async def test_ticks_do_not_drift(monkeypatch: pytest.MonkeyPatch):
    assert await ticks(Loop(monkeypatch), [0.3, 0.2, 0.9, 0.0]) == pytest.approx([0, 1, 2, 3])


async def test_a_stall_skips_ticks_and_stays_on_the_grid(monkeypatch: pytest.MonkeyPatch):
    assert await ticks(Loop(monkeypatch), [0.1, 3.5, 0.1, 0.1]) == pytest.approx([0, 1, 5, 6])


async def test_the_first_tick_may_wait(monkeypatch: pytest.MonkeyPatch):
    assert await ticks(Loop(monkeypatch), [0, 0], at_once=False) == pytest.approx([1, 2])


async def test_steps_may_be_coroutines_and_their_failures_end_it():
    calls = 0

    async def step() -> None:
        nonlocal calls
        calls += 1
        await asyncio.sleep(0)
        if calls == 3:
            raise ValueError("enough")

    with pytest.raises(ValueError, match="enough"):
        await every(0.001, step)
    assert calls == 3


async def test_the_system_clock_is_resynchronised(monkeypatch: pytest.MonkeyPatch):
    clock = SystemClock()
    clock._offset -= 1000

    def step() -> None:
        raise ValueError("once")

    with pytest.raises(ValueError, match="once"):
        await every(1, step, clock=clock)
    assert abs(clock.now() - SystemClock().now()) < 1


async def test_a_period_is_more_than_nothing():
    with pytest.raises(ValueError, match="period_s"):
        await every(0, lambda: None)
