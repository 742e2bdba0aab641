"""Retry-After: not before there is room, spread over the time in which it comes, by what was measured."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from talaria_router.config import Tenant
from talaria_router.returns import MAX_S, MIN_S, Returns
from tests.router.rig import Rig, model

KEY = "8" * 32


def full(**config: object) -> Rig:
    rig = Rig(**config)
    show_full(rig)
    return rig


def show_full(rig: Rig) -> None:
    rig.view(rig.snapshot("a", (model(queued=4, running=8),), max_queued=4), full=True)


def ends(rig: Rig, calls: int, per_s: float) -> None:
    """Calls that ran there end, evenly; those who are told in the meantime know only what has ended."""
    for n in range(calls):
        rig.view(rig.snapshot("a"))
        p = rig.placed(f"old{n}")
        rig.clock.advance(1 / per_s)
        rig.complete(p, f"old{n}", completion_tokens=20)
    show_full(rig)


class TestUnderOverload:
    def test_the_slower_calls_end_the_longer_the_wait(self):
        waits = {}
        for per_s in (0.2, 0.5):
            rig = full()
            ends(rig, 6, per_s)
            waits[per_s] = rig.refused().error.retry_after_s
        assert waits == {0.2: pytest.approx(5.0, rel=0.25), 0.5: pytest.approx(2.0, rel=0.25)}

    def test_a_crowd_comes_back_at_the_rate_at_which_calls_end(self):
        rig = full()
        ends(rig, 40, 4.0)
        waits = [rig.refused(f"s{n}").error.retry_after_s for n in range(80)]
        assert waits == sorted(waits)
        assert waits[-1] == pytest.approx(80 / 4.0, rel=0.1)
        assert max(sum(w <= x < w + 1 for x in waits) for w in waits) <= 6, "4 a second, not all at once"

    def test_who_asks_before_its_turn_keeps_it(self):
        rig = full()
        ends(rig, 40, 4.0)
        first = [rig.refused(f"s{n}").error.retry_after_s for n in range(40)]
        rig.clock.advance(0.5)
        again = [rig.refused(f"s{n}").error.retry_after_s for n in range(40)]
        assert again == [pytest.approx(max(MIN_S, w - 0.5)) for w in first]

    def test_without_an_end_lately_the_profiles_stand_in(self):
        """128 tokens of 10 ms in batches of 8: one ends every 0.16 s."""
        rig = full()
        assert rig.refused().error.retry_after_s == 1.0
        waits = [rig.refused(f"t{n}").error.retry_after_s for n in range(20)]
        assert waits[-1] == pytest.approx(1.0 + 20 * 0.16, abs=0.2)

    def test_a_full_queue_of_ours_is_worked_off_first(self):
        rig = full(overload="queue", queue_max=10)
        ends(rig, 40, 2.0)
        for n in range(10):
            assert rig.ask(f"w{n}") is None
        assert rig.refused("late").error.retry_after_s == pytest.approx(5.0, rel=0.1)


class TestTenants:
    def test_at_its_limit_by_how_its_own_calls_end(self):
        rig = Rig(tenant=Tenant(max_in_flight=1))
        for n in range(5):
            rig.view(rig.snapshot("a"), full=True)
            p = rig.placed(f"old{n}")
            rig.clock.advance(4.0)
            rig.view(rig.snapshot("a"))
            rig.complete(p, f"old{n}")
        rig.placed("s")
        assert rig.refused("late").error.retry_after_s == pytest.approx(4.0, rel=0.3)
        assert rig.refused("later").error.retry_after_s == pytest.approx(8.0, rel=0.3)

    def test_who_leaves_the_queue_for_others_waits_for_its_own_to_go(self):
        rig = full(overload="queue", queue_max=4)
        ends(rig, 20, 1.0)  # of the tenant "t"
        for n in range(4):
            rig.ask(f"g{n}")
        rig.effects.clear()
        rig.ask("m", tenant="modest")
        (verdict,) = [e.data for e in rig.events("route") if e.data.get("verdict")]
        assert verdict["retry_after_s"] == pytest.approx(4.0, rel=0.1)


def test_a_rate_needs_several_ends_and_forgets():
    r = Returns()
    for n in range(3):
        r.ended("m", float(n))
    assert r.per_s("m", 3.0) is None
    r.ended("m", 3.0)
    assert r.per_s("m", 4.0) == pytest.approx(1.0)
    assert r.per_s("m", 32.5) is None, "two of the four are too old"


def test_a_place_uses_the_turn_up():
    r = Returns()
    assert r.after_s("m", KEY, 0.0, 10.0, 1.0) == 10.0
    r.came(KEY)
    assert r.after_s("m", KEY, 1.0, 2.0, 1.0) == 10.0, "a new turn, behind those that were given"


@given(
    st.lists(st.tuples(st.integers(0, 30), st.floats(0, 100), st.floats(0.01, 1000), st.floats(0, 5)), max_size=60),
)
def test_always_within_bounds(asks: list[tuple[int, float, float, float]]):
    r, now = Returns(), 1000.0
    for n, first_s, per_s, later in asks:
        now += later
        assert MIN_S <= r.after_s("m", f"{n * 97 % 256:02x}" * 16, now, first_s, per_s) <= MAX_S
