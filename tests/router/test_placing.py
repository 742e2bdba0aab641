"""Asking for a place: idempotence, attempts, the overlay, verdicts."""

from __future__ import annotations

import pytest

from talaria_common.clock import from_ms, to_ms
from talaria_common.ids import partition_of
from talaria_common.wire import Placement, Verdict
from talaria_common.wire.error import from_info
from talaria_router.messages import Gained, Lost
from tests.router.rig import Rig, model, outcome, seen


@pytest.fixture
def rig() -> Rig:
    rig = Rig()
    rig.view(rig.snapshot("a"), rig.snapshot("b"), full=True)
    return rig


def test_asked_again_the_answer_is_the_same_and_counts_once(rig: Rig):
    request = rig.request()
    first = rig.send(request)
    assert rig.send(request) == first
    assert rig.load[0] == 1
    assert len(rig.events("route")) == 1


def test_the_next_attempt_frees_the_first_and_avoids_the_excluded(rig: Rig):
    request = rig.request()
    first = rig.send(request)
    second = rig.send(rig.request(rid=request.rid, attempt=1, exclude=(first.iid,)))
    assert isinstance(second, Placement)
    assert second.iid != first.iid
    assert (second.via, second.fence.attempt) == ("retry", 1)
    assert rig.load[0] == 1
    late = rig.send(request)
    assert isinstance(late, Verdict)
    assert late.reason == "expired", "the first attempt may not come back"
    assert rig.load[0] == 1


def test_fence_and_numbers(rig: Rig):
    got = [rig.placed(f"s{i}") for i in range(6)]
    for i, p in enumerate(got):
        partition = partition_of("t", f"s{i}", "m")
        assert (p.fence.partition, p.fence.owner_rev) == (partition, 1000 + partition)
        assert (p.router, p.router_epoch) == ("r0", "e0")
    for iid in "ab":
        seqs = [p.seq for p in got if p.iid == iid]
        assert seqs == list(range(1, len(seqs) + 1))


def test_calls_in_flight_spread_over_equal_instances(rig: Rig):
    """Polled load alone would herd all of a heartbeat's calls to one."""
    got = [rig.placed(f"s{i}").iid for i in range(40)]
    assert abs(got.count("a") - got.count("b")) <= 1


class TestOverlay:
    def test_a_completion_ends_it(self, rig: Rig):
        p = rig.placed()
        rig.complete(p)
        assert rig.load == (0, 0, 1)
        rig.later(2)
        assert rig.load == (0, 0, 0)

    def test_a_snapshot_drops_exactly_what_it_counts(self, rig: Rig):
        rig.view(rig.snapshot("b", status="draining"))
        for i in range(5):
            rig.placed(f"s{i}")
        rig.view(rig.snapshot("a", seen=seen(4, 2)))
        assert rig.load[0] == 2, "number 2 and number 5 have not arrived there"
        rig.view(rig.snapshot("a", seen={"r0/earlier-life": seen(9)["r0/e0"]}))
        assert rig.load[0] == 2, "another life's numbers mean nothing"

    def test_not_taken_up_it_leaves_by_its_deadline(self, rig: Rig):
        p = rig.placed()
        assert from_ms(p.accept_by_ms) == pytest.approx(rig.now + 2.0, abs=0.002)
        rig.later(2.4)
        assert rig.load[0] == 1
        rig.later(0.2)
        assert rig.load == (0, 0, 0)
        assert rig.state.counts.not_taken_up == 1

    def test_asked_again_after_that_it_is_placed_anew(self, rig: Rig):
        request = rig.request()
        first = rig.send(request)
        rig.later(3)
        rig.view(rig.snapshot("a"), rig.snapshot("b"))
        again = rig.send(request)
        assert isinstance(again, Placement)
        assert (again.iid, again.seq) != (first.iid, first.seq)
        assert rig.load[0] == 1

    def test_placed_twice_for_one_attempt_it_ends_once(self, rig: Rig):
        """The first was taken up after all, at the last moment, and every snapshot since was lost."""
        request = rig.request()
        first = rig.send(request)
        rig.later(4)
        rig.view(rig.snapshot("a"), rig.snapshot("b"))
        assert isinstance(rig.send(request), Placement)
        rig.complete(first)
        assert rig.load[0] == 0
        assert rig.refused(rid=request.rid).reason == "expired"

    def test_a_call_that_ended_is_load_no_more(self, rig: Rig):
        rig.view(rig.snapshot("b", status="draining"))
        rig.view(rig.snapshot("a", (model(max_running=1),), max_queued=1))
        p = rig.placed("x")
        rig.placed("y")
        assert rig.refused("z").reason == "overloaded"
        rig.view(rig.snapshot("a", (model(max_running=1, running=1, queued=1),), max_queued=1, seen=seen(2)))
        assert rig.refused("z").reason == "overloaded"
        rig.clock.advance(0.01)
        rig.complete(p, "x")
        assert isinstance(rig.ask("z"), Placement), "before the next snapshot says so"
        rig.view(rig.snapshot("a", (model(max_running=1, running=1),), max_queued=1, seen=seen(3)))
        assert isinstance(rig.ask("w"), Placement), "and the offset does not outlive that snapshot"
        assert rig.refused("v").reason == "overloaded"

    def test_an_instance_that_is_gone_takes_its_overlay_along(self, rig: Rig):
        p = rig.placed()
        rig.view(full=True, removed=(p.iid,))
        assert rig.load[0] == 0
        rig.view(rig.snapshot(p.iid, epoch="new"), full=True)
        later = [q.seq for q in (rig.placed(f"n{i}") for i in range(6)) if q.iid == p.iid]
        assert later
        assert min(later) > p.seq, "no number is used twice"


class TestVerdicts:
    def status(self, v: Verdict) -> int:
        return from_info(v.error).status

    def test_a_model_outside_the_catalog(self, rig: Rig):
        v = rig.refused(model="nope")
        assert (v.reason, self.status(v), v.error.param) == ("unknown_model", 404, "model")

    def test_a_model_that_an_instance_lists_is_in_the_catalog(self):
        rig = Rig(catalog=frozenset())
        rig.view(rig.snapshot("a"), full=True)
        assert isinstance(rig.ask(), Placement)

    def test_nobody_serves_it(self, rig: Rig):
        v = rig.refused(model="other")
        assert (v.reason, self.status(v)) == ("no_instance", 503)

    @pytest.mark.parametrize("status", ["starting", "draining", "failed"])
    def test_nobody_is_fit(self, rig: Rig, status: str):
        rig.view(rig.snapshot("a", status=status), rig.snapshot("b", status=status))
        v = rig.refused()
        assert v.reason == "no_instance"
        assert f"2 {status}" in v.error.message
        assert rig.events("route")[-1].data["rejected"] == {status: 2}

    def test_full_queues(self, rig: Rig):
        full = (model(queued=64, running=8),)
        rig.view(rig.snapshot("a", full), rig.snapshot("b", full))
        v = rig.refused()
        assert (v.reason, self.status(v)) == ("overloaded", 429)
        assert v.error.retry_after_s >= 1
        assert rig.load == (0, 0, 0)
        rig.view(rig.snapshot("b"))
        assert rig.placed().iid == "b", "overload clears by itself"

    def test_the_round_check_and_when_to_come_back(self, rig: Rig):
        busy = (model(queued=10, queued_tokens=14_000),)
        rig.view(rig.snapshot("a", busy), rig.snapshot("b", busy))
        v = rig.refused()
        assert "2 round" in v.error.message
        assert v.error.retry_after_s == pytest.approx(
            (14_000 + 100 + 10 * 128 * 10 * 3 / 8 / 10 - 9000) / 1000, rel=0.2
        )

    def test_a_guess_ranks_but_never_refuses(self, rig: Rig):
        unmeasured = {"prefill_ms_per_token": 0.0, "decode_step_ms": 0.0}
        rig = Rig()
        rig.view(rig.snapshot("a", (model(queued=40, queued_tokens=400_000, **unmeasured),)), full=True)
        assert rig.placed().iid == "a"
        rig.view(rig.snapshot("b", (model(**unmeasured),)))
        assert rig.placed("other").iid == "b"

    def test_a_long_prompt_is_served_late_rather_than_never(self, rig: Rig):
        big = (model(context_tokens=100_000, kv_capacity_tokens=100_000),)
        rig.view(rig.snapshot("a", big), rig.snapshot("b", big))
        assert isinstance(rig.ask(prompt_bytes=200_000), Placement)

    def test_a_prompt_that_fits_nowhere_goes_where_it_is_refused_exactly(self, rig: Rig):
        rig.view(rig.snapshot("b", (model(context_tokens=8192),)))
        p = rig.placed(prompt_bytes=1_000_000)
        assert p.iid == "b", "its context is the longest"

    def test_a_deadline_that_has_passed(self, rig: Rig):
        v = rig.refused(deadline_ms=to_ms(rig.now - 3))
        assert (v.reason, self.status(v)) == ("expired", 504)
        assert isinstance(rig.ask(deadline_ms=to_ms(rig.now - 1)), Placement), "clocks may differ by the tolerance"

    def test_all_excluded(self, rig: Rig):
        assert rig.refused(exclude=("a", "b"), attempt=1).reason == "no_instance"

    def test_not_the_owner(self):
        rig = Rig(own=False)
        rig.view(rig.snapshot("a"), full=True)
        assert rig.refused().reason == "not_owner"
        partition = partition_of("t", "s", "m")
        rig.do(Gained(partition, 7, may_hold=False))
        assert rig.placed().fence.owner_rev == 7
        rig.do(Lost(partition))
        assert rig.refused().reason == "not_owner"


class TestQueue:
    def full(self, **config: object) -> Rig:
        rig = Rig(overload="queue", **config)
        rig.view(rig.snapshot("a", (model(queued=4, running=8),), max_queued=4), full=True)
        return rig

    def test_it_waits_for_room_in_order(self):
        rig = self.full()
        assert [rig.ask(f"s{i}", priority=i == 2) for i in range(3)] == [None] * 3
        effects = rig.view(rig.snapshot("a", (model(queued=3, running=8),), max_queued=4))
        assert outcome(effects).fence.partition == partition_of("t", "s2", "m"), "priority first"
        effects = rig.view(rig.snapshot("a", (model(queued=2, running=8),), max_queued=4, seen=seen(1)))
        assert len([e for e in effects if type(e).__name__ == "Reply"]) == 2

    def test_asked_again_it_keeps_its_place_and_the_last_asker_is_answered(self):
        rig = self.full()
        request = rig.request()
        assert rig.send(request) is None
        rig.later(1)
        rig.view(rig.snapshot("a", (model(queued=4, running=8),), max_queued=4))
        assert rig.send(request) is None
        assert len(rig.state.waiting) == 1

    def test_it_ends_by_the_deadline(self):
        rig = self.full()
        request = rig.request(deadline_ms=to_ms(rig.now + 2))
        assert rig.send(request) is None
        rig.later(1)
        assert rig.send(request) is None
        got = outcome(rig.later(1.01))
        assert got.reason == "expired"
        assert not rig.state.waiting

    def test_an_api_that_stopped_asking_is_forgotten(self):
        rig = self.full()
        rig.ask()
        assert outcome(rig.later(3.1)) is None
        assert not rig.state.waiting

    def test_it_is_bounded(self):
        rig = self.full(queue_max=2)
        assert [rig.ask(f"s{i}") for i in range(2)] == [None, None]
        assert rig.refused("s3").reason == "overloaded"


def test_the_decision_is_told_in_full(rig: Rig):
    many = [rig.snapshot(f"i{n}") for n in range(12)]
    rig.view(*many, rig.snapshot("a", (model(queued=64),)), rig.snapshot("b", status="draining"), full=True)
    p = rig.placed()
    data = rig.events("route")[-1].data
    assert (data["rid"], data["iid"], data["via"], data["lease"]) == (p.fence.rid, p.iid, "cost", "none")
    assert data["view"] == rig.view_version
    assert data["rejected"] == {"queue": 1, "draining": 1}
    assert [c.get("rejected", "") for c in data["candidates"]] == ["", "", "", "queue"]
    assert data["candidates"][0]["iid"] == p.iid
    for c in data["candidates"]:
        assert c["total_ms"] == pytest.approx(c["req_ms"] + c["kv_ms"] + c["act_ms"])
