"""The planner's arithmetic: Eq. 3-5 as properties, and what it says when they cannot hold."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from talaria_gpu.sched.plan import Demand, Limits, plan_round

ms = st.floats(0, 5000, allow_nan=False)


@st.composite
def demands(draw: st.DrawFn) -> list[Demand]:
    out = []
    for i in range(draw(st.integers(1, 5))):
        first = draw(ms)
        out.append(Demand(f"m{i}", draw(st.floats(0, 150)), draw(st.floats(0, 3000)), first, first + draw(ms)))
    return out


limits = st.builds(
    Limits,
    slot_ms=st.sampled_from([1.0, 200.0, 2000.0, 20_000.0]),
    drain_ms=st.sampled_from([0.0, 50.0, 500.0]),
    round_ms=st.sampled_from([50.0, 900.0, 9000.0]),
    t_tpot_ms=st.sampled_from([10.0, 100.0, 1000.0]),
    lossy=st.booleans(),
)


spent = st.sampled_from([0.0, 0.0, 300.0, 8000.0])
"""Of a round that has begun."""


@given(demands(), limits, spent)
@example([Demand("a", 60.0, 0.0, 1.0, 1.0), Demand("b", 60.0, 0.0, 1.0, 1.0)], Limits(200, 50, 9000, 100, True), 0.0)
def test_a_plan_keeps_eq_4_and_5_or_says_so(ask: list[Demand], bounds: Limits, spent_ms: float) -> None:
    plan = plan_round(ask, bounds, spent_ms)
    switches = sum(d.switch_ms for d in ask) if len(ask) > 1 or spent_ms else 0.0
    assert list(plan.slots) == [d.model for d in ask]
    assert plan.round_ms == pytest.approx(spent_ms + switches + sum(s.length_ms for s in plan.slots.values()))  # Eq. 3
    if "ttft" not in plan.infeasible:
        assert plan.round_ms <= bounds.round_ms + 1e-3  # Eq. 5
    for d in ask:
        slot = plan.slots[d.model]
        assert slot.decodes >= 1
        assert slot.decode_ms == pytest.approx(slot.decodes * d.decode_ms)
        # Liveness: what the slot owes fits beside all protected decode, and beside what it has to earn.
        least = max(d.first_ms, min(d.switch_ms, d.prefill_ms))
        earned = max(slot.decode_ms, least) if bounds.lossy else slot.decode_ms
        assert slot.length_ms + 1e-3 >= least + earned
        if "tpot" not in plan.infeasible:
            rest = plan.round_ms - slot.decodes * d.decode_ms
            assert slot.decodes * (bounds.t_tpot_ms - d.decode_ms) + 1e-3 >= rest  # Eq. 4
    if "ttft" in plan.infeasible:
        assert plan.round_ms >= bounds.round_ms - 1e-3


@given(demands(), limits, spent)
def test_nothing_is_given_up_without_need(ask: list[Demand], bounds: Limits, spent_ms: float) -> None:
    """A target is missed only if even the longest round that Eq. 5 allows cannot hold what is owed and protected.

    What is owed is at least as much prefill as the switch took, if so much waits.
    """
    plan = plan_round(ask, bounds, spent_ms)
    if not plan.infeasible:
        return
    switches = sum(d.switch_ms for d in ask) if len(ask) > 1 or spent_ms else 0.0
    count = max(1, -(-bounds.round_ms // bounds.t_tpot_ms))
    least = {d.model: max(d.first_ms, min(d.switch_ms, d.prefill_ms)) for d in ask}
    owed = sum(
        least[d.model] + (max(count * d.decode_ms, least[d.model]) if bounds.lossy else count * d.decode_ms)
        for d in ask
    )
    unreachable = any(d.decode_ms >= bounds.t_tpot_ms for d in ask)
    assert unreachable or spent_ms + switches + owed > bounds.round_ms - 1e-3


def test_two_models_by_hand() -> None:
    """R = 2·2000 + 2·500 = 5000 ms: 50 iterations of each model every 100 ms; the rest of each slot is for prefill."""
    ask = [Demand("a", 20.0, 500.0), Demand("b", 10.0, 500.0)]
    plan = plan_round(ask, Limits(2000, 0, 9000, 100, False))
    assert plan.round_ms == pytest.approx(5000)
    assert {m: s.decodes for m, s in plan.slots.items()} == {"a": 50, "b": 50}
    assert plan.slots["a"].decode_ms == pytest.approx(1000)
    assert sum(s.prefill_ms for s in plan.slots.values()) == pytest.approx(4000 - 1000 - 500)


def test_who_asks_for_more_gets_more() -> None:
    ask = [Demand("a", 10.0, 100.0, 500.0, 6000.0), Demand("b", 10.0, 100.0, 500.0, 500.0)]
    plan = plan_round(ask, Limits(1000, 0, 9000, 100, False))
    assert plan.round_ms <= 9000
    assert plan.slots["a"].prefill_ms >= 6000
    assert 500 <= plan.slots["b"].prefill_ms <= 1500
    assert plan.infeasible == ()


@pytest.mark.parametrize(
    ("decode_ms", "switch_ms", "first_ms", "said"),
    [
        (20, 100, 100, ()),
        (20, 4600, 100, ("ttft",)),
        (20, 100, 5000, ("ttft",)),
        (60, 100, 100, ("tpot",)),
        (120, 100, 100, ("tpot",)),
        (120, 4600, 100, ("ttft", "tpot")),
    ],
)
def test_what_cannot_hold_is_named(decode_ms: float, switch_ms: float, first_ms: float, said: tuple[str, ...]) -> None:
    ask = [Demand(m, decode_ms, switch_ms, first_ms, first_ms) for m in "ab"]
    assert plan_round(ask, Limits(2000, 0, 9000, 100, False)).infeasible == said


def test_a_queue_pushes_the_round_past_its_bound_rather_than_be_served_a_call_a_switch() -> None:
    """Switches of 1.5 s, decode of 20 ms and ten calls of 300 ms that wait for each of three models.

    In 9 s switches (4.5) and decode (5.4 s at a token every 100 ms) leave nothing to the queues, which would grow.
    """
    few = [Demand(m, 20.0, 1500.0, 50.0, 50.0) for m in "abc"]
    many = [Demand(m, 20.0, 1500.0, 300.0, 3000.0) for m in "abc"]
    assert plan_round(few, Limits(2000, 0, 9000, 100, False)).round_ms <= 9700
    plan = plan_round(many, Limits(2000, 0, 9000, 100, False))
    assert "ttft" in plan.infeasible
    assert all(slot.prefill_ms >= 1500 - 1e-6 for slot in plan.slots.values())
    assert plan.round_ms < 20_000


def test_without_the_tpot_target_decode_gets_half_of_the_round() -> None:
    ask = [Demand(m, 150.0, 100.0, 200.0, 4000.0) for m in "ab"]
    plan = plan_round(ask, Limits(2000, 0, 9000, 100, False))
    assert plan.infeasible == ("tpot",)
    assert sum(s.decode_ms for s in plan.slots.values()) == pytest.approx(plan.round_ms / 2, rel=0.1)
    assert plan.slots["a"].decodes == plan.slots["b"].decodes


def test_prefill_that_the_switch_throws_away_is_given_as_much_decode() -> None:
    ask = [Demand(m, 10.0, 0.0, 1000.0, 1000.0) for m in "ab"]
    plan = plan_round(ask, Limits(100, 0, 9000, 100, True))
    assert all(s.length_ms >= 2000 - 1e-6 for s in plan.slots.values())
