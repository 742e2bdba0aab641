"""Overload: spill, tenants' limits and shares, signs of life for those who wait, and that it ends by itself."""

from __future__ import annotations

from typing import Any

from talaria_common.ids import partition_of
from talaria_common.wire import Placement, RouteReply
from talaria_router.config import Tenant
from talaria_router.messages import Ask, Effect, Reply
from tests.router.rig import M, Rig, model, only, seen


def full(**config: Any) -> Rig:
    rig = Rig(**config)
    rig.view(rig.snapshot("a", (model(queued=4, running=8),), max_queued=4), full=True)
    return rig


def room_for(rig: Rig, calls: int, taken: int = 0) -> list[Effect]:
    a = rig.snapshot("a", (model(queued=4 - calls, running=8),), max_queued=4, seen=seen(taken) if taken else {})
    return rig.view(a)


def answers(effects: list[Effect]) -> list[RouteReply]:
    return [r.reply for r in only(effects, Reply)]


class TestSpill:
    def busy(self, overload: str, **b: Any) -> Rig:
        rig = Rig(overload=overload)
        a = rig.snapshot("a", (model(queued=30, queued_tokens=20_000),))
        rig.view(a, rig.snapshot("b", (model(**b),)), full=True)
        return rig

    def test_the_least_costly_beyond_the_target(self):
        rig = self.busy("spill", queued=30, queued_tokens=15_000)
        p = rig.placed()
        assert (p.iid, p.via) == ("b", "cost")
        assert rig.state.counts.spilled == 1
        assert rig.events("route")[-1].data["spilled"] is True

    def test_reject_refuses_the_same_call(self):
        assert self.busy("reject", queued=30, queued_tokens=15_000).refused().reason == "overloaded"

    def test_never_where_it_would_be_rejected_or_cannot_fit(self):
        rig = self.busy("spill", queued=64)
        assert rig.placed().iid == "a"
        rig = full(overload="spill")
        assert rig.refused().reason == "overloaded"

    def test_into_a_replica_that_eq2_would_not_open(self):
        rig = self.busy("spill", state="cold", open_ms=60_000.0)
        rig.placed()
        assert rig.state.counts.spilled == 1

    def test_a_call_with_room_is_not_spilled(self):
        rig = self.busy("spill")
        assert rig.placed().iid == "b"
        assert "spilled" not in rig.events("route")[-1].data


class TestClearing:
    def test_with_the_first_snapshot_that_shows_room(self):
        rig = full()
        assert rig.refused().error.retry_after_s >= 1
        room_for(rig, 1)
        assert rig.ask().__class__ is Placement
        assert rig.ask("other").__class__ is not Placement, "one place, one call"

    def test_our_own_charges_end_although_every_completion_is_lost(self):
        rig = Rig()
        rig.view(rig.snapshot("a", max_queued=2), full=True)
        for n in range(10):
            rig.ask(f"s{n}")
        assert rig.refused("late").reason == "overloaded"
        for _ in range(6):
            rig.later(0.5)
            rig.view(rig.snapshot("a", max_queued=2))
        assert rig.load == (0, 0, 0)
        rig.placed("late")

    def test_leases_that_nobody_returns_to_do_not_block_for_longer_than_tau(self):
        rig = Rig(admission_unit_ms=5_000.0)
        rig.view(rig.snapshot("a"), full=True)
        placed = [rig.placed(f"s{n}") for n in range(4)]
        for n, p in enumerate(placed):
            rig.complete(p, f"s{n}")
        rig.view(rig.snapshot("a"))
        rig.later(1.01)
        rig.view(rig.snapshot("a"))
        rig.placed("new")

    def test_a_tenants_limit_ends_with_its_calls_or_their_deadline(self):
        rig = Rig(tenant=Tenant(max_in_flight=1))
        rig.view(rig.snapshot("a"), full=True)
        p = rig.placed("s1")
        assert rig.refused("s2").reason == "overloaded"
        rig.complete(p, "s1")
        rig.placed("s2")
        assert rig.refused("s3").reason == "overloaded"
        for _ in range(70):  # the completion is lost
            rig.later(1)
        rig.view(rig.snapshot("a"))
        rig.placed("s3")


class TestTenants:
    def test_each_has_its_own_limit(self):
        rig = Rig(tenant=Tenant(max_in_flight=1), tenants={"big": Tenant(max_in_flight=2)})
        rig.view(rig.snapshot("a"), full=True)
        got = [rig.ask(f"s{n}", tenant=t).__class__ is Placement for n, t in enumerate(["x", "x", "y", *["big"] * 3])]
        assert got == [True, False, True, True, True, False]

    def test_at_its_limit_a_lease_is_kept(self):
        rig = Rig(tenant=Tenant(max_in_flight=1))
        rig.view(rig.snapshot("a"), full=True)
        rig.turn("s1")
        rig.placed("s2")
        assert rig.refused("s1").reason == "overloaded"
        assert rig.books.live == 1

    def test_a_retry_is_the_same_call(self):
        rig = Rig(tenant=Tenant(max_in_flight=1))
        rig.view(rig.snapshot("a"), rig.snapshot("b"), full=True)
        p = rig.placed()
        again = rig.request(rid=p.fence.rid, attempt=1, exclude=(p.iid,))
        assert rig.send(again).__class__ is Placement
        assert rig.state.calls.in_flight == {"t": 1}

    def test_with_a_queue_it_waits_for_its_own_calls(self):
        rig = Rig(tenant=Tenant(max_in_flight=1), overload="queue")
        rig.view(rig.snapshot("a"), full=True)
        p = rig.placed("s1")
        assert rig.ask("s2") is None
        (reply,) = answers(rig.complete(p, "s1"))
        assert reply.placement is not None

    def test_the_one_with_less_in_flight_is_next(self):
        rig = full(overload="queue")
        for n in range(3):
            rig.ask(f"greedy{n}", tenant="greedy")
        rig.ask("modest", tenant="modest")
        room_for(rig, 1)
        assert rig.state.calls.in_flight == {"greedy": 1}, "equal loads: the oldest"
        room_for(rig, 1, taken=1)
        assert rig.state.calls.in_flight == {"greedy": 1, "modest": 1}

    def test_turns_are_by_weight(self):
        rig = full(overload="queue", tenants={"gold": Tenant(weight=3.0)})
        for n in range(12):
            rig.ask(f"g{n}", tenant="gold")
            rig.ask(f"p{n}", tenant="plain")
        for n in range(8):
            room_for(rig, 1, taken=n)
        assert rig.state.calls.in_flight == {"gold": 6, "plain": 2}

    def test_priority_comes_before_fairness(self):
        rig = full(overload="queue")
        rig.ask("s0", tenant="greedy")
        rig.ask("s1", tenant="modest")
        rig.ask("s2", tenant="greedy", priority=1)
        room_for(rig, 1)
        assert {w.case.ask.request.session for w in rig.state.waiting.values()} == {"s0", "s1"}

    def test_a_full_queue_makes_room_for_a_tenant_below_its_share(self):
        rig = full(overload="queue", queue_max=4)
        for n in range(4):
            assert rig.ask(f"g{n}", tenant="greedy") is None
        assert rig.refused("g4", tenant="greedy").reason == "overloaded"
        effects = rig.do(Ask(rig.request("m0", tenant="modest"), "waiter"))
        (reply,) = answers(effects)
        assert "more than its share" in reply.verdict.error.message
        waiting = sorted(w.case.ask.request.session for w in rig.state.waiting.values())
        assert waiting == ["g0", "g1", "g2", "m0"], "the newest of the greedy one left"
        rig.do(Ask(rig.request("m1", tenant="modest"), "waiter"))
        assert rig.refused("m2", tenant="modest").reason == "overloaded", "half of the queue is its share"

    def test_who_had_to_make_room_in_the_same_tick_is_not_looked_for_again(self):
        """After a stand-still: a call whose record did not come takes the place of one whose api asks no more."""
        rig = full(overload="queue", queue_max=2)
        owned = rig.state.owned[partition_of("modest", "m0", M)]
        owned.restore_until = rig.now + 60
        assert rig.ask("m0", tenant="modest") is None
        owned.restore_until = 0.0
        assert [rig.ask(f"g{n}", tenant="greedy") for n in range(2)] == [None, None]
        (reply,) = answers(rig.later(10.0))
        assert "more than its share" in reply.verdict.error.message
        assert [w.case.ask.request.session for w in rig.state.waiting.values()] == ["m0"]


class TestHeartbeats:
    def test_who_waits_is_told_so_before_it_asks_again(self):
        rig = full(overload="queue")
        request = rig.request(may_wait=True)
        assert rig.send(request) is None
        assert answers(rig.later(0.5)) == []
        (reply,) = answers(rig.later(0.31))
        assert (reply.queued.waited_ms, reply.queued.waiting) == (810, 1)
        assert answers(rig.later(0.31)) == [], "nobody waits for an answer until it asks again"
        assert rig.send(request) is None
        (reply,) = answers(rig.later(0.81))
        assert reply.queued.waited_ms == 1930
        assert rig.send(request) is None
        rig.view(rig.snapshot("a", (model(),)))
        assert not rig.state.waiting

    def test_who_does_not_understand_it_is_not_told(self):
        rig = full(overload="queue")
        assert rig.ask() is None
        assert answers(rig.later(0.9)) == []

    def test_placed_while_nobody_listened_it_is_told_when_it_asks_again(self):
        rig = full(overload="queue")
        request = rig.request(may_wait=True)
        rig.send(request)
        rig.later(0.81)
        room_for(rig, 1)
        assert rig.send(request).__class__ is Placement
        assert rig.state.counts.routed == {"cost": 1}
