"""The slot driver: one step or switch a turn, deadlines, measurements, and an engine that fails."""

from __future__ import annotations

import subprocess
import sys

import pytest

from talaria_common.clock import ManualClock
from talaria_common.errors import EngineError
from talaria_common.settings import InstanceSettings
from talaria_gpu.engine.contract import StepResult, SwitchFailedError, SwitchTiming
from talaria_gpu.engine.driver import SlotDriver
from talaria_gpu.engine.ipc import Closed, Opened, SlotEnded, Status, Stepped, Switched
from talaria_gpu.engine.sim import SimEngine, expected_tokens
from talaria_gpu.sched.slots import SlotConfig
from tests.gpu.engine.rig import Rig, make_call


def test_a_turn_is_one_step_or_one_switch() -> None:
    rig = Rig(ttft_ms=0, decode_step_ms=0, switch_ms=0)
    rig.submit(make_call("a", [1], new=3), make_call("b", [2], "b", new=2))
    kinds = []
    while rig.driver.next_wakeup() == 0:
        before = len(rig.reports)
        rig.turn()
        kinds.append([type(r).__name__ for r in rig.reports[before:]])
    step, switch = ["Stepped"], ["Switched", "Status"]
    assert kinds == [switch, step, step, step, ["SlotEnded", *switch], step, step]


def test_slots_and_switches_are_reported_with_their_times() -> None:
    rig = Rig(slot_ms=100, drain_ms=30, switch_ms=20)
    rig.submit(make_call("a", [1, 2], new=100), make_call("b", [1, 2], "b", new=3))
    rig.rest()
    first, second = rig.of(SlotEnded)[:2]
    assert (first.model, first.reason, first.admitted) == ("a", "budget", 1)
    assert (first.suspended, first.retracted, first.deferred) == (0, 1, 0)
    assert 100 <= first.active_ms <= 100 + 2 * 10
    assert first.active_ms == pytest.approx(
        first.p_ms + first.d1_ms + first.sp_ms + first.d_ms + first.dfin_ms + first.linger_ms
    )
    assert (first.planned_ms, first.round, first.infeasible) == (pytest.approx(100), 1, "")
    assert first.round_planned_ms == pytest.approx(220, abs=25)
    assert first.switch_ms == pytest.approx(20)
    assert first.wall_ms == pytest.approx(first.active_ms + first.switch_ms)
    assert (second.model, second.reason, second.prefills, second.decodes) == ("b", "idle", 1, 2)
    status = rig.driver.status()
    assert status.switches == len(rig.of(Switched)) == 3
    assert status.switch_ms == {"a": pytest.approx(20), "b": pytest.approx(20)}
    assert status.decode_step_ms["a"] == pytest.approx(10)
    assert status.active == "a"
    assert len(rig.of(Status)) == 3


def test_a_deadline_ends_waiting_and_running_calls_while_the_engine_is_busy() -> None:
    rig = Rig(ttft_ms=1000)
    start = rig.clock.now()
    rig.submit(
        make_call("running", [1], deadline=start + 0.5),
        make_call("waiting", [1], "b", deadline=start + 0.3),
        make_call("fine", [2], deadline=start + 60),
    )
    rig.rest()
    assert rig.finished() == {"running": "deadline", "waiting": "deadline", "fine": "length"}
    ends = {t.rid: at for at, r in zip(rig.at, rig.reports, strict=True) if isinstance(r, Stepped) for t in r.result.tokens if t.finished}  # fmt: skip
    assert ends["running"] == pytest.approx(500)
    assert ends["waiting"] == pytest.approx(300)
    assert rig.tokens("running") == []
    assert rig.driver.status().idle_checked == 1


def test_an_abort_is_confirmed_once_and_silences_the_call() -> None:
    rig = Rig(models=("a",))
    rig.submit(make_call("r", [1, 2, 3], new=1000))
    rig.until(100)
    rig.abort("r")
    rig.abort("r")
    rig.abort("never seen")
    before = len(rig.reports)
    rig.rest()
    assert len(rig.reports) == before
    assert [s.finished for s in rig.steps("r")].count("abort") == 1
    assert rig.tokens("r") == expected_tokens([1, 2, 3], len(rig.tokens("r")))
    assert rig.engine.load("a").running == 0


def test_a_rid_in_use_is_refused_and_the_first_call_goes_on() -> None:
    rig = Rig(models=("a",))
    rig.submit(make_call("r", [1, 2, 3]), make_call("r", [4]))
    assert rig.finished() == {"r": "invalid_request"}
    rig.rest()
    assert rig.tokens("r") == expected_tokens([1, 2, 3], 4)


def test_the_engine_is_checked_once_each_time_it_has_become_idle() -> None:
    rig = Rig(models=("a",))
    rig.rest()
    assert rig.driver.status().idle_checked == 0
    for n in (1, 2):
        rig.submit(make_call(f"r{n}", [1, 2, 3]))
        rig.rest()
        assert rig.driver.status().idle_checked == n
        assert rig.driver.next_wakeup() is None


def test_a_leak_is_fatal() -> None:
    rig = Rig(models=("a",))
    rig.submit(make_call("r", [1, 2, 3]))
    rig.engine._pools["a"]._own += 1
    with pytest.raises(EngineError, match="1 rows"):
        rig.rest()


class Stuck(SimEngine):
    """Runs nothing, whatever waits."""

    def step(self, admit: frozenset[str] | None) -> StepResult:
        self.asked = getattr(self, "asked", 0) + 1
        return StepResult(kind="idle")


def test_an_engine_that_runs_nothing_is_asked_ever_more_slowly_and_then_given_up() -> None:
    clock = ManualClock()
    engine = Stuck(InstanceSettings(id="i-0", engine="sim", models=("a",)), clock)
    driver = SlotDriver(engine, SlotConfig(100, 10), clock, stuck_s=20)
    driver.submit(make_call("r", [1]))
    start = clock.now()

    def drive() -> None:
        while (wait := driver.next_wakeup()) is not None:
            clock.advance(wait)
            driver.turn(clock.now())

    with pytest.raises(EngineError, match="calls wait"):
        drive()
    assert 20 < clock.now() - start < 21
    assert engine.asked < 450


def test_models_are_closed_and_opened_at_run_time() -> None:
    rig = Rig()
    assert [type(r) for r in rig.driver.close_model("b")] == [Closed, Status]
    rig.submit(make_call("r", [1], model="b"), make_call("s", [1, 2], model="a"))
    assert rig.finished() == {"r": "model_not_found"}
    assert [type(r) for r in rig.driver.close_model("a")] == [Opened], "it has a call: it stays"
    assert rig.driver.open("b") == []
    rig.rest()
    assert [r.info.name for r in rig.of(Opened)] == ["b"]
    rig.submit(make_call("t", [1], model="b"))
    rig.rest()
    assert rig.finished() == {"r": "model_not_found", "s": "length", "t": "length"}
    assert rig.driver.open("nobody") == []
    rig.rest()
    assert "not configured" in rig.of(Closed)[-1].error


def test_a_model_is_opened_though_nothing_else_is_to_be_done() -> None:
    """The worker asks when to come back both before and after it slept, and turns only when that is now."""

    class Slow(SimEngine):
        asked = 0

        def open_model(self, model: str) -> bool:
            self.asked += 1
            return self.asked > 3 and super().open_model(model)

    rig = Rig()
    rig.engine = Slow(rig.instance, rig.clock)
    rig.driver = SlotDriver(rig.engine, SlotConfig(100, 10), rig.clock)
    rig.driver.close_model("b")
    assert rig.driver.next_wakeup() is None
    rig.driver.open("b")
    for n in range(4):
        assert rig.driver.next_wakeup() == 0, "time has come"
        reports = rig.driver.turn(rig.clock.now())
        assert bool(reports) == (n == 3)
        if n < 3:
            wait = rig.driver.next_wakeup()
            assert wait is not None
            assert 0 < wait <= 0.1
            rig.clock.advance(wait)
    assert rig.engine.asked == 4


class Broken(SimEngine):
    """Cannot be switched to b."""

    def switch(self, model: str) -> SwitchTiming:
        if model == "b":
            raise SwitchFailedError("b", self.active, "its image is damaged")
        return super().switch(model)


@pytest.mark.parametrize("first", ["a", "b"])
def test_a_failed_switch_costs_its_model_only(first: str) -> None:
    rig = Rig()
    rig.engine = Broken(rig.instance, rig.clock)
    rig.driver = SlotDriver(rig.engine, SlotConfig(100, 10), rig.clock)
    rig.submit(make_call("x", [1], model=first, new=40))
    if first == "a":
        rig.until(60)
    rig.submit(make_call("r", [1], model="b"), make_call("s", [1, 2], model="a"))
    rig.rest()
    ends = rig.finished()
    assert (ends["r"], ends["s"], ends["x"]) == ("error", "length", "length" if first == "a" else "error")
    assert ["its image is damaged" in r.error for r in rig.of(Closed)] == [True]
    rig.submit(make_call("t", [1], model="b"), make_call("u", [1], model="a"))
    rig.rest()
    assert (rig.finished()["t"], rig.finished()["u"]) == ("model_not_found", "length")


def test_none_of_it_imports_torch() -> None:
    code = (
        "import sys, talaria_gpu.engine.worker, talaria_gpu.engine.sim, talaria_gpu.sched.slots; "
        "sys.exit(any(m in sys.modules for m in ('torch', 'sglang', 'transformers', 'numpy')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
