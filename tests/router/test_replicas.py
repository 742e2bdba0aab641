"""Eq. 2 acting: what is opened on demand, what is closed, and the hysteresis between them."""

from __future__ import annotations

from typing import Any

import pytest

from talaria_common.ids import partition_of
from talaria_common.wire import Placement
from talaria_router.messages import Control, Controlled, Effect, Gained, Lost
from talaria_router.replicas import leader
from tests.router.rig import M, Rig, model, only, outcome, seen


def controls(effects: list[Effect]) -> list[tuple[str, str]]:
    return [(c.iid, c.verb) for c in only(effects, Control)]


def said(rig: Rig) -> list[tuple[str, str]]:
    return controls(rig.effects)


def cold_pool(**more: Any) -> Rig:
    rig = Rig(**more)
    rig.view(rig.snapshot("a", (model(state="cold"),)), rig.snapshot("b", (model(state="cold"),)), full=True)
    return rig


class TestOpening:
    def test_calls_of_a_model_that_nobody_serves_wait_for_one_opening(self):
        rig = cold_pool()
        assert [rig.ask(f"s{n}") for n in range(3)] == [None] * 3
        assert said(rig) == [("a", "open")]
        rig.do(Controlled(Control("a", "open", M), ok=True))
        for state in ("cold", "loading"):
            rig.view(rig.snapshot("a", (model(state=state),)))
            assert rig.ask(f"in the middle: {state}") is None
        assert len(rig.state.waiting) == 5
        rig.view(rig.snapshot("a", (model(state="host"),)))
        assert not rig.state.waiting
        assert rig.state.counts.routed == {"cost": 5}
        assert said(rig) == [("a", "open")]

    def test_who_refuses_is_not_asked_again_and_another_is(self):
        rig = cold_pool()
        assert rig.ask() is None
        effects = rig.do(Controlled(Control("a", "open", M), ok=False))
        assert controls(effects) == [("b", "open")]
        rig.do(Controlled(Control("b", "open", M), ok=False))
        for _ in range(3):
            rig.later(0.5)
            rig.view(rig.snapshot("a", (model(state="cold"),)), rig.snapshot("b", (model(state="cold"),)))
        assert said(rig) == [("a", "open"), ("b", "open")]
        assert rig.state.counts.commands == {"open": 2, "open_refused": 2}

    def test_after_a_while_it_may_be_asked_again(self):
        rig = cold_pool()
        rig.ask()
        rig.do(Controlled(Control("a", "open", M), ok=False))
        rig.do(Controlled(Control("b", "open", M), ok=False))
        rig.later(61)
        rig.view(rig.snapshot("a", (model(state="cold"),)), rig.snapshot("b", (model(state="cold"),)))
        rig.ask("later")
        assert said(rig)[2:] == [("a", "open")]

    def test_a_call_whose_deadline_comes_first_is_told(self):
        rig = cold_pool()
        request = rig.request(deadline_ms=round((rig.now + 2) * 1000))
        assert rig.send(request) is None
        rig.later(1)
        rig.send(request)
        verdict = outcome(rig.later(1.1))
        assert verdict.reason == "expired"
        assert "not opened" in verdict.error.message

    def test_the_gain_does_not_depend_on_how_many_routers_share_the_demand(self):
        """Half of the calls, seen by the owner of half of the partitions, open what all would have opened."""
        for share in (1, 2, 4):
            rig = Rig()
            for p in range(256):
                if p % share:
                    rig.do(Lost(p))
            mine = [s for n in range(200) if not partition_of("t", s := f"s{n}", M) % share]
            full = rig.snapshot("b", (model(queued=64, running=8),))
            rig.view(rig.snapshot("a", (model(state="cold", open_ms=30_000.0),)), full, full=True)
            for session in mine[: 4 // share]:
                assert said(rig) == []
                rig.ask(session)
            assert said(rig) == [("a", "open")], f"one of {share}"

    def test_a_place_that_comes_free_meanwhile_is_taken(self):
        rig = Rig()
        busy = rig.snapshot("b", (model(queued=4, running=8),), max_queued=4)
        rig.view(rig.snapshot("a", (model(state="cold", open_ms=100.0),)), busy, full=True)
        assert rig.ask() is None
        assert said(rig) == [("a", "open")]
        rig.view(rig.snapshot("b", max_queued=4))
        assert [p.iid for p in rig.state.calls._placed.values() for p in [p.placement]] == ["b"]

    @pytest.mark.parametrize("policy", ["talaria", "least-pressure"])
    def test_a_model_that_is_being_loaded_is_waited_for_unless_another_is_better(self, policy: str):
        rig = Rig(policy=policy)
        loading = rig.snapshot("a", (model(state="loading"),))
        rig.view(loading, rig.snapshot("b", (model(queued=60, running=8),), status="draining"), full=True)
        assert rig.ask() is None
        assert said(rig) == []
        rig.view(rig.snapshot("a", (model(state="failed"),)), rig.snapshot("b"))
        assert [p.placement.iid for p in rig.state.calls._placed.values()] == ["b"]

    def test_the_comparison_policies_open_what_nobody_has_open(self):
        rig = cold_pool(policy="least-pressure")
        assert rig.ask() is None
        assert said(rig) == [("a", "open")]
        rig.do(Controlled(Control("a", "open", M), ok=False))
        assert said(rig) == [("a", "open"), ("b", "open")], "one that refused is not asked again and again"

    def test_who_waits_for_an_opening_that_failed_is_told(self):
        rig = Rig()
        rig.view(rig.snapshot("a", (model(state="cold"),)), full=True)
        assert rig.ask() is None
        rig.view(rig.snapshot("a", (model(state="loading"),)))
        effects = rig.view(rig.snapshot("a", (model(state="failed"),)))
        verdict = outcome(effects)
        assert verdict is not None
        assert (verdict.reason, verdict.error.message) == (
            rig.refused("next").reason,
            rig.refused("third").error.message,
        )
        assert not rig.state.waiting

    def test_who_waits_for_it_elsewhere_goes_on_waiting(self):
        rig = Rig()
        rig.view(rig.snapshot("a", (model(state="cold"),)), rig.snapshot("b", status="starting"), full=True)
        assert rig.ask() is None
        assert outcome(rig.view(rig.snapshot("a", (model(state="failed"),)))) is None
        assert isinstance(outcome(rig.view(rig.snapshot("b"))), Placement)


class TestClosing:
    def pool(self, **more: Any) -> Rig:
        rig = Rig(replica_idle_s=30.0, **more)
        self.beat(rig, full=True)
        return rig

    def beat(self, rig: Rig, full: bool = False, **a: Any) -> list[Effect]:
        spare = rig.snapshot("a", (model(**({"state": "host"} | a)), model("other")))
        return rig.view(spare, rig.snapshot("b"), full=full)

    def idle(self, rig: Rig, seconds: int, **a: Any) -> list[tuple[str, str]]:
        begin = len(rig.effects)
        for _ in range(seconds):
            self.beat(rig, **a)
            rig.later(1)
        return controls(rig.effects[begin:])

    def test_an_idle_replica_beside_another(self):
        rig = self.pool()
        assert self.idle(rig, 28) == []
        assert self.idle(rig, 5) == [("a", "close")]

    def test_refused_it_is_left_alone_for_long(self):
        rig = self.pool()
        self.idle(rig, 33)
        rig.do(Controlled(Control("a", "close", M), ok=False))
        assert self.idle(rig, 55) == []

    def test_never_the_last_one(self):
        rig = Rig(replica_idle_s=5.0)
        for _ in range(20):
            rig.view(rig.snapshot("a", (model(state="host"), model("other"))), full=True)
            rig.later(1)
        assert said(rig) == []

    def test_nor_both_because_the_snapshot_is_late(self):
        """The one that was told to close still looks as if it held the model."""
        rig = Rig(replica_idle_s=5.0, control_window_s=1.0)
        for _ in range(40):
            both = (model(state="host"), model("other"))
            rig.view(rig.snapshot("a", both), rig.snapshot("b", both), full=True)
            for control in only(rig.later(0.2), Control):
                rig.do(Controlled(control, ok=True))
        assert said(rig) == [("a", "close")]

    def test_a_refused_close_keeps_nobody_from_opening(self):
        rig = self.pool()
        assert self.idle(rig, 33) == [("a", "close")]
        rig.do(Controlled(Control("a", "close", M), ok=False))
        rig.view(rig.snapshot("a", (model(state="cold"), model("other"))), rig.snapshot("b", (model(state="cold"),)))
        assert rig.ask() is None
        assert said(rig)[-1] == ("a", "open")

    def test_never_one_with_work_or_the_active_one(self):
        assert self.idle(self.pool(), 40, queued=1) == []
        assert self.idle(self.pool(), 40, state="active") == []

    def test_not_while_its_absence_would_cost_as_much_as_opening_it(self):
        """Demand that the other one, which must switch for each, would have to serve: hysteresis of factor two."""
        rig = Rig(replica_idle_s=5.0)
        for n in range(60):
            both = (model(state="host", switch_ms=3000.0), model("other"))
            rig.view(rig.snapshot("a", both), rig.snapshot("b", both), full=True)
            for k in range(2):
                p = rig.placed(f"s{n}{k}")
                rig.complete(p, f"s{n}{k}", session_final=True)
            rig.later(1)
        assert said(rig) == []

    def test_only_the_router_that_leads_the_model_closes(self):
        rig = self.pool()
        rig.do(Lost(leader(M)))
        assert self.idle(rig, 40) == []
        rig.do(Gained(leader(M), 5000, may_hold=False))
        assert self.idle(rig, 2) == [("a", "close")], "idle for long enough, whoever led it"

    def test_what_was_closed_is_not_opened_for_gain_at_once(self):
        rig = self.pool()
        assert self.idle(rig, 33) == [("a", "close")]
        rig.do(Controlled(Control("a", "close", M), ok=True))
        full = rig.snapshot("b", (model(queued=64, running=8),))
        rig.view(rig.snapshot("a", (model(state="cold", open_ms=10.0), model("other"))), full)
        assert rig.refused().reason == "overloaded"
        rig.later(10)
        rig.view(rig.snapshot("a", (model(state="cold", open_ms=10.0), model("other")), seen=seen(1)), full)
        rig.view(rig.snapshot("b", (model(queued=64, running=8),)))
        assert rig.ask("later") is None
        assert said(rig)[-1] == ("a", "open")
