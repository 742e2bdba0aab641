"""Figures of bench.agree: DESIGN 11's names, over runs and traces."""

from __future__ import annotations

from typing import Any

from bench.agree.__main__ import figures


def run(real: float, said: float) -> dict[str, Any]:
    return {
        name: ({"sct_p50_s": (real * n, "s"), "cached_share": (0.5, "of prompt tokens")}, {"sct_p50_s": said * n})
        for n, name in enumerate(("talaria", "no-sp"), 1)
    }


def test_ratios_have_the_names_that_others_rely_on():
    found = figures([run(10.0, 9.0), run(10.0, 12.0), run(10.0, 11.0)])
    assert found["sct_p50_sim_over_real_talaria"] == {"median": 1.1, "min": 0.9, "max": 1.2, "unit": "x"}
    assert found["sct_p50_sim_over_real_no_sp"]["median"] == 1.1
    assert found["real_sct_p50_s_no_sp"]["median"] == 20.0
    assert found["sim_sct_p50_s_no_sp"]["median"] == 22.0
    assert found["same_order"]["median"] == 1.0
    assert "cached_share_sim_over_real_talaria" not in found, "only what both say"


def test_held_out_traces_stand_apart():
    assert set(figures([run(10.0, 9.0)], "held_out_")) >= {"held_out_sct_p50_sim_over_real_talaria"}
    assert figures([]) == {}
