"""The slot scheduler turn by turn: the named situations."""

from __future__ import annotations

import pytest

from talaria_gpu.engine.contract import PrefixState, StepResult, StepTokens
from talaria_gpu.sched.config import SlotConfig
from talaria_gpu.sched.demand import Capacity
from talaria_gpu.sched.messages import (
    Arrived,
    Call,
    Left,
    Phase,
    RunStep,
    RunSwitch,
    SlotOver,
    Stepped,
    Switched,
    Tick,
    Turn,
)
from talaria_gpu.sched.slot import Slot
from talaria_gpu.sched.slots import SlotScheduler

MODELS = ("a", "b", "c")


def test_an_arrival_at_an_idle_instance_is_switched_in_at_once() -> None:
    core = scheduler()
    assert core.handle(0.0, Turn()) == []
    arrive(core, 5.0, "r1", "b")
    assert core.handle(5.0, Turn()) == [RunSwitch("b")]


def test_an_idle_model_gives_way_at_once_and_a_busy_one_after_its_slot() -> None:
    core = scheduler(active="a")
    arrive(core, 1.0, "r1", "a")
    assert core.handle(1.0, Turn()) == [RunStep("a", None)]
    step(core, 1.1, "prefill", {"r1": ""})
    arrive(core, 1.1, "r2", "b")
    assert core.handle(1.1, Turn()) == [RunStep("a", frozenset())]  # its slot has 100 ms left
    step(core, 1.15, "decode", {"r1": "length"})
    over, switch = core.handle(1.15, Turn())
    assert switch == RunSwitch("b")
    assert isinstance(over, SlotOver)
    assert over.reason == "idle"
    assert over.active_ms == pytest.approx(150)  # 1.0 to 1.15: not the idle second before


def test_alone_everything_may_prefill_and_the_slot_is_never_over() -> None:
    core = scheduler(active="a", slot_ms=10)
    seen = [core.phase]
    arrive(core, 0.0, "r1", "a")
    for kind in ("prefill", "decode", "prefill", "decode", "decode"):
        assert core.handle(50.0, Turn()) == [RunStep("a", None)]
        step(core, 50.0, kind, {"r1": ""})
        seen.append(core.phase)
    assert seen == [Phase.P, Phase.P, Phase.D1, Phase.P, Phase.D1, Phase.D1]


def test_a_slot_goes_through_its_phases() -> None:
    """P with what waited, D1, an SP for the return, D, Dfin when the slot's time is up."""
    core = scheduler(active="a", slot_ms=100, drain_ms=20, suspends=True)
    arrive(core, 0.0, "a1", "a")
    arrive(core, 0.0, "b1", "b")
    assert core.handle(0.0, Turn()) == [RunStep("a", frozenset({"a1"}))]
    assert core.phase is Phase.P
    arrive(core, 0.005, "new", "a")
    arrive(core, 0.006, "back", "a", back=True)
    arrive(core, 0.007, "elsewhere", "a", back=True)
    step(core, 0.01, "prefill", {"a1": ""}, waiting=["new", "back", "elsewhere"])
    cached = {"back": PrefixState(host=8), "elsewhere": PrefixState(), "new": PrefixState(8)}
    assert set(core.asks()) == {"new", "back", "elsewhere", "b1"}
    assert core.handle(0.01, Turn(cached)) == [RunStep("a", frozenset())]
    assert core.phase is Phase.D1
    step(core, 0.02, "decode", {"a1": ""}, waiting=["new", "back", "elsewhere"])
    assert core.handle(0.02, Turn()) == [RunStep("a", frozenset({"back"}))]
    assert core.phase is Phase.SP
    step(core, 0.03, "prefill", {"back": ""}, waiting=["new", "elsewhere"])
    assert core.handle(0.03, Turn(cached)) == [RunStep("a", frozenset())]
    assert core.phase is Phase.D
    for n in range(4, 11):
        step(core, n / 100, "decode", {"a1": "", "back": ""}, waiting=["new", "elsewhere"])
        effects = core.handle(n / 100, Turn(cached))
        if n < 8:
            assert effects == [RunStep("a", frozenset())]
    over = effects[0]
    assert isinstance(over, SlotOver)
    assert (over.admitted, over.sps, over.sp_admitted, over.sp_deferred, over.deferred) == (2, 1, 1, 1, 2)
    assert (over.reason, over.running, over.prefills, over.decodes) == ("budget", 2, 2, 8)
    assert over.active_ms == pytest.approx(100)
    assert (over.p_ms, over.sp_ms) == (pytest.approx(10), pytest.approx(10))


def test_without_sp_the_return_waits() -> None:
    from talaria_gpu.sched.ablation import Ablation

    core = SlotScheduler(MODELS, SlotConfig(100, ablation=Ablation.named("no-sp")), "a", 0.0)
    arrive(core, 0.0, "a1", "a")
    arrive(core, 0.0, "b1", "b")
    core.handle(0.0, Turn())
    step(core, 0.01, "prefill", {"a1": ""})
    arrive(core, 0.01, "back", "a", back=True)
    step(core, 0.02, "decode", {"a1": ""}, waiting=["back"])
    assert core.handle(0.02, Turn({"back": PrefixState(8)})) == [RunStep("a", frozenset())]


def test_dfin_is_left_when_nobody_waits_any_more() -> None:
    core = scheduler(active="a", slot_ms=100, drain_ms=0)
    arrive(core, 0.0, "r1", "a")
    step(core, 0.05, "prefill", {"r1": ""})
    arrive(core, 0.06, "r2", "b")
    assert core.handle(0.2, Turn()) == [RunStep("a", frozenset())]
    assert core.phase is Phase.DFIN
    assert core.slot_remaining_ms(0.2) == 0
    core.handle(0.21, Left("r2"))
    assert core.handle(0.22, Turn()) == [RunStep("a", None)]


def test_deadlines_abort_waiting_and_running_calls_even_while_the_engine_is_busy() -> None:
    core = scheduler(active="a")
    arrive(core, 0.0, "r1", "a", deadline=1.0)
    arrive(core, 0.0, "r2", "b", deadline=2.0)
    assert core.next_deadline() == 1.0
    assert core.handle(0.9, Tick()) == []
    (abort,) = core.handle(1.0, Tick())
    assert (abort.rid, abort.model) == ("r1", "a")  # type: ignore[union-attr]
    assert core.next_deadline() == 2.0
    assert core.model_of("r1") is None
    # The engine may still hold r1's rows: one step to let them go, before the switch that r2 wants.
    assert core.handle(1.0, Turn()) == [RunStep("a", frozenset())]
    step(core, 1.0, "idle", {})
    assert isinstance(core.handle(1.0, Turn())[-1], RunSwitch)


def test_the_clock_of_a_slot_runs_while_any_call_is_here_and_no_longer() -> None:
    """A call of another model keeps it going, though the slot's own are gone and a step of theirs is under way."""
    core = scheduler(active="a")
    arrive(core, 1.0, "a1", "a")
    assert core.handle(1.0, Turn()) == [RunStep("a", None)]
    arrive(core, 1.1, "b1", "b", deadline=1.3)
    core.handle(1.2, Left("a1"))
    core.handle(1.3, Tick())  # nobody is left: 300 ms so far
    arrive(core, 1.5, "b2", "b")
    step(core, 1.6, "prefill", {})
    over, switch = core.handle(1.6, Turn())
    assert isinstance(over, SlotOver)
    assert over.active_ms == pytest.approx(400)
    assert switch == RunSwitch("b")
    core.handle(1.7, Left("b2"))
    arrive(core, 1.8, "a2", "a")
    core.handle(2.0, Switched("b", 400.0, []))
    over, switch = core.handle(2.1, Turn())
    assert isinstance(over, SlotOver)
    assert over.active_ms == pytest.approx(100), "a2 waits from the slot's beginning"
    assert switch == RunSwitch("a")


@pytest.mark.parametrize("first", ["b", "a"])
def test_what_a_slot_did_before_a_rest_is_no_part_of_what_it_promises(first: str) -> None:
    """Its iterations, and whom it owes a first token: whichever model's call comes first, before anything is decided."""
    core = scheduler(active="a", slot_ms=100, suspends=True)
    arrive(core, 0.0, "a1", "a")
    core.handle(0.0, Turn())
    step(core, 0.01, "prefill", {"a1": ""})
    for n in range(50):
        step(core, 0.011 + n / 1000, "decode", {"a1": "" if n < 49 else "length"})
    core.handle(0.061, Turn())
    for model in (first, "ab".replace(first, "")):
        arrive(core, 10.0, f"{model}2", model)
    assert core.handle(10.0, Turn()) == [RunStep("a", frozenset({"a2"}))]
    slot = core._state.slot
    assert slot is not None
    assert slot.plan is not None
    assert slot.plan.decodes > 0
    assert (slot.owed, slot.decoded, slot.opened) == ("a2", 0, 10.0)
    step(core, 10.11, "prefill", {"a2": ""})
    step(core, 10.12, "decode", {"a2": ""})
    assert core.handle(10.12, Turn()) == [RunStep("a", frozenset())], "its protected iterations are still to come"


def test_a_round_is_over_where_the_last_call_is_dropped() -> None:
    core = scheduler(active="a", slot_ms=100)
    arrive(core, 0.0, "a1", "a")
    arrive(core, 0.0, "b1", "b", deadline=0.05)
    core.handle(0.0, Turn())
    step(core, 0.04, "prefill", {"a1": "length"})
    core.handle(0.05, Tick())
    arrive(core, 30.0, "b2", "b")
    over, switch = core.handle(30.0, Turn())
    assert isinstance(over, SlotOver)
    assert over.active_ms == pytest.approx(50)
    assert over.round_ms < 1000, "nobody waited for anybody in the meantime"
    assert switch == RunSwitch("b")


def test_the_deadline_heap_forgets_finished_calls() -> None:
    core = scheduler(active="a")
    for i in range(5000):
        arrive(core, 0.0, f"r{i}", "a", deadline=1e6 + i)
        step(core, 0.0, "prefill", {f"r{i}": "length"})
    assert len(core._state.deadlines) < 200
    assert core.resting


def test_alone_priorities_go_first_and_patience_lifts_the_overdue() -> None:
    """The engine takes what it may in the order of the queue, and lets nobody by."""
    core = scheduler(active="a", patience_ms=1000)
    arrive(core, 0.0, "low", "a")
    arrive(core, 0.0, "high", "a", priority=5)
    arrive(core, 0.0, "high2", "a", priority=5)
    assert core.handle(0.0, Turn()) == [RunStep("a", frozenset({"high", "high2"}))]
    step(core, 0.1, "prefill", {"high": "", "high2": ""}, waiting=["low"])
    assert core.handle(0.1, Turn()) == [RunStep("a", None)]
    arrive(core, 0.9, "mid", "a", priority=2)
    arrive(core, 1.1, "high3", "a", priority=5)
    assert core.handle(1.1, Turn()) == [RunStep("a", frozenset({"low", "high3"}))]  # low has waited for 1.1 s


def test_alone_the_nearer_deadline_goes_first_within_a_priority() -> None:
    """A hot instance, too, has no rounds; deadlines that differ by less than a quarter of a second count as one."""
    core = SlotScheduler(("a",), SlotConfig(), "a", 0.0)
    for rid, deadline in (("whenever", 0.0), ("late", 600.0), ("soon", 30.0), ("sooner", 29.9), ("soon2", 30.0)):
        arrive(core, 0.0, rid, "a", deadline=deadline)
    assert core.handle(0.0, Turn()) == [RunStep("a", frozenset({"sooner"}))]
    step(core, 0.1, "prefill", {"sooner": ""}, waiting=["whenever", "late", "soon", "soon2"])
    assert core.handle(0.1, Turn()) == [RunStep("a", frozenset({"soon", "soon2"}))]
    step(core, 0.2, "prefill", {"soon": "", "soon2": ""}, waiting=["whenever", "late"])
    assert core.handle(0.2, Turn()) == [RunStep("a", frozenset({"late"}))]
    step(core, 0.3, "prefill", {"late": ""}, waiting=["whenever"])
    arrive(core, 0.4, "first", "a", priority=1, deadline=700.0)
    assert core.handle(0.4, Turn()) == [RunStep("a", frozenset({"first"}))]


def test_alone_what_stands_in_order_is_the_engine_s_to_choose() -> None:
    core = SlotScheduler(("a",), SlotConfig(), "a", 0.0)
    for i, deadline in enumerate((60.0, 60.1, 60.05, 61.0, 0.0)):
        arrive(core, i / 100, f"r{i}", "a", deadline=deadline)
    assert core.handle(0.1, Turn()) == [RunStep("a", None)]


def test_in_a_round_p_takes_the_urgent_first_and_leaves_what_does_not_fit() -> None:
    """1 ms a token, slots of about 100 ms: the owed first, then priority, then the nearer deadline."""
    core = scheduler(slot_ms=100, suspends=True)
    arrive(core, 0.0, "warm", "a", tokens=10)
    core.handle(0.0, Turn())
    core.handle(0.0, Switched("a", 0.0))
    step(core, 0.01, "prefill", {"warm": "length"}, tokens=10)
    arrive(core, 1.0, "b1", "b", tokens=1)
    core.handle(1.0, Turn())
    core.handle(1.0, Switched("b", 0.0))
    step(core, 1.0, "prefill", {"b1": ""}, model="b", tokens=1)
    for rid, priority, deadline in (("low", 0, 0.0), ("soon", 1, 50.0), ("late", 1, 90.0), ("vip", 2, 0.0)):
        arrive(core, 1.0, rid, "a", tokens=45, priority=priority, deadline=deadline)
    core.handle(1.0, Turn())
    step(core, 9.0, "decode", {"b1": "length"}, model="b")
    assert core.handle(9.0, Turn())[-1] == RunSwitch("a")
    arrive(core, 9.0, "b2", "b", tokens=1)
    core.handle(9.0, Switched("a", 0.0))
    core._state.slot.end = 9.1  # type: ignore[union-attr]
    (order,) = core.handle(9.0, Turn())
    assert order == RunStep("a", frozenset({"vip", "soon"}))


def test_a_batch_does_not_promise_more_rows_than_there_are() -> None:
    core = SlotScheduler(("a", "b"), SlotConfig(1000), "a", 0.0, {"a": Capacity(kv_tokens=100, max_running=8)})
    arrive(core, 0.0, "b1", "b")
    for rid in ("r1", "r2", "r3"):
        arrive(core, 0.0, rid, "a", tokens=40)
    assert core.handle(0.0, Turn()) == [RunStep("a", frozenset({"r1", "r2"}))]


def test_retracted_calls_stand_before_every_priority() -> None:
    core = scheduler(active="a", slot_ms=10, drain_ms=0)
    arrive(core, 0.0, "old", "a")
    step(core, 0.0, "prefill", {"old": ""})
    arrive(core, 0.1, "other", "b")
    for _ in range(3):
        core.handle(0.1, Turn())
        step(core, 0.1, "decode", {"old": ""})
    assert isinstance(core.handle(0.1, Turn())[-1], RunSwitch)
    core.handle(0.2, Switched("b", 100.0, ["old"], 0, 1))
    arrive(core, 0.2, "vip", "a", priority=9)
    step(core, 0.2, "prefill", {"other": "length"}, model="b")
    assert core.handle(0.2, Turn())[-1] == RunSwitch("a")
    core.handle(0.3, Switched("a", 100.0))
    assert core.handle(0.3, Turn()) == [RunStep("a", None)]
    assert list(core._state.queues["a"].waiting) == ["old", "vip"], "as the engine takes them"


def test_suspended_calls_go_on_without_waiting() -> None:
    core = scheduler(active="a", slot_ms=10)
    arrive(core, 0.0, "old", "a")
    step(core, 0.0, "prefill", {"old": ""})
    arrive(core, 0.1, "other", "b")
    core.handle(0.1, Turn())
    step(core, 0.2, "decode", {"old": ""})
    core.handle(0.2, Turn())
    core.handle(0.2, Switched("b", 100.0, [], 1, 0))
    assert not core._state.queues["a"].waiting
    step(core, 0.2, "prefill", {"other": ""}, model="b")
    core.handle(0.2, Turn())
    step(core, 9.0, "decode", {"other": ""}, model="b")
    assert core.handle(9.0, Turn())[-1] == RunSwitch("a")
    core.handle(9.1, Switched("a", 100.0, [], 1, 0))
    assert core.handle(9.1, Turn()) == [RunStep("a", frozenset())]
    assert core.phase is Phase.D1


def test_a_prefix_on_its_way_does_not_end_p_but_a_full_device_does() -> None:
    """The engine decodes though a batch is admitted: one call's prefix is being restored, the other found no room."""
    core = scheduler(active="a", slot_ms=1000, suspends=True)
    arrive(core, 0.0, "first", "a")
    arrive(core, 0.0, "b1", "b")
    core.handle(0.0, Turn())
    step(core, 0.01, "prefill", {"first": ""})
    arrive(core, 0.01, "coming", "a", back=True)
    arrive(core, 0.01, "big", "a", back=True)
    known = {"coming": PrefixState(host=5), "big": PrefixState(5)}
    core.handle(0.01, Turn(known))
    step(core, 0.02, "decode", {"first": ""}, waiting=["coming", "big"])
    assert core.handle(0.02, Turn(known)) == [RunStep("a", frozenset({"coming", "big"}))]
    step(core, 0.03, "decode", {"first": ""}, waiting=["coming", "big"])
    assert core.handle(0.03, Turn(known)) == [RunStep("a", frozenset({"coming"}))]


def test_an_engine_that_runs_nothing_cannot_hold_the_slot() -> None:
    core = scheduler(active="a", slot_ms=100, drain_ms=0)
    arrive(core, 0.0, "r1", "a")
    arrive(core, 0.0, "r2", "b")
    step(core, 0.2, "idle", {}, waiting=["r1"])
    over, switch = core.handle(0.2, Turn())
    assert isinstance(over, SlotOver)
    assert over.deferred == 1
    assert switch == RunSwitch("b")


def test_an_idle_slot_lingers_for_a_return_that_is_cheaper_than_two_switches() -> None:
    core = scheduler(active="a", slot_ms=2000)
    for n in range(3):  # a session that comes back after 100 ms
        arrive(core, n / 10, f"a{n}", "a", back=n > 0, session="s")
        step(core, n / 10, "prefill", {f"a{n}": "length"})
    core.estimates.switch("a", 150.0)
    core.estimates.switch("b", 150.0)
    arrive(core, 0.25, "b1", "b")
    assert core.handle(0.25, Turn()) == []
    assert core.linger_until(0.25) == pytest.approx(0.2 + 0.2)  # twice the gap after the last answer
    arrive(core, 0.3, "a3", "a", back=True, session="s")
    assert core.linger_until(0.3) == 0.3  # the return's prefix has to be looked up
    assert core.handle(0.3, Turn({"a3": PrefixState(4)})) == [RunStep("a", frozenset({"a3"}))]
    assert core.phase is Phase.SP
    step(core, 0.31, "prefill", {"a3": "length"})
    assert core.handle(0.31, Turn()) == []
    over, switch = core.handle(0.7, Turn())
    assert isinstance(over, SlotOver)
    assert over.linger_ms == pytest.approx(50 + 390)
    assert switch == RunSwitch("b")


def test_the_way_back_from_a_failed_switch_is_a_slot_but_no_measure_of_switches() -> None:
    core = scheduler(active="a", slot_ms=10)
    core.estimates.switch("a", 100.0)
    arrive(core, 0.0, "r1", "a")
    step(core, 0.0, "prefill", {"r1": ""})
    arrive(core, 0.1, "r2", "b")
    core.handle(0.1, Turn())
    for _ in range(3):
        step(core, 0.2, "decode", {"r1": ""})
        last = core.handle(0.2, Turn())[-1]
    assert last == RunSwitch("b")
    core.handle(5.2, Left("r2"))
    core.handle(5.2, Switched("a", 5000.0, [], suspended=1, failed=True))
    assert core.active == "a"
    assert core.estimates.to_switch_ms("a") == 100.0
    assert core.handle(5.2, Turn()) == [RunStep("a", None)]


@pytest.mark.parametrize(("slot_ms", "said"), [(100, ()), (2000, ("ttft",))])
def test_a_model_that_joins_a_round_gets_what_is_left_of_it(slot_ms: float, said: tuple[str, ...]) -> None:
    """Rounds may take 900 ms. a and b have taken 200 of them, or all, when c's slot is planned."""
    core = scheduler(active="a", slot_ms=slot_ms, drain_ms=0, t_ttft_ms=1000, suspends=True)
    core.estimates.step("c", StepResult(kind="decode", wall_ms=10.0))
    for model, rid in (("a", "a1"), ("b", "b1")):
        arrive(core, 0.0, rid, model)
    switched = []
    for ms in range(10, 1300, 10):
        now, effects = ms / 1000, core.handle(ms / 1000, Turn())
        model = core.active or ""
        if isinstance(effects[-1], RunSwitch):
            switched.append(effects[-1].model)
            core.handle(now, Switched(effects[-1].model, 0.0, [], suspended=1))
            if switched[-1] == "c":
                break
        else:
            kind = "prefill" if core._state.queues[model].waiting else "decode"
            step(core, now, kind, {f"{model}1": ""}, model=model)
        if switched == ["b"] and core.model_of("c1") is None:
            arrive(core, now, "c1", "c", tokens=1)
    plan = core.plan
    assert plan is not None
    assert switched == ["b", "c"]
    assert list(plan.slots) == ["c"]
    assert plan.infeasible == said
    assert plan.round_ms == pytest.approx(now * 1000 + plan.slots["c"].length_ms)
    assert (plan.round_ms <= 900) == (not said)


def test_calls_that_will_be_late_are_counted() -> None:
    core = scheduler(active="a", slot_ms=1000)
    core.estimates.switch("b", 400.0)
    arrive(core, 0.0, "a1", "a")
    core.handle(0.0, Turn())
    step(core, 0.01, "prefill", {"a1": ""}, tokens=4)
    arrive(core, 0.01, "b1", "b", deadline=0.3)
    arrive(core, 0.01, "b2", "b", deadline=5.0)
    core.handle(0.01, Turn())
    assert core.at_risk(0.01) == 1
    core.handle(0.01, Left("b1"))
    assert core.at_risk(0.01) == 0


def scheduler(active: str | None = None, slot_ms: float = 200, drain_ms: float = 50, **kw) -> SlotScheduler:
    return SlotScheduler(MODELS, SlotConfig(slot_ms, drain_ms, **kw), active, 0.0)


def arrive(
    core: SlotScheduler,
    now: float,
    rid: str,
    model: str,
    *,
    deadline: float = 0.0,
    priority: int = 0,
    back: bool = False,
    tokens: int = 10,
    session: str = "",
) -> None:
    call = Call(rid, model, now, deadline, priority, back, tokens, 1, session)
    assert core.handle(now, Arrived(call)) == []


def step(
    core: SlotScheduler, now: float, kind, ends: dict[str, str], *, waiting=(), model: str = "a", tokens: int = 0
) -> None:
    news = [StepTokens(rid=r, token_ids=[1], finished=end) for r, end in ends.items()]  # type: ignore[arg-type]
    result = StepResult(kind=kind, tokens=news, prefilled_tokens=tokens, wall_ms=tokens)
    core.handle(now, Stepped(model, result, list(waiting)))


def test_a_prefill_whose_call_was_dropped_meanwhile_is_nobodys() -> None:
    slot = Slot("a", 0.0, mark=0.0)
    slot.stepped(4.0, StepResult(kind="prefill", wall_ms=4000.0))
    assert slot.lost_ms == 0
    slot.stepped(5.0, StepResult(kind="prefill", wall_ms=1000.0, half="long"))
    slot.stepped(6.0, StepResult(kind="prefill", wall_ms=1000.0), started=["long"])
    assert slot.lost_ms == 2000
