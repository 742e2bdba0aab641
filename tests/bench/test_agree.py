"""Figures of bench.agree: DESIGN 11's names, over runs and traces."""

from __future__ import annotations

from typing import Any

import pytest
from bench.ablation.work import Work
from bench.agree.__main__ import Pair, figures, pairs_in_order, rotated
from bench.agree.simulated import steps_ms

from talaria_gpu.engine.contract import StepResult, StepTokens
from talaria_replay.sim.device import Times
from talaria_replay.trace import Call


def run(real: float, said: float) -> dict[str, Any]:
    return {
        name: Pair({"sct_p50_s": (real * n, "s"), "cached_share": (0.5, "of prompt tokens")}, {"sct_p50_s": said * n})
        for n, name in enumerate(("talaria", "no-sp"), 1)
    }


def test_ratios_have_the_names_that_others_rely_on():
    found = figures([run(10.0, 9.0), run(10.0, 12.0), run(10.0, 11.0)])
    assert found["sct_p50_sim_over_real_talaria"] == {"median": 1.1, "min": 0.9, "max": 1.2, "unit": "x"}
    assert found["sct_p50_sim_over_real_no_sp"]["median"] == 1.1
    assert found["real_sct_p50_s_no_sp"]["median"] == 20.0
    assert found["sim_sct_p50_s_no_sp"]["median"] == 22.0
    assert found["same_order"]["median"] == 1.0
    assert found["pairs_in_same_order"]["median"] == 1.0
    assert "cached_share_sim_over_real_talaria" not in found, "only what both say"


def test_held_out_traces_stand_apart():
    assert set(figures([run(10.0, 9.0)], "held_out_")) >= {"held_out_sct_p50_sim_over_real_talaria"}
    assert figures([]) == {}


def test_curves_are_asked_about_the_steps_that_were_made():
    work, lengths = Work(), {"a": 100, "b": 300}.__getitem__
    done = StepTokens(rid="a", token_ids=[1], cached_tokens=40, prefilled_tokens=60)
    work.add(StepResult(kind="prefill", prefilled_tokens=60, tokens=[done], wall_ms=9.0, restore_ms=2.0), lengths)
    both = [StepTokens(rid=rid, token_ids=[2]) for rid in "ab"]
    work.add(StepResult(kind="decode", batch=2, tokens=both, wall_ms=5.0), lengths)
    work.add(StepResult(kind="decode", batch=1, tokens=both[:1], wall_ms=3.0), lengths)
    assert (work.prefill_ms, work.decode_ms) == (7.0, {2: 5.0, 1: 3.0})
    times = Times(1.0, 0.1, 0.001, 0.0, 0.0, 0.01, decode_batches=((1, 3.0), (4, 9.0)))
    prefill, decode = steps_ms(times, work)
    assert prefill == pytest.approx(1 + 6 + 0.001 * 60 * (40 + 30))
    assert decode == pytest.approx(5 + 3 + 0.01 * (100 + 300 + 100))


def test_order_counts_where_configurations_are_apart():
    real = {"a": 10.0, "b": 10.5, "c": 20.0}
    assert pairs_in_order(real, {"a": 11.0, "b": 10.0, "c": 20.0}) == 1.0
    assert pairs_in_order(real, {"a": 11.0, "b": 10.0, "c": 10.5}) == 0.5


def test_each_run_begins_with_other_sessions():
    calls = [Call(session=s, call=n, model="m", prompt_tokens=9, completion_tokens=1) for s in "abcdef" for n in (0, 1)]
    orders = ["".join(c.session for c in rotated(calls, number, 3) if not c.call) for number in range(3)]
    assert orders == ["abcdef", "cdefab", "efabcd"]
