"""What goes beyond the paper: tau learnt per class, and prefixes that sessions share."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from talaria_router.gaps import ENOUGH, Gaps
from talaria_router.shared import HOLDERS
from tests.router.rig import Rig, model

A, B = ("t", "m"), ("u", "m")


def learnt(gaps_s: list[float], *, most_s: float = 5.0, completed: int | None = None) -> float:
    gaps = Gaps(1.0, most_s)
    for _ in range(len(gaps_s) if completed is None else completed):
        gaps.completed(A)
    for gap in gaps_s:
        gaps.returned(A, gap)
    return gaps.tau_s(A)


class TestTau:
    def test_fixed_by_default_and_until_enough_was_seen(self):
        assert learnt([0.1] * 100, most_s=0.0) == 1.0
        assert learnt([0.1] * (ENOUGH - 1)) == 1.0

    def test_short_gaps_make_short_leases_and_long_ones_long(self):
        assert 0.2 <= learnt([0.2] * 50) < 0.3
        assert 3.0 <= learnt([3.0] * 50) < 4.0

    def test_nine_of_ten_returns_decide(self):
        assert learnt([0.2] * 92 + [4.0] * 8) < 0.3
        assert learnt([0.2] * 85 + [4.0] * 15) >= 4.0

    def test_who_seldom_returns_in_time_gets_the_fixed_one(self):
        assert learnt([30.0] * 90 + [0.2] * 10) == 1.0
        assert learnt([4.0] * 40, completed=400) == 1.0

    def test_classes_are_apart(self):
        gaps = Gaps(1.0, 5.0)
        for _ in range(50):
            gaps.completed(A)
            gaps.returned(A, 0.1)
        assert gaps.tau_s(A) < 0.2
        assert gaps.tau_s(B) == 1.0

    def test_it_follows_a_change(self):
        assert learnt([0.1] * 500 + [3.0] * 3000) >= 3.0

    @given(st.lists(st.floats(0, 1000), max_size=200), st.floats(0.1, 50))
    def test_it_is_bounded(self, gaps_s: list[float], most_s: float):
        assert 0 < learnt(gaps_s, most_s=most_s) <= max(1.0, most_s)

    def test_the_router_reserves_by_it(self):
        rig = Rig(tau_learn_max_s=5.0)
        rig.view(rig.snapshot("a"), full=True)
        for n in range(ENOUGH + 1):
            rig.turn()
            if n < ENOUGH:
                rig.clock.advance(3.0)
                rig.view(rig.snapshot("a"))
        assert rig.entry().lease_until - rig.now > 2.9
        rig.later(2.9)
        rig.view(rig.snapshot("a"))
        assert rig.placed().via == "lease"


class TestSharedPrefix:
    """A new session of the same tenant with the same system prompt: 80 of its 100 tokens may be found."""

    def rig(self, **config: Any) -> Rig:
        rig = Rig(**config)
        rig.view(rig.snapshot("a"), rig.snapshot("b"), full=True)
        first = rig.placed("s1", prefix_id="sys", prefix_bytes=320)
        assert first.iid == "a"
        rig.complete(first, "s1")
        rig.later(2)
        rig.view(rig.snapshot("a", (model(running=2),)), rig.snapshot("b"))
        return rig

    def test_it_attracts_as_far_as_it_saves(self):
        rig = self.rig()
        assert rig.placed("s2", prefix_id="sys", prefix_bytes=320).iid == "a", "80 ms saved, 20 ms of peers"
        shown = rig.events("route")[-1].data["candidates"]
        assert {c["iid"]: c.get("reused", 0) for c in shown} == {"a": 80, "b": 0}
        assert {c["iid"]: c["total_ms"] for c in shown} == {"a": 40.0, "b": 100.0}

    def test_what_is_charged_is_what_will_be_computed_there(self):
        rig = self.rig()
        rig.placed("s2", prefix_id="sys", prefix_bytes=320)
        assert rig.load[1] == 20, "a new session where the common prefix is"
        rig = self.rig()
        rig.view(rig.snapshot("a", status="draining"))
        rig.complete(rig.placed("s2", prefix_id="sys", prefix_bytes=320), "s2", kv_tokens=80)
        rig.later(2)
        rig.view(rig.snapshot("b"))
        assert rig.placed("s1", prefix_id="sys", prefix_bytes=320).iid == "b"
        assert rig.load[1] == 20, "not less the 90 tokens that it left on another instance"

    def test_without_or_with_another_prefix_or_tenant_it_does_not(self):
        rig = self.rig()
        assert rig.placed("s2").iid == "b"
        assert self.rig().placed("s2", prefix_id="other", prefix_bytes=320).iid == "b"
        assert self.rig().placed("s2", prefix_id="sys", prefix_bytes=320, tenant="u").iid == "b"

    def test_forgotten_kv_counts_no_more(self):
        rig = self.rig()
        rig.view(rig.snapshot("a", (model(running=2, kv_epoch=2),)))
        assert rig.placed("s2", prefix_id="sys", prefix_bytes=320).iid == "b"
        rig = self.rig()
        rig.view(rig.snapshot("a", (model(running=2),), epoch="a-2", version=1, at_ms=round(rig.now * 1000) + 1))
        assert rig.placed("s2", prefix_id="sys", prefix_bytes=320).iid == "b"

    def test_preble_exploits_it(self):
        rig = self.rig(policy="prompt-prefix")
        assert rig.placed("s2", prefix_id="sys", prefix_bytes=320).iid == "a"

    def test_sub_agents_with_identical_prefixes_are_sessions_of_their_own(self):
        rig = self.rig()
        one = rig.placed("sub1", parent_session="s1", prefix_id="sys", prefix_bytes=320)
        two = rig.placed("sub2", parent_session="s1", prefix_id="sys", prefix_bytes=320)
        rig.complete(one, "sub1")
        rig.complete(two, "sub2")
        assert rig.books.live == 2
        assert {rig.placed("sub1").via, rig.placed("sub2").via} == {"lease"}

    def test_few_holders_are_remembered(self):
        rig = Rig()
        rig.view(*(rig.snapshot(f"i{n}") for n in range(9)), full=True)
        for n in range(9):
            rig.state.shared.computed(("t", "m", "sys"), f"i{n}", f"i{n}-1", 1)
        found = rig.state.shared.holders(("t", "m", "sys"), rig.state.cluster)
        assert found == {f"i{n}" for n in range(9 - HOLDERS, 9)}
