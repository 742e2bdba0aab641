"""Models that are closed are opened on demand, and closed again (Eq. 2), by the production router and instances."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from talaria_cli.simulate import SimulateOptions, groups, run_simulate
from talaria_replay.generate import generate
from talaria_replay.sim import profiles
from talaria_replay.sim.run import simulate
from talaria_replay.sim.scenario import Group, Scenario, ScenarioError
from talaria_replay.trace import Call
from talaria_router import ranking, replicas

MODELS = ("qwen3-32b", "qwen2.5-32b")
BUSY = Scenario(
    groups=(
        Group(hardware="paper-tp4", models=MODELS),
        Group(hardware="paper-tp4", models=MODELS, open=MODELS[1:]),
    ),
    calibration="roofline",
    tau_s=0.0,
    t_ttft_s=3.0,
    overload="queue",
)
"""One instance has both models open, the other one of them; more calls come than the first admits in time."""


def made(models: tuple[str, ...], sessions: int = 24, calls: int = 2, seed: int = 1) -> list[Call]:
    shape = generate("paper", sessions=sessions, models=models, seed=seed, max_calls=calls, max_context_tokens=60_000)
    return list(shape)


@pytest.fixture(scope="module")
def before() -> dict[str, Any]:
    return simulate(BUSY, made(MODELS)).summary


def test_a_replica_is_opened_where_it_is_worth_its_price(before: dict[str, Any]) -> None:
    assert before["replicas"] == {"opened": 1, "closed": 0, "refused": 0}


def test_a_changed_gain_changes_the_result(monkeypatch: pytest.MonkeyPatch, before: dict[str, Any]) -> None:
    """Eq. 2's left side: no replica is ever worth anything."""
    monkeypatch.setattr(ranking, "replica_gain_ms", lambda *_: 0.0)
    after = simulate(BUSY, made(MODELS)).summary
    assert after["replicas"]["opened"] == 0
    assert after["ttft_s"] != before["ttft_s"]


def test_a_changed_price_changes_the_result(before: dict[str, Any]) -> None:
    """Eq. 2's right side."""
    after = simulate(msgspec.structs.replace(BUSY, nu_ms=1e9), made(MODELS)).summary
    assert after["replicas"]["opened"] == 0
    assert after["ttft_s"] != before["ttft_s"]


def test_idle_replicas_are_closed_and_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    quick = msgspec.structs.replace(BUSY, replica_idle_s=2.0, stagger_s=4.0)
    calls = made(MODELS[1:], 6) + made(MODELS[:1], 6, seed=2)
    assert simulate(quick, calls).summary["replicas"]["closed"] > 0
    monkeypatch.setattr(replicas, "replica_gain_ms", lambda *_: 1e12)
    assert simulate(quick, calls).summary["replicas"]["closed"] == 0, "what it costs to close it is the router's rule"


@pytest.mark.parametrize("disk_gb_s", [5.0, 50.0])
def test_a_model_that_nobody_has_open_is_read_from_disk_first(disk_gb_s: float) -> None:
    scenario = msgspec.structs.replace(
        BUSY, groups=BUSY.groups[1:], hardware={"disk_gb_s": disk_gb_s}, overload="reject", t_ttft_s=60.0
    )
    (call, *_) = simulate(scenario, made(MODELS[:1], 1, 1)).calls
    read_s = profiles.model(MODELS[0]).weight_gb / disk_gb_s
    assert read_s < call.ttft_s < read_s + 3.0
    assert not call.error


def test_others_serve_on_while_a_model_is_read() -> None:
    """Macro-steps end when the files have been read, and what runs does not wait for them."""
    scenario = msgspec.structs.replace(
        BUSY, groups=BUSY.groups[1:], hardware={"disk_gb_s": 2.0}, admission=False, stagger_s=0.5
    )
    calls = made(MODELS[1:], 1, 3) + made(MODELS[:1], 1, 1, seed=2)
    result = simulate(scenario, calls)
    first = next(r for r in result.calls if r.model == MODELS[1])
    other = next(r for r in result.calls if r.model == MODELS[0])
    assert first.ttft_s < 5.0
    assert other.sent_s < first.done_s < other.first_s


def test_which_are_open_is_said_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    (group,) = groups(["paper-tp4x2:qwen3-32b,-qwen2.5-32b"], [])
    assert (group.models, group.open, group.count) == (("qwen3-32b", "qwen2.5-32b"), ("qwen3-32b",), 2)
    (plain,) = groups(["paper-tp4"], list(MODELS))
    assert plain.open is None
    options = SimulateOptions(
        "paper", ["paper-tp4:qwen3-32b,-qwen2.5-32b"], [], [], 2, 1, {"calibration": "roofline"}, None, True
    )
    assert run_simulate(options) == 0
    assert json.loads(capsys.readouterr().out)["summary"]["replicas"]["opened"] == 1


@pytest.mark.parametrize("opened", [(), ("qwen3-235b",)])
def test_open_ones_must_be_its_own(opened: tuple[str, ...]) -> None:
    wrong = msgspec.structs.replace(BUSY, groups=(Group(hardware="paper-tp4", models=MODELS, open=opened),))
    with pytest.raises(ScenarioError, match=r"groups\[0\]\.open: expected one or more of"):
        simulate(wrong, made(MODELS[:1], 1, 1))
