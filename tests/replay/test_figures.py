"""Figures mean what they are compared with."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from talaria_replay.generate import generate
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
