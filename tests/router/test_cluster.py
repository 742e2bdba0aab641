"""Stale, duplicated, reordered and lost views and snapshots; a telemetry that dies."""

from __future__ import annotations

import pytest

from talaria_common.wire import Placement
from talaria_router.messages import Follow, Heard
from tests.router.rig import Rig, model, only, outcome, seen


@pytest.fixture
def rig() -> Rig:
    rig = Rig()
    rig.view(rig.snapshot("a"), full=True)
    return rig


def beat(rig: Rig, *iids: str, seconds: float = 0.5) -> None:
    """Time passes, and a view with these instances comes."""
    rig.clock.advance(seconds)
    rig.view(*(rig.snapshot(i) for i in iids))
    rig.later(0)


def test_three_missed_heartbeats_make_it_stale(rig: Rig):
    for _ in range(3):
        beat(rig)
        assert isinstance(rig.ask(), Placement)
    beat(rig, seconds=0.01)
    v = rig.refused("x")
    assert v.reason == "no_instance"
    assert rig.events("route")[-1].data["rejected"] == {"stale": 1}
    beat(rig, "a")
    assert isinstance(rig.ask("y"), Placement), "it recovers with the next snapshot"


def test_the_age_that_telemetry_reports_counts(rig: Rig):
    rig.view(rig.snapshot("a"), age_ms=1600)
    assert rig.refused().reason == "no_instance"


@pytest.mark.parametrize("health", ["stale", "gone"])
def test_telemetrys_word_counts(rig: Rig, health: str):
    rig.view(rig.snapshot("a"), health=health)
    assert rig.events("route") == []
    assert rig.refused().reason == "no_instance"
    assert rig.events("route")[-1].data["rejected"] == {health: 1}


def test_a_duplicated_view_changes_nothing(rig: Rig):
    rig.view(rig.snapshot("a", (model(queued=5),)), version=9)
    rig.view(rig.snapshot("a", (model(queued=0),)), version=9)
    assert rig.state.cluster.get("a").models["m"].queued == 5


def test_a_reordered_snapshot_changes_nothing(rig: Rig):
    old = rig.snapshot("a", (model(queued=5),))
    new = rig.snapshot("a", (model(queued=1),))
    rig.view(new)
    rig.view(old)
    assert rig.state.cluster.get("a").models["m"].queued == 1


def test_a_lost_delta_costs_only_what_it_said_of_membership(rig: Rig):
    rig.view(rig.snapshot("b"))
    rig.view_version += 1  # "b was removed" never arrived
    rig.view(rig.snapshot("a", (model(queued=3),)))
    assert rig.state.cluster.get("a").models["m"].queued == 3
    assert rig.state.cluster.gaps == 1
    rig.clock.advance(2)
    rig.view(rig.snapshot("a"), full=True)
    assert rig.state.cluster.get("b") is None


def test_a_new_life_of_an_instance_supersedes_the_old_and_late_messages_do_not_return(rig: Rig):
    late = rig.snapshot("a", version=50)
    rig.clock.advance(0.1)
    rig.view(rig.snapshot("a", epoch="life-2", version=1))
    rig.view(late)
    assert rig.state.cluster.get("a").snapshot.epoch == "life-2"


def test_a_new_life_whose_clock_was_set_back_is_believed_once_the_old_is_stale(rig: Rig):
    back = {"epoch": "life-2", "version": 1, "at_ms": 5}
    rig.view(rig.snapshot("a", **back))
    assert rig.state.cluster.get("a").snapshot.epoch == "a-1"
    rig.clock.advance(1.6)
    rig.view(rig.snapshot("a", **back))
    assert rig.state.cluster.get("a").snapshot.epoch == "life-2"


class TestTelemetryDies:
    def test_the_router_listens_itself_and_no_call_is_refused(self, rig: Rig):
        follows = []
        for i in range(60):
            rig.clock.advance(0.1)
            if rig.state.cluster.following and i % 5 == 0:
                rig.do(rig.snapshot("a", seen=seen(i)))
            follows += only(rig.later(0), Follow)
            assert isinstance(rig.ask(f"s{i}"), Placement), f"after {i / 10} s"
        assert follows == [Follow(True)]

    def test_an_instance_that_dies_with_it_is_found_out(self, rig: Rig):
        rig.view(rig.snapshot("b"))
        for i in range(40):
            rig.later(0.1)
            if rig.state.cluster.following and i % 5 == 0:
                rig.do(rig.snapshot("b"))
        assert rig.state.cluster.health("a", rig.now) == "stale"
        assert rig.placed().iid == "b"

    def test_one_that_was_stale_before_is_not_excused(self, rig: Rig):
        rig.view(rig.snapshot("b"))
        for _ in range(4):
            beat(rig, "b")
        rig.later(0.8)
        assert rig.state.cluster.health("a", rig.now) == "stale"
        assert rig.state.cluster.health("b", rig.now) == "ok"

    def test_it_comes_back(self, rig: Rig):
        rig.later(0.8)
        assert rig.state.cluster.following
        rig.view(rig.snapshot("a"), epoch="te2", version=3)
        assert only(rig.later(0.01), Follow) == [], "a delta alone may lack instances"
        rig.view(rig.snapshot("a"), full=True, epoch="te2", version=4)
        assert only(rig.later(0.01), Follow) == [Follow(False)]
        assert isinstance(rig.ask(), Placement)


class TestSeveralTelemetries:
    """Each sends its own versions of the same picture; the newest snapshot counts, whoever brought it."""

    def beat(self, rig: Rig, *names: str, full: bool = False) -> None:
        rig.clock.advance(0.5)
        a = rig.snapshot("a")
        for name in names:
            rig.view(a, telemetry=name, epoch=f"{name}-1", full=full)
        rig.later(0)

    def test_one_is_enough(self, rig: Rig):
        self.beat(rig, "t0", "t1", full=True)
        for n in range(20):
            self.beat(rig, "t1")
            assert isinstance(rig.ask(f"s{n}"), Placement)
        assert only(rig.effects, Follow) == []

    def test_one_that_hears_less_takes_nothing_away(self, rig: Rig):
        """It has just started, or is cut off: it knows nobody, or only old snapshots."""
        for n in range(10):
            rig.clock.advance(0.5)
            new, old = rig.snapshot("a", (model(queued=n),)), rig.snapshot("a", version=1)
            rig.view(new, telemetry="t0", epoch="t0-1")
            rig.view(telemetry="t1", epoch="t1-1", full=True)
            rig.view(old, telemetry="t2", epoch="t2-1", health="gone")
            assert rig.state.cluster.get("a").models["m"].queued == n
            assert rig.state.cluster.health("a", rig.now) == "ok"

    def test_one_that_never_told_all_and_died_keeps_nobody_following(self, rig: Rig):
        rig.view(rig.snapshot("a"), telemetry="t1", epoch="t1-1")
        rig.later(0.8)
        assert rig.state.cluster.following
        for _ in range(4):
            self.beat(rig, "t0", full=True)
        assert not rig.state.cluster.following


class TestJustStarted:
    """A router that knows no instance yet keeps its callers a moment instead of refusing them."""

    def test_until_the_first_full_view(self):
        rig = Rig()
        assert rig.ask() is None
        assert isinstance(outcome(rig.view(rig.snapshot("a"), full=True)), Placement)

    def test_deltas_alone_need_a_heartbeat_to_gather(self):
        rig = Rig()
        assert rig.ask() is None
        assert outcome(rig.view(rig.snapshot("b", ()))) is None
        rig.clock.advance(0.5)
        assert outcome(rig.view(rig.snapshot("a"))) is None
        assert outcome(rig.later(0.2)).iid == "a"

    def test_snapshots_alone_too(self):
        rig = Rig()
        assert only(rig.later(0.1), Follow) == [Follow(True)]
        assert rig.ask() is None
        rig.do(rig.snapshot("a"))
        assert isinstance(outcome(rig.later(0.7)), Placement)

    def test_but_not_for_ever(self):
        rig = Rig()
        assert rig.ask() is None
        assert outcome(rig.later(1.5)).reason == "no_instance"


def test_an_instance_listed_and_removed_in_one_view_is_gone(rig: Rig):
    rig.view(rig.snapshot("a", (model(queued=1),)), rig.snapshot("b"), removed=("a",))
    assert rig.state.cluster.get("a") is None
    assert rig.ask().iid == "b"


def test_silence_of_the_bus_is_nobodys_silence(rig: Rig):
    rig.view(rig.snapshot("a"), rig.snapshot("dead"))
    for _ in range(4):
        beat(rig, "a")
    rig.do(Heard(connected=False))
    rig.later(30.0)
    rig.do(Heard(connected=True))
    rig.later(1.4)
    assert rig.ask("x").iid == "a"
    assert rig.events("route")[-1].data["rejected"] == {"stale": 1}
    rig.later(0.2)
    assert rig.refused("y").reason == "no_instance", "it has had time to speak"


def test_a_bus_that_comes_and_goes(rig: Rig):
    for connected in (False, True, False):
        rig.later(1.0)
        rig.do(Heard(connected=connected))
    rig.later(5.0)
    assert isinstance(rig.ask("x"), Placement)
