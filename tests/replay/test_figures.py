"""Figures mean what they are compared with."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from talaria_replay.generate import generate
from talaria_replay.measure import session_times
from talaria_replay.report import spec
from talaria_replay.report.outcome import Outcome
from talaria_replay.sim.run import simulate
from talaria_replay.sim.scenario import Group, Scenario

SMALL = ("qwen3-32b", "qwen2.5-32b", "qwen3.5-35b-a3b")
TWO = Scenario(
    groups=(Group(hardware="paper-tp4", models=SMALL, count=2),), calibration="roofline", admission=False, stagger_s=0.6
)


@pytest.mark.parametrize(("tau_s", "calls"), [(1000.0, 3), (1.0, 3), (1000.0, 1)])
def test_unused_leases_are_those_that_somebody_came_back_for(tau_s: float, calls: int) -> None:
    """The paper counts reserved returns (5.4): the lease after a session's last call is nobody's return."""
    trace = list(generate("paper", sessions=6, models=SMALL, seed=3, max_calls=calls, max_context_tokens=60_000))
    summary = simulate(replace(TWO, tau_s=tau_s), trace).summary
    leases, returns = summary["leases"], len(trace) - summary["sessions"]
    assert leases["installed"] == len(trace)
    assert summary["unused_lease_share"] == (round(1 - leases["honoured"] / returns, 4) if returns else 0.0)
    if tau_s > 100:
        assert summary["unused_lease_share"] == 0.0


def test_a_maximum_over_all_configurations_and_pairs_of_sessions() -> None:
    (figure,) = spec.select(spec.load("paper"), ["figure-15"])
    assert not figure.paper, "177.1 GiB is nobody's own figure"
    trace = list(generate("paper", sessions=6, models=SMALL, seed=3, max_calls=3, max_context_tokens=60_000))
    first, other = (simulate(replace(TWO, ablation=name), trace) for name in ("talaria", "round-only"))
    out = Outcome(figure)
    out.top("all", [first, "not simulated", other])
    out.pair("round-only", first, other, 29)
    out.pair("no-sp", first, "not simulated", 29)
    highest, pairs = out.rows
    assert highest.predicted == max(r.summary["hbm_peak_gib"] for r in (first, other))
    assert highest.published == 177.1
    a, b = session_times(first.calls), session_times(other.calls)
    assert pairs.metric == "sessions of 6 that talaria completes sooner"
    assert (pairs.predicted, pairs.published) == (sum(a[s] < b[s] for s in a), 29)
    assert 0 < pairs.predicted <= 6


TABLE_2 = {  # appendix D: p50, p95 of phases 1 to 5 and of the whole, ms
    "d2d": ((26.2, 34.7), (109.6, 244.8), (0.5, 2.0), (8.6, 20.3), (0.2, 0.3), (149.8, 298.9)),
    "partial": ((26.9, 30.9), (995.8, 1819.8), (0.5, 1.2), (8.3, 20.0), (0.2, 0.3), (1041.2, 1854.6)),
    "h2d": ((21.9, 31.7), (2570.6, 3142.2), (0.8, 1.9), (7.7, 16.4), (0.2, 0.3), (2608.6, 3170.6)),
}


def test_all_of_table_2_is_shown() -> None:
    (table,) = spec.select(spec.load("paper"), ["table-2"])
    shown = {name: value for values in table.paper.values() for name, value in values.items()}
    rows = [*(f"phases_ms.{n}" for n in range(5)), "total_ms"]
    assert shown == {
        f"switch_paths.{path}.{row}.{quantile}": value
        for path, values in TABLE_2.items()
        for row, both in zip(rows, values, strict=True)
        for quantile, value in zip(("p50", "p95"), both, strict=True)
    }
    assert sum(len(values) for values in table.paper.values()) == len(shown) == 36


def test_the_order_of_slots_is_the_scheduler_s() -> None:
    """Six models that now and then have work: who has its slot when is another's turn under another rule."""
    models = tuple(f"{SMALL[n % 3]}:{n}" for n in range(6))
    several = Scenario(
        groups=(Group(hardware="paper-tp4", models=models),),
        calibration="roofline",
        admission=False,
        sessions_per_s=0.3,
    )
    trace = list(generate("mini-swe-agent", sessions=30, models=models, seed=1, max_calls=4))
    by = {how: simulate(replace(several, slot_order=how), trace).summary for how in ("configured", "arrival")}
    assert by["arrival"]["ttft_s"] != by["configured"]["ttft_s"]
