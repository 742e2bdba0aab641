"""A call whose instances are all unfit for a while waits for one to be well, within its patience (DESIGN 10)."""

from __future__ import annotations

import pytest

from talaria_common.wire import Placement
from tests.router.rig import Rig, model, outcome

PATIENCE = 5.0


@pytest.fixture
def rig() -> Rig:
    rig = Rig(patience_s=PATIENCE, ask_again_s=60.0)
    rig.view(rig.snapshot("a"), full=True)
    return rig


def beats(rig: Rig, seconds: float, **more: object) -> Placement | object | None:
    """Time passes with a view of `a` each heartbeat; the first answer that comes."""
    for _ in range(round(seconds / 0.5)):
        rig.clock.advance(0.5)
        got = outcome(rig.view(rig.snapshot("a", **more))) or outcome(rig.later(0))
        if got is not None:
            return got
    return None


def test_a_stale_instance_is_waited_for(rig: Rig) -> None:
    rig.view(health="stale")
    rig.clock.advance(1.6)
    rig.view()
    assert rig.ask() is None
    assert outcome(rig.later(0.5)) is None
    rig.clock.advance(0.1)
    placed = outcome(rig.view(rig.snapshot("a")))
    assert isinstance(placed, Placement)
    assert rig.events("route")[-1].data["waited_ms"] == pytest.approx(600, abs=1)


@pytest.mark.parametrize("status", ["starting", "failed"])
def test_one_that_is_getting_up_is_waited_for(rig: Rig, status: str) -> None:
    rig.view(rig.snapshot("a", status=status))
    assert rig.ask() is None
    assert beats(rig, 2.0, status=status) is None
    assert isinstance(beats(rig, 0.5), Placement)


def test_patience_ends_in_a_refusal_that_says_why(rig: Rig) -> None:
    rig.view(rig.snapshot("a", status="failed"))
    assert rig.ask() is None
    assert beats(rig, PATIENCE - 0.5, status="failed") is None
    verdict = beats(rig, 1.0, status="failed")
    assert verdict is not None
    assert (verdict.reason, verdict.error.retry_after_s) == ("no_instance", 1)
    assert "1 failed" in verdict.error.message
    assert rig.state.waiting == {}


@pytest.mark.parametrize("status", ["draining"])
def test_one_that_leaves_is_not(rig: Rig, status: str) -> None:
    rig.view(rig.snapshot("a", status=status))
    assert rig.refused().reason == "no_instance"


def test_a_model_that_failed_is_not(rig: Rig) -> None:
    rig.view(rig.snapshot("a", (model(state="failed"),)))
    assert rig.refused().reason == "no_instance"


class TestExcluded:
    def test_the_only_instance_is_forgiven_once_it_had_time_to_be_found_dead(self, rig: Rig) -> None:
        p = rig.placed()
        again = rig.request(rid=p.fence.rid, attempt=1, exclude=("a",), recovering=("a",))
        assert rig.send(again) is None
        assert beats(rig, 1.5) is None
        placed = beats(rig, 1.0)
        assert isinstance(placed, Placement)
        assert (placed.iid, placed.fence.attempt) == ("a", 1)

    def test_but_not_while_it_is_unwell(self, rig: Rig) -> None:
        p = rig.placed()
        assert rig.send(rig.request(rid=p.fence.rid, attempt=1, exclude=("a",), recovering=("a",))) is None
        assert beats(rig, 4.0, status="failed") is None
        assert isinstance(beats(rig, 0.5), Placement)

    def test_another_goes_first(self, rig: Rig) -> None:
        rig.view(rig.snapshot("b"))
        p = rig.placed()
        other = {"a": "b", "b": "a"}[p.iid]
        got = rig.send(rig.request(rid=p.fence.rid, attempt=1, exclude=(p.iid,), recovering=(p.iid,)))
        assert isinstance(got, Placement)
        assert got.iid == other

    def test_one_that_was_full_is_not_waited_for(self, rig: Rig) -> None:
        p = rig.placed()
        verdict = rig.send(rig.request(rid=p.fence.rid, attempt=1, exclude=("a",)))
        assert verdict is not None
        assert verdict.reason == "no_instance"

    def test_a_call_that_nothing_failed_does_not_wait_behind_one_that_must(self, rig: Rig) -> None:
        rig.view(rig.snapshot("a", status="failed"))
        p = rig.request("x", attempt=1, exclude=("a",), recovering=("a",))
        assert rig.send(p) is None
        assert rig.ask("y") is None
        placed = beats(rig, 0.5)
        assert isinstance(placed, Placement)
        assert placed.fence.rid != p.rid
        assert len(rig.state.waiting) == 1


def test_the_queue_is_bounded() -> None:
    rig = Rig(patience_s=PATIENCE, queue_max=2)
    rig.view(rig.snapshot("a", status="starting"), full=True)
    assert rig.ask("x") is None
    assert rig.ask("y") is None
    assert rig.refused("z").reason == "no_instance"


def test_who_does_not_ask_again_is_dropped() -> None:
    rig = Rig(patience_s=PATIENCE)
    rig.view(rig.snapshot("a", status="starting"), full=True)
    assert rig.ask() is None
    beats(rig, 4.0, status="starting")
    assert rig.state.waiting == {}
