from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from talaria_common import clock as clock_module
from talaria_common.clock import ManualClock, SystemClock, from_ms, to_ms


class Times:
    """Stands in for the `time` module."""

    def __init__(self) -> None:
        self.wall, self.steady = 1_700_000_000.0, 50.0

    def time(self) -> float:
        return self.wall

    def monotonic(self) -> float:
        return self.steady


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> Times:
    times = Times()
    monkeypatch.setattr(clock_module, "time", times)
    return times


def test_it_starts_at_the_wall_clock_and_follows_the_steady_one(times: Times):
    clock = SystemClock()
    assert clock.now() == times.wall
    times.steady += 2
    times.wall += 1000  # an operator sets the clock
    assert clock.now() == 1_700_000_002.0


def test_resync_follows_the_wall_clock_forward(times: Times):
    clock = SystemClock()
    times.wall += 5
    assert clock.resync() == 5
    assert clock.now() == times.wall


@given(steps=st.lists(st.tuples(st.floats(0, 10), st.floats(-20, 20), st.booleans()), max_size=30))
def test_it_never_goes_backwards(steps: list[tuple[float, float, bool]]):
    with pytest.MonkeyPatch.context() as patch:
        times = Times()
        patch.setattr(clock_module, "time", times)
        clock = SystemClock()
        last = clock.now()
        for forward, jump, resync in steps:
            times.steady += forward
            times.wall += forward + jump
            if resync:
                clock.resync()
            assert clock.now() >= last
            last = clock.now()


def test_after_a_backward_step_it_waits_and_then_agrees_again(times: Times):
    clock = SystemClock()
    clock.now()
    times.wall -= 3
    clock.resync()
    assert clock.now() == 1_700_000_000.0
    times.wall += 10
    times.steady += 10
    assert clock.now() == times.wall


def test_the_manual_clock_moves_only_when_told():
    clock = ManualClock(100.0)
    assert (clock.now(), clock.advance(1.5), clock.now()) == (100.0, 101.5, 101.5)
    with pytest.raises(ValueError, match="backwards"):
        clock.advance(-0.1)


@given(st.integers(0, 10**14))
def test_milliseconds_survive_the_round_trip(ms: int):
    assert to_ms(from_ms(ms)) == ms
