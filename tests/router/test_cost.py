"""Eq. 1 term by term, Eq. 2, and what decides between instances."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from talaria_router.cost import profile_of
from talaria_router.messages import Ask, Control
from tests.router.rig import Rig, model, only, outcome


def terms(rig: Rig, session: str = "s", **more: Any) -> dict[str, dict[str, Any]]:
    rig.ask(session, **more)
    return {c["iid"]: {"kv": "missing"} | c for c in rig.events("route")[-1].data["candidates"]}


def rig_with(**models: Any) -> Rig:
    rig = Rig()
    rig.view(*(rig.snapshot(iid, tuple(m) if isinstance(m, list) else (m,)) for iid, m in models.items()), full=True)
    return rig


def test_a_new_session_on_an_idle_active_instance_costs_its_prefill():
    c = terms(rig_with(a=model()))["a"]
    assert (c["req_ms"], c["kv_ms"], c["act_ms"], c["kv"]) == (100.0, 0.0, 0.0, "missing")


@pytest.mark.parametrize(
    ("state", "act"), [("active", 0.0), ("host", 500.0), ("loading", 20_000.0), ("cold", 20_000.0)]
)
def test_activation_by_state(state: str, act: float):
    assert terms(rig_with(a=model(state=state), b=model()))["a"]["act_ms"] == act


class TestKv:
    def after(self, **state: Any) -> dict[str, dict[str, Any]]:
        """A session whose last call left 90 tokens of KV on a, lease gone; 100 tokens now."""
        rig = rig_with(a=model())
        rig.turn()
        rig.later(3)
        rig.view(rig.snapshot("a", (model(**state),)), rig.snapshot("b"), full=True)
        return terms(rig)

    def test_device(self):
        got = self.after()
        assert (got["a"]["kv"], got["a"]["kv_ms"], got["a"]["req_ms"]) == ("device", 0.0, 10.0)
        assert (got["b"]["kv"], got["b"]["kv_ms"], got["b"]["req_ms"]) == ("missing", 90.0, 10.0)

    def test_host_is_the_measured_restore(self):
        got = self.after(state="host", restore_ms_per_token=0.2)["a"]
        assert (got["kv"], got["kv_ms"]) == ("host", pytest.approx(18.0))

    def test_host_before_any_restore_was_measured(self):
        assert self.after(state="host")["a"]["kv_ms"] == pytest.approx(9.0)

    def test_forgotten_is_recomputed(self):
        got = self.after(kv_epoch=2)["a"]
        assert (got["kv"], got["kv_ms"]) == ("missing", 90.0)

    def test_the_prefix_is_charged_once(self):
        for c in self.after(kv_epoch=2).values():
            assert c["total_ms"] == 100.0


def test_queue_ahead_and_peers():
    c = terms(rig_with(a=model(queued=2, queued_tokens=300, running=3)))["a"]
    assert c["req_ms"] == 300 + 100 + 5 * 10


def test_a_full_batch_is_waited_for():
    c = terms(rig_with(a=model(running=8)))["a"]
    assert c["wait_ms"] == pytest.approx(128 * 10 / 8)


class TestRows:
    """HBM: KV rows that running calls hold are waited for; all are freed in the 1280 ms of a typical answer."""

    def wait_ms(
        self, session: str = "s", prompt_tokens: int = 1000, ask: dict[str, Any] | None = None, **a: Any
    ) -> float:
        rig = rig_with(a=model(context_tokens=1 << 20, kv_capacity_tokens=10_000, **a))
        return float(terms(rig, session, prompt_bytes=4 * prompt_tokens, **(ask or {}))["a"].get("wait_ms", 0.0))

    def test_what_fits_does_not_wait(self):
        assert self.wait_ms(running=4, kv_held_tokens=10_000 - 1128) == 0

    def test_what_does_not_waits_for_its_share_of_those_who_run(self):
        assert self.wait_ms(running=4, kv_held_tokens=10_000) == pytest.approx(0.1128 * 1280)
        assert self.wait_ms(running=4, kv_held_tokens=9500) == pytest.approx(628 / 9500 * 1280)

    def test_a_short_answer_needs_less(self):
        assert self.wait_ms(running=4, kv_held_tokens=10_000, ask={"max_tokens": 8}) == pytest.approx(0.1008 * 1280)
        long = self.wait_ms(running=4, kv_held_tokens=10_000, ask={"max_tokens": 8000})
        assert long == pytest.approx(0.1128 * 1280), "not what it may take, what answers do"

    def test_prefixes_that_could_be_evicted_are_room(self):
        assert self.wait_ms(running=4, kv_used_tokens=10_000, kv_held_tokens=2000) == 0

    def test_who_waits_there_and_who_is_on_the_way_come_first(self):
        queued = self.wait_ms(running=4, kv_held_tokens=8000, queued=1, queued_tokens=2000)
        assert queued == pytest.approx(2000 + 0.1128 * 1280)
        rig = rig_with(a=model(running=4, kv_capacity_tokens=10_000, kv_held_tokens=8000))
        rig.placed("first", prompt_bytes=8000)
        assert terms(rig, "second", prompt_bytes=4000)["a"]["wait_ms"] == pytest.approx(2000 + 0.1128 * 1280)

    def test_the_batch_is_not_waited_for_twice(self):
        in_batch = 128 * 10 / 8
        assert self.wait_ms(running=8, kv_held_tokens=10_000) == pytest.approx(in_batch)
        assert self.wait_ms(running=8, kv_held_tokens=10_000, prompt_tokens=5000) == pytest.approx(0.5128 * 1280)

    def test_a_full_device_is_ranked_down_not_refused(self):
        full = model(running=1, kv_held_tokens=8192)
        rig = rig_with(a=full, b=model(running=4))
        assert rig.placed().iid == "b"
        assert rig_with(a=full).placed().iid == "a"

    def test_unless_the_target_would_be_missed(self):
        """Answers of 13 s each: half of the pool is free in 6.5 s, nearly all of it in 12."""
        slow = model(
            running=4, decode_step_ms=100.0, kv_held_tokens=8192, context_tokens=8192, prefill_ms_per_token=0.1
        )
        assert rig_with(a=slow).placed(prompt_bytes=4 * 4000).iid == "a"
        refused = rig_with(a=slow).refused(prompt_bytes=4 * 7000)
        assert refused.reason == "overloaded"
        assert "1 round" in refused.error.message


class TestColdStart:
    """What was never measured: the same model elsewhere, else the instance's other models by their size."""

    unknown: ClassVar = {"prefill_ms_per_token": 0.0, "decode_step_ms": 0.0, "switch_ms": 0.0, "open_ms": 0.0}

    def profile(self, rig: Rig, iid: str = "a") -> Any:
        instance = rig.state.cluster.get(iid)
        return profile_of(instance, instance.models["m"], rig.state.profiles)

    def rig(self, *others: Any, weight_bytes: int = 40 << 30) -> Rig:
        return rig_with(a=[model(state="host", weight_bytes=weight_bytes, **self.unknown), *others])

    def test_by_the_instances_bandwidths(self):
        """The big one tells the bandwidth; what a small one takes is mostly not its weights."""
        big = model("big", weight_bytes=80 << 30, prefill_ms_per_token=0.4, switch_ms=4000.0, open_ms=90_000.0)
        small = model("small", weight_bytes=1 << 30, prefill_ms_per_token=0.1, switch_ms=400.0, open_ms=9000.0)
        got = self.profile(self.rig(big, small))
        assert (got.switch_ms, got.open_ms) == (pytest.approx(2000.0), pytest.approx(45_000.0))
        assert (got.prefill_ms_per_token, got.decode_step_ms) == (pytest.approx(0.2), pytest.approx(5.0))
        assert not got.measured, "a guess refuses no call"

    def test_the_same_model_elsewhere_comes_first(self):
        big = model("big", weight_bytes=80 << 30, switch_ms=4000.0)
        rig = self.rig(big)
        rig.view(rig.snapshot("b", (model(switch_ms=1500.0),)))
        rig.view(rig.snapshot("a", (*rig.state.cluster.get("a").snapshot.models, model("new"))))
        assert self.profile(rig).switch_ms == 1500.0

    def test_an_instance_that_nobody_has_tried_yet_is_judged_by_what_others_took(self):
        """Else it would look worse than the one that is known, or better, for that alone, and be left, or swamped."""
        big = model("big", weight_bytes=80 << 30, prefill_ms_per_token=0.4, switch_ms=4000.0, open_ms=90_000.0)
        rig = self.rig(big)
        fresh = model(state="host", weight_bytes=40 << 30, **self.unknown)
        untried = model("big", "host", weight_bytes=80 << 30, **self.unknown)
        rig.view(rig.snapshot("b", (fresh, untried)))
        assert self.profile(rig, "b") == self.profile(rig)

    def test_with_nothing_measured_by_a_usual_bandwidth(self):
        got, smaller = self.profile(self.rig()), self.profile(self.rig(weight_bytes=4 << 30))
        assert got.switch_ms == pytest.approx((40 << 30) / 20e6)
        assert smaller.switch_ms == pytest.approx(got.switch_ms / 10)
        assert got.open_ms > smaller.open_ms > 10_000

    def test_the_size_of_a_cold_one_is_known_from_where_it_is_open(self):
        rig = rig_with(a=model(state="cold", weight_bytes=0, open_ms=8000.0), b=model(weight_bytes=30 << 30))
        assert self.profile(rig).weight_bytes == 30 << 30


class TestStaged:
    def test_a_switch_is_charged_less_what_is_staged(self):
        c = terms(rig_with(a=model(state="host", staged=0.75, switch_now_ms=140.0)))["a"]
        assert (c["act_ms"], c["wait_ms"]) == (140.0, 140.0), "as the instance predicts it"

    def test_the_better_staged_instance_is_preferred(self):
        rig = rig_with(a=model(state="host", switch_now_ms=500.0), b=model(state="host", switch_now_ms=90.0))
        assert rig.placed().iid == "b"

    def test_before_the_first_switch_the_guess_is_all_reload(self):
        c = terms(rig_with(a=model(state="host", staged=0.75, switch_ms=0.0), b=model(state="host")))
        assert c["a"]["act_ms"] == pytest.approx(125.0)


def test_the_round_is_waited_for_and_the_switch_charged_once():
    others = [model(state="host"), model("other", running=1), model("third", "host", queued=1, queued_tokens=50)]
    c = terms(rig_with(a=others))["a"]
    active, third = 128 * 10, 50 + 128 * 10 + 500
    assert c["act_ms"] == 500
    assert c["req_ms"] == 100 + active + third
    assert c["wait_ms"] == active + third + 500


def test_nobody_is_taken_to_hold_the_device_longer_than_the_round_allows():
    """Eq. 5: eight models share gamma T_TTFT (9 s), so each of the other seven has an eighth of it, not two seconds."""
    others = [model(f"m{n}", "host" if n else "active", queued=9, queued_tokens=9000) for n in range(7)]
    mine = model(state="host")
    rig = rig_with(a=[mine, *others])
    assert terms(rig)["a"]["wait_ms"] == pytest.approx(7 / 8 * 9000 + 500), "and its own switch"
    assert rig.events("route")[-1].data["iid"] == "a", "it has a place"
    rig = Rig()
    rig.view(rig.snapshot("a", (mine, *others), round_planned_ms=12_000.0), full=True)
    assert terms(rig)["a"]["wait_ms"] == pytest.approx(7 / 8 * 12_000 + 500), "as planned, the target given up"


def test_an_idle_switch_beats_a_long_queue():
    rig = rig_with(a=model(queued=30, queued_tokens=3000), b=model(state="host"))
    assert rig.placed().iid == "b"


def test_residency_beats_an_idle_instance_that_must_switch():
    rig = rig_with(a=model(running=2), b=model(state="host"))
    assert rig.placed().iid == "a"
    assert rig.state.counts.avoidable_opens == 0


def test_an_open_that_could_be_avoided_is_counted():
    rig = rig_with(a=model(queued=30, queued_tokens=3000), b=model(state="host"))
    rig.placed()
    assert rig.state.counts.avoidable_opens == 1
    assert rig.events("route")[-1].data["avoidable_open"] is True


def test_deadline_risk_makes_an_instance_less_attractive():
    rig = Rig()
    rig.view(rig.snapshot("a", deadline_risk=3), rig.snapshot("b"), full=True)
    assert rig.placed().iid == "b"


def test_one_models_late_calls_do_not_close_an_instance_to_the_others():
    """Many calls of another model will be late; this one's queue is empty and it is active."""
    late = model("late", "host", queued=300, queued_tokens=30_000)
    rig = Rig()
    rig.view(rig.snapshot("a", (model(), late), deadline_risk=300, max_queued=999), full=True)
    assert rig.placed().iid == "a"


class TestReplica:
    """Eq. 2: a model that is cold there is opened only if demand is worth it."""

    def opened(self, rig: Rig, session: str = "s") -> str:
        """Where the call has its model opened; it waits for that."""
        request = rig.request(session)
        effects = rig.do(Ask(request, "waiter"))
        assert outcome(effects) is None
        assert rig.state.waiting[request.rid].why == "open"
        (control,) = only(effects, Control)
        assert (control.verb, control.model) == ("open", "m")
        return control.iid

    def test_a_model_that_nobody_holds_is_opened(self):
        assert self.opened(rig_with(a=model(state="cold"), b=model(state="cold"))) == "a"

    def test_not_while_another_serves_it_well(self):
        rig = rig_with(a=model(state="cold"), b=model(queued=1, queued_tokens=2000, running=4))
        assert rig.placed().iid == "b"
        assert rig.events("route")[-1].data["rejected"] == {"replica": 1}

    def test_when_demand_is_refused_it_spills_into_a_replica(self):
        rig = rig_with(a=model(state="cold", open_ms=5000.0), b=model(queued=64, running=8))
        assert self.opened(rig) == "a"

    def test_a_dear_one_needs_more_demand(self):
        rig = rig_with(a=model(state="cold"), b=model(queued=64, running=8))
        assert [rig.ask(f"s{i}").__class__.__name__ for i in range(2)] == ["Verdict", "Verdict"]
        assert self.opened(rig, "s3") == "a"

    def test_memory_pressure_has_a_price(self):
        big = model(state="cold", open_ms=8000.0, weight_bytes=64 << 30)
        rig = Rig()
        full = rig.snapshot("b", (model(queued=64, running=8),))
        rig.view(rig.snapshot("a", (big,), kv_occupancy=0.98), full, full=True)
        assert rig.refused().reason == "overloaded"
        rig.view(rig.snapshot("a", (big,), kv_occupancy=0.1), full, full=True)
        assert self.opened(rig) == "a"


class TestLearning:
    def test_bytes_per_token_per_model(self):
        rig = rig_with(a=[model(), model("other")])
        rig.turn(prompt_bytes=1000, prompt_tokens=100, kv_tokens=0)
        assert rig.state.profiles.prompt_tokens("m", 1000) == 100
        assert rig.state.profiles.prompt_tokens("other", 1000) == 250

    def test_the_admission_unit_is_a_typical_returns_prefill(self):
        rig = rig_with(a=model())
        assert rig.state.profiles.unit_ms("m") == 100.0
        rig.turn(prefill_ms=500.0, cached_tokens=0)
        assert rig.state.profiles.unit_ms("m") == 500.0, "any call's, while no return was measured"
        rig.turn(prefill_ms=40.0, cached_tokens=90)
        assert rig.state.profiles.unit_ms("m") == 40.0

    def test_what_one_instance_measured_stands_in_for_another(self):
        rig = rig_with(a=model(prefill_ms_per_token=3.0))
        fresh = model(prefill_ms_per_token=0.0, decode_step_ms=0.0, switch_ms=0.0, open_ms=0.0, state="host")
        rig.view(rig.snapshot("b", (fresh,)))
        got = rig.state.profiles.of("b", fresh)
        assert (got.prefill_ms_per_token, got.decode_step_ms, got.switch_ms) == (3.0, 10.0, 500.0)

    def test_cold_start_values_are_positive(self):
        rig = rig_with(a=model(prefill_ms_per_token=0.0, decode_step_ms=0.0, switch_ms=0.0, open_ms=0.0, state="host"))
        c = terms(rig)["a"]
        assert c["req_ms"] > 0
        assert c["act_ms"] > 0


class TestPolicies:
    def rig(self, policy: str) -> Rig:
        rig = Rig(policy=policy)
        rig.view(rig.snapshot("a", (model(running=1),)), rig.snapshot("b", (model(state="host"),)), full=True)
        return rig

    def test_least_pressure_ignores_residency(self):
        assert self.rig("least-pressure").placed().iid == "b"

    def test_sticky_returns_to_its_first_instance(self):
        rig = self.rig("session-sticky")
        p = rig.turn()
        assert p.iid == "b"
        rig.view(rig.snapshot("b", (model(state="host", queued=20, queued_tokens=1000),)))
        assert rig.placed().iid == "b"

    def test_round_robin(self):
        rig = self.rig("round-robin")
        assert [rig.placed(f"s{i}").iid for i in range(4)] == ["a", "b", "a", "b"]

    def test_an_unknown_name(self):
        with pytest.raises(ValueError, match="least-pressure"):
            Rig(policy="best")
