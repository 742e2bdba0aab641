"""Rounds on the sim engine: the same sessions under every configuration, token by token, and what SP is worth."""

from __future__ import annotations

from statistics import median

import pytest

from talaria_gpu.engine.ipc import SlotEnded
from talaria_gpu.sched.ablation import NAMES, Ablation
from talaria_gpu.sched.config import SlotConfig
from tests.gpu.engine.closed_loop import Session, run, sessions
from tests.gpu.engine.rig import Rig, make_call

DEVICE = {
    "ttft_ms": 5.0,
    "prefill_ms_per_ktoken": 60.0,
    "decode_step_ms": 5.0,
    "switch_ms": 60.0,
    "kv_capacity_tokens": 60_000,
    "max_running": 32,
}


def serve(name, models: tuple[str, ...] = ("a", "b", "c"), count: int = 12, seed: int = 1) -> tuple[Rig, list[Session]]:
    config = SlotConfig(1000.0, 0.0, ablation=Ablation.named(name), t_ttft_ms=5000.0)
    rig = Rig(models, config=config, **DEVICE)
    load = sessions(models, count, 6, seed)
    run(rig, load)
    rig.rest()
    assert rig.driver.status().idle_checked >= 1
    return rig, load


@pytest.mark.parametrize("name", NAMES)
def test_every_configuration_answers_alike(name) -> None:
    rig, load = serve(name)
    assert all(s.done == s.turns for s in load)
    slots: list[SlotEnded] = rig.of(SlotEnded)
    assert slots
    for slot in slots:
        parts = slot.p_ms + slot.d1_ms + slot.sp_ms + slot.d_ms + slot.dfin_ms + slot.linger_ms
        assert slot.active_ms == pytest.approx(parts)
        assert slot.wall_ms == pytest.approx(slot.active_ms + slot.switch_ms)
        assert slot.round_planned_ms <= 4500 + 1e-3 or "ttft" in slot.infeasible
    admitted = sum(s.sp_admitted for s in slots)
    assert (admitted > 0) == Ablation.named(name).sp


def test_sp_answers_returns_at_once_and_shortens_sessions() -> None:
    sct, ttft = {}, {}
    for name in ("talaria", "no-sp"):
        _, load = serve(name)
        sct[name] = median(s.sct_ms for s in load)
        ttft[name] = median(ms for s in load for ms in s.ttft_ms)
    assert sct["talaria"] < 0.97 * sct["no-sp"]
    assert ttft["talaria"] < 0.1 * ttft["no-sp"]


def test_with_one_model_the_configurations_do_not_differ() -> None:
    end = set()
    for name in NAMES:
        rig, _ = serve(name, ("a",), 6)
        end.add(round(rig.ms, 6))
        assert not rig.of(SlotEnded)
    assert len(end) == 1


def test_the_driver_sleeps_while_a_slot_lingers_and_wakes_for_the_return() -> None:
    rig = Rig(("a", "b"), config=SlotConfig(2000.0), ttft_ms=5, decode_step_ms=5, switch_ms=300)
    rig.submit(make_call("b0", [7] * 20, "b", new=2), make_call("a0", [5] * 20, new=2, session="s"))
    rig.rest()
    for n in range(1, 6):
        rig.submit(make_call(f"a{n}", [5] * (20 + 4 * n), new=2, session="s", is_continuation=True))
        if n == 4:
            rig.submit(make_call("b1", [8] * 20, "b", new=2))
        rig.until(rig.ms + (60 if n > 1 else 400))
    before = rig.turns
    assert rig.driver.status().active == "a"
    rig.rest()
    lingered = [slot for slot in rig.of(SlotEnded) if slot.linger_ms > 0]
    assert [(s.model, s.sp_admitted) for s in lingered] == [("a", 1)]
    assert rig.turns - before < 30, "nothing is polled meanwhile"
    assert rig.finished()["b1"] == "length"
