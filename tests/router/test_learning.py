"""What goes beyond the paper: tau learnt per class, and prefixes that sessions share."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from talaria_router.gaps import ENOUGH, Gaps
from talaria_router.messages import Dirty, Lost
from talaria_router.sessions import key_of
from talaria_router.shared import HOLDERS
from tests.router.rig import M, Rig, model, only

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

    def test_the_parents_instance_is_a_hint_that_later_sessions_do_not_push_out(self):
        rig = self.rig()
        for n in range(HOLDERS):
            rig.state.shared.computed(("t", "m", "sys"), f"i{n}", f"i{n}-1", 1)
        assert rig.placed("other", prefix_id="sys", prefix_bytes=320).iid == "b"
        assert rig.placed("sub", parent_session="s1", prefix_id="sys", prefix_bytes=320).iid == "a"
        shown = rig.events("route")[-1].data["candidates"]
        assert {c["iid"]: c.get("reused", 0) for c in shown} == {"a": 80, "b": 0}

    def test_unless_it_began_its_prompt_otherwise_or_its_kv_is_gone(self):
        rig = self.rig()
        assert rig.placed("sub", parent_session="s1", prefix_id="another", prefix_bytes=320).iid == "b"
        rig = self.rig()
        rig.view(rig.snapshot("a", (model(running=2, kv_epoch=2),)), rig.snapshot("b"))
        assert rig.placed("sub", parent_session="s1", prefix_id="sys", prefix_bytes=320).iid == "b"

    def test_few_holders_are_remembered(self):
        rig = Rig()
        rig.view(*(rig.snapshot(f"i{n}") for n in range(9)), full=True)
        for n in range(9):
            rig.state.shared.computed(("t", "m", "sys"), f"i{n}", f"i{n}-1", 1)
        found = rig.state.shared.holders(("t", "m", "sys"), rig.state.cluster)
        assert found == {f"i{n}" for n in range(9 - HOLDERS, 9)}


class TestSubAgents:
    """They are over when the session is that began them."""

    def rig(self) -> Rig:
        rig = Rig(catalog=frozenset({"m", "other"}))
        both = (model(), model("other", "host"))
        rig.view(rig.snapshot("a", both), rig.snapshot("b", both), full=True)
        rig.complete(rig.placed("parent"), "parent")
        for session, parent in (("sub", "parent"), ("grandchild", "sub"), ("elsewhere", "somebody")):
            rig.complete(rig.placed(session, parent_session=parent), session)
        rig.complete(rig.placed("sub", model="other", parent_session="parent"), "sub", model="other")
        return rig

    def test_their_leases_and_records_end_with_it(self):
        rig = self.rig()
        assert rig.books.live == 5
        final = rig.complete(rig.placed("parent", session_final=True), "parent", session_final=True)
        assert rig.books.live == 1, "another's sub-agent goes on"
        assert rig.books.discarded["final"] == 3
        over = [key_of("t", *of)[0] for of in (("parent", M), ("sub", M), ("grandchild", M), ("sub", "other"))]
        assert {d.key for d in only(final, Dirty)} >= set(over)
        assert all(rig.core.record(key) is None for key in over)
        assert rig.entry("elsewhere") is not None

    def test_whoever_owns_the_parents_partition(self):
        rig = self.rig()
        final = rig.completion(rig.placed("parent"), "parent", session_final=True)
        rig.do(Lost(key_of("t", "parent", M)[1]))
        rig.do(final)
        assert rig.entry("sub") is None

    def test_one_that_was_restored_is_known_again_when_it_asks(self):
        rig = self.rig()
        rig.entry("sub").parent = ""
        rig.state.sessions._children.clear()
        rig.placed("sub", parent_session="parent")
        rig.complete(rig.placed("parent"), "parent", session_final=True)
        assert rig.entry("sub") is None

    def test_evicted_ones_leave_nothing_behind(self):
        rig = self.rig()
        rig.later(3601)
        assert len(rig.state.sessions) == 0
        assert not rig.state.sessions._children

    def test_a_session_that_names_itself_does_no_harm(self):
        rig = self.rig()
        for session, parent in (("x", "y"), ("y", "x"), ("z", "z")):
            rig.complete(rig.placed(session, parent_session=parent), session)
        for session in ("x", "z"):
            rig.complete(rig.placed(session), session, session_final=True)
            assert rig.entry(session) is None
        assert rig.entry("y") is None
