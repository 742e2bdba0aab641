"""The slot scheduler while the device is full, or says that it is: who waits, for whom, and how long."""

from __future__ import annotations

import pytest

from talaria_gpu.engine.contract import PrefixState
from talaria_gpu.sched.demand import Capacity
from talaria_gpu.sched.messages import Left, Phase, RunStep, RunSwitch, SlotOver, Switched, Turn
from talaria_gpu.sched.slots import SlotScheduler
from tests.gpu.sched.test_slots import arrive, scheduler, step


def suspended(patience_ms: float, priority: int = 0, places: int = 0) -> SlotScheduler:
    """a's second slot of 100 ms has opened at 1.0: a1 runs on, and `big` has waited for 100 ms."""
    core = scheduler(active="a", slot_ms=100, drain_ms=0, suspends=True, patience_ms=patience_ms)
    arrive(core, 0.0, "a1", "a")
    step(core, 0.0, "prefill", {"a1": ""})
    arrive(core, 0.5, "b1", "b")
    for _ in range(3):
        core.handle(0.7, Turn())
        step(core, 0.7, "decode", {"a1": ""})
    assert core.handle(0.8, Turn())[-1] == RunSwitch("b")
    core.handle(0.8, Switched("b", 0.0, [], suspended=1))
    arrive(core, 0.9, "big", "a", priority=priority)
    step(core, 0.9, "prefill", {"b1": "length"}, model="b")
    assert core.handle(0.9, Turn())[-1] == RunSwitch("a")
    arrive(core, 0.95, "b2", "b")
    core.opened("a", Capacity(max_running=places))
    core.handle(1.0, Switched("a", 0.0, []))
    assert core.handle(1.0, Turn()) == [RunStep("a", frozenset() if places == 1 else frozenset({"big"}))]
    return core


def test_p_stays_open_for_an_overdue_call_until_a_place_is_free() -> None:
    core = suspended(patience_ms=50, places=1)
    assert core.phase is Phase.P
    step(core, 1.01, "decode", {"a1": ""}, waiting=["big"])
    assert core.handle(1.01, Turn()) == [RunStep("a", frozenset())]
    step(core, 1.02, "decode", {"a1": "length"}, waiting=["big"])
    assert core.handle(1.02, Turn()) == [RunStep("a", frozenset({"big"}))]


def test_a_slot_does_not_linger_while_the_call_that_it_owes_waits() -> None:
    """It had no place in P and is not overdue; then all that ran ends. The next slot comes the sooner."""
    core = suspended(patience_ms=10_000, places=1)
    assert core.phase is Phase.D1
    core.estimates.switch("a", 150.0)
    core.estimates.switch("b", 150.0)
    for n in range(3):
        core._state.returns.finished(0.8 + n / 10, "a", "s")
        core._state.returns.arrived(0.85 + n / 10, "a", "s")
    step(core, 1.02, "decode", {"a1": "length"}, waiting=["big"])
    assert core.handle(1.02, Turn())[-1] == RunSwitch("b")


def test_what_p_asked_for_in_vain_may_enter_by_sp() -> None:
    core = suspended(patience_ms=10_000)
    core.handle(1.0, Left("big"))
    assert core.handle(1.0, Turn())[-1] == RunStep("a", frozenset())
    step(core, 1.0, "decode", {"a1": ""})
    for _ in range(2):  # b's slot, and a's again, with a continuation that waits
        core.handle(1.1, Turn())
        step(core, 1.11, "decode", {"a1": ""})
    assert core.handle(1.12, Turn())[-1] == RunSwitch("b")
    core.handle(1.2, Switched("b", 0.0, [], suspended=1))
    for rid in ("first", "second"):
        arrive(core, 1.2, rid, "a", back=True)
    step(core, 1.2, "prefill", {"b2": "length"}, model="b")
    assert core.handle(1.3, Turn())[-1] == RunSwitch("a")
    arrive(core, 1.3, "b3", "b")
    core.handle(1.3, Switched("a", 0.0, []))
    known = {rid: PrefixState(8) for rid in ("first", "second")}
    assert core.handle(1.3, Turn(known)) == [RunStep("a", frozenset({"first", "second"}))]
    step(core, 1.31, "prefill", {"first": ""}, waiting=["second"])
    assert core.handle(1.31, Turn(known)) == [RunStep("a", frozenset({"second"}))]
    step(core, 1.32, "decode", {"a1": "", "first": ""}, waiting=["second"])
    assert core.handle(1.32, Turn(known)) == [RunStep("a", frozenset({"second"}))]
    assert core.phase is Phase.SP
    step(core, 1.33, "prefill", {"second": ""})
    assert core._state.slot.counts.sp_carried == 1  # type: ignore[union-attr]


def test_a_call_that_lost_its_rows_is_not_passed_by_smaller_ones() -> None:
    """100 rows, 51 in use: `old` ran and needs 56, `back` would fit. Both are above every priority."""
    core = scheduler(active="a", slot_ms=1000, suspends=True, patience_ms=0)
    core.opened("a", Capacity(kv_tokens=100))
    arrive(core, 0.0, "a1", "a", tokens=50)
    arrive(core, 0.0, "old", "a", tokens=55)
    step(core, 0.01, "prefill", {"a1": "", "old": ""})
    arrive(core, 0.01, "b1", "b")
    arrive(core, 0.02, "back", "a", back=True, tokens=10)
    core.handle(0.02, Turn())
    step(core, 0.03, "decode", {"a1": ""}, waiting=["old", "back"])
    known = {"back": PrefixState(8), "old": PrefixState()}
    assert core.handle(0.03, Turn(known)) == [RunStep("a", frozenset())]
    step(core, 0.04, "decode", {"a1": "length"}, waiting=["old", "back"])
    assert core.handle(0.04, Turn(known)) == [RunStep("a", frozenset({"old", "back"}))]


def test_a_refused_call_that_is_overdue_is_asked_for_while_there_is_time_and_no_longer() -> None:
    core = suspended(patience_ms=50)
    arrive(core, 1.0, "back", "a", back=True)
    known = {"back": PrefixState(8)}
    for ms in range(10, 100, 10):
        step(core, 1.0 + ms / 1000, "decode", {"a1": ""}, waiting=["big", "back"])
        assert core.handle(1.0 + ms / 1000, Turn(known)) == [RunStep("a", frozenset({"big"}))], ms
        assert core.phase is Phase.P
    step(core, 1.1, "decode", {"a1": ""}, waiting=["big", "back"])
    over, switch = core.handle(1.1, Turn(known))
    assert isinstance(over, SlotOver)
    assert switch == RunSwitch("b")
    assert (over.reason, over.running, over.deferred) == ("budget", 1, 2)
    assert over.deferred_why == {"rows": 1, "time": 1}
    assert over.active_ms == pytest.approx(100)


def test_until_it_is_overdue_a_refused_call_lets_returns_by() -> None:
    core = suspended(patience_ms=10_000)
    arrive(core, 1.0, "back", "a", back=True)
    known = {"back": PrefixState(8)}
    step(core, 1.01, "decode", {"a1": ""}, waiting=["big", "back"])
    assert core.handle(1.01, Turn(known)) == [RunStep("a", frozenset({"back"}))]
    assert core.phase is Phase.SP


def test_a_refused_call_lets_nobody_of_a_lower_rank_by() -> None:
    core = suspended(patience_ms=10_000, priority=1)
    arrive(core, 1.0, "back", "a", back=True)
    step(core, 1.01, "decode", {"a1": ""}, waiting=["big", "back"])
    assert core.handle(1.01, Turn({"back": PrefixState(8)})) == [RunStep("a", frozenset())]
    assert core.phase is Phase.D1


def test_a_prefix_that_never_comes_does_not_hold_the_slot_for_more_than_its_length() -> None:
    """The host has `big`'s prefix, and the device no room for it: which looks as if it were on its way."""
    core = suspended(patience_ms=50)
    core._state.prefixes["big"] = PrefixState(host=5)
    ends = []
    for ms in range(10, 400, 10):
        step(core, 1.0 + ms / 1000, "decode", {"a1": ""}, waiting=["big"])
        effects = core.handle(1.0 + ms / 1000, Turn())
        if effects[-1] == RunSwitch("b"):
            ends.append(ms)
            break
        assert effects == [RunStep("a", frozenset({"big"}))]
    assert ends == [200]
