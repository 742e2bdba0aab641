"""The slot scheduler's promises: properties over any arrivals, every small case, and the named situations."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from talaria_gpu.engine.contract import StepResult, StepTokens
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
from talaria_gpu.sched.slots import SlotConfig, SlotScheduler
from tests.gpu.sched.toy import Job, Toy

MODELS = ("a", "b", "c")


@st.composite
def jobs(draw: st.DrawFn, models: tuple[str, ...] = MODELS, max_jobs: int = 14) -> list[Job]:
    maybe_ms = st.one_of(st.none(), st.none(), st.integers(0, 3000))
    return [
        Job(
            f"r{i}",
            draw(st.sampled_from(models)),
            draw(st.integers(0, 1500)),
            prefill_ms=draw(st.integers(1, 120)),
            tokens=draw(st.integers(1, 60)),
            priority=draw(st.integers(0, 2)),
            deadline_ms=draw(maybe_ms),
            leave_ms=draw(maybe_ms),
        )
        for i in range(draw(st.integers(1, max_jobs)))
    ]


configs = st.builds(
    SlotConfig,
    slot_ms=st.sampled_from([1.0, 40.0, 200.0, 2000.0]),
    drain_ms=st.sampled_from([0.0, 25.0, 100.0]),
    patience_ms=st.sampled_from([0.0, 100.0, 10_000.0]),
)


@given(jobs=jobs(), config=configs, switch_ms=st.sampled_from([0, 30]), chunk_ms=st.sampled_from([0, 0, 7]))
@settings(max_examples=300, deadline=None)
def test_any_arrivals_end_and_keep_the_rules(
    jobs: list[Job], config: SlotConfig, switch_ms: int, chunk_ms: int
) -> None:
    toy = Toy(MODELS, config, jobs, switch_ms, chunk_ms)
    toy.work()
    for job in jobs:
        if job.deadline_ms is None and job.leave_ms is None:
            assert toy.done[job.rid] == "length"
    assert toy.core.resting or toy.core.handle(toy.now, Turn())


@given(jobs=jobs(models=("a",)), config=configs)
@settings(max_examples=100, deadline=None)
def test_a_model_alone_has_no_rounds(jobs: list[Job], config: SlotConfig) -> None:
    toy = Toy(("a",), config, jobs, active="a")
    toy.work()
    assert not toy.switches
    assert not toy.overs
    assert Phase.DFIN not in toy.phases


def test_every_small_case() -> None:
    """Three calls, each of any of two models at any of four moments, under a slot shorter than one call."""
    config = SlotConfig(slot_ms=40.0, drain_ms=15.0)
    moments = [(model, at) for model in "ab" for at in (0, 35, 70, 200)]
    for case in itertools.product(moments, repeat=3):
        toy = Toy(("a", "b"), config, [Job(f"r{i}", m, at, tokens=6) for i, (m, at) in enumerate(case)], switch_ms=5)
        toy.work()
        assert set(toy.done.values()) == {"length"}, case
        used = [m for m, _ in case]
        if len(set(used)) == 1:
            assert toy.switches == used[:1], case
        else:
            assert all(x != y for x, y in itertools.pairwise(toy.switches)), case


def test_three_busy_models_rotate_in_order() -> None:
    backlog = [Job(f"{m}{i}", m, 0, tokens=100) for m in "cab" for i in range(3)]
    toy = Toy(MODELS, SlotConfig(slot_ms=200.0, drain_ms=50.0), backlog)
    toy.work()
    assert toy.switches[:6] == ["a", "b", "c", "a", "b", "c"]
    assert toy.overs[0].reason == "budget"
    assert toy.overs[0].retracted == 3


def test_a_long_prompt_is_answered_though_its_prefill_outlasts_every_slot() -> None:
    """Chunked: 40 chunks of 20 ms, in slots of 50 ms that a busy neighbour wants; short calls keep coming."""
    short = [Job(f"a{i}", "a", 30 * i, prefill_ms=5, tokens=4) for i in range(60)]
    other = [Job(f"b{i}", "b", 30 * i, prefill_ms=5, tokens=4) for i in range(60)]
    toy = Toy(
        ("a", "b"),
        SlotConfig(50.0, 10.0),
        [Job("long", "a", 1, prefill_ms=800, tokens=2), *short, *other],
        5,
        chunk_ms=20,
    )
    toy.work()
    assert toy.done["long"] == "length"


def test_a_slow_prefill_earns_as_much_decode_before_it_is_thrown_away() -> None:
    """Prefills of 500 ms in slots of 100 ms with 10 ms of drain: half of the time is decode, not a fiftieth."""
    slow = [Job(f"{m}{i}", m, 0, prefill_ms=250, tokens=120) for m in "ab" for i in range(2)]
    toy = Toy(("a", "b"), SlotConfig(100.0, 10.0), slow)
    toy.work()
    for over in toy.overs[:-2]:
        assert over.decodes * 10 >= 500
    assert len(toy.switches) <= 6


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
    assert core.handle(1.1, Turn()) == [RunStep("a", None)]  # its slot has 100 ms left
    step(core, 1.15, "decode", {"r1": "length"})
    over, switch = core.handle(1.15, Turn())
    assert switch == RunSwitch("b")
    assert isinstance(over, SlotOver)
    assert over.reason == "idle"
    assert over.active_ms == pytest.approx(150)  # 1.0 to 1.15: not the idle second before


def test_dfin_defers_arrivals_and_counts_them() -> None:
    core = scheduler(active="a", slot_ms=100, drain_ms=1000)
    arrive(core, 0.0, "r1", "a")
    core.handle(0.0, Turn())
    step(core, 0.05, "prefill", {"r1": ""})
    arrive(core, 0.06, "r2", "b")
    assert core.handle(0.2, Turn()) == [RunStep("a", frozenset())]
    assert core.phase is Phase.DFIN
    assert core.slot_remaining_ms(0.2) == 0
    arrive(core, 0.21, "r3", "a")
    step(core, 0.22, "decode", {"r1": "length"}, waiting=["r3"])
    over, switch = core.handle(0.22, Turn())
    assert isinstance(over, SlotOver)
    assert (over.reason, over.deferred, over.retracted, over.decodes) == ("drained", 1, 0, 1)
    assert switch == RunSwitch("b")


def test_dfin_is_left_when_nobody_waits_any_more() -> None:
    core = scheduler(active="a", slot_ms=100, drain_ms=1000)
    arrive(core, 0.0, "r1", "a")
    step(core, 0.05, "prefill", {"r1": ""})
    arrive(core, 0.06, "r2", "b")
    core.handle(0.2, Turn())
    assert core.phase is Phase.DFIN
    core.handle(0.21, Left("r2"))
    assert core.handle(0.22, Turn()) == [RunStep("a", None)]


def test_phases_have_their_names() -> None:
    core = scheduler(active="a", slot_ms=10_000)
    seen = [core.phase]
    arrive(core, 0.0, "r1", "a")
    for kind in ("prefill", "decode", "prefill", "decode", "decode"):
        step(core, 0.1, kind, {"r1": ""})
        seen.append(core.phase)
    assert seen == [Phase.P, Phase.P, Phase.D1, Phase.SP, Phase.D, Phase.D]


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


def test_the_deadline_heap_forgets_finished_calls() -> None:
    core = scheduler(active="a")
    for i in range(5000):
        arrive(core, 0.0, f"r{i}", "a", deadline=1e6 + i)
        step(core, 0.0, "prefill", {f"r{i}": "length"})
    assert len(core._deadlines) < 200
    assert core.resting


def test_priorities_go_as_classes_and_patience_lifts_the_overdue() -> None:
    core = scheduler(active="a", patience_ms=1000)
    arrive(core, 0.0, "low", "a")
    arrive(core, 0.0, "high", "a", priority=5)
    arrive(core, 0.0, "high2", "a", priority=5)
    assert core.handle(0.0, Turn()) == [RunStep("a", frozenset({"high", "high2"}))]
    step(core, 0.1, "prefill", {"high": "", "high2": ""}, waiting=["low"])
    assert core.handle(0.1, Turn()) == [RunStep("a", None)]
    arrive(core, 1.1, "high3", "a", priority=5)
    assert core.handle(1.1, Turn()) == [RunStep("a", frozenset({"low"}))]  # has waited for 1.1 s


def test_retracted_calls_stand_before_every_priority() -> None:
    core = scheduler(active="a", slot_ms=10, drain_ms=0)
    arrive(core, 0.0, "old", "a")
    step(core, 0.0, "prefill", {"old": ""})
    arrive(core, 0.1, "other", "b")
    assert isinstance(core.handle(0.1, Turn())[-1], RunSwitch)
    core.handle(0.2, Switched("b", 100.0))
    arrive(core, 0.2, "vip", "a", priority=9)
    step(core, 0.2, "prefill", {"other": "length"}, model="b")
    assert core.handle(0.2, Turn())[-1] == RunSwitch("a")
    core.handle(0.3, Switched("a", 100.0))
    assert core.handle(0.3, Turn()) == [RunStep("a", frozenset({"old"}))]


def test_an_engine_that_runs_nothing_cannot_hold_the_slot() -> None:
    core = scheduler(active="a", slot_ms=100, drain_ms=0)
    arrive(core, 0.0, "r1", "a")
    arrive(core, 0.0, "r2", "b")
    step(core, 0.2, "idle", {}, waiting=["r1"])
    over, switch = core.handle(0.2, Turn())
    assert isinstance(over, SlotOver)
    assert over.deferred == 1
    assert switch == RunSwitch("b")


def scheduler(active: str | None = None, slot_ms: float = 200, drain_ms: float = 50, patience_ms: float = 1e4):
    return SlotScheduler(MODELS, SlotConfig(slot_ms, drain_ms, patience_ms), active, 0.0)


def arrive(core: SlotScheduler, now: float, rid: str, model: str, *, deadline: float = 0.0, priority: int = 0) -> None:
    assert core.handle(now, Arrived(Call(rid, model, now, deadline, priority))) == []


def step(core: SlotScheduler, now: float, kind, ends: dict[str, str], *, waiting=(), model: str = "a") -> None:
    tokens = [StepTokens(rid=r, token_ids=[1], finished=end) for r, end in ends.items()]  # type: ignore[arg-type]
    core.handle(now, Stepped(model, StepResult(kind=kind, tokens=tokens), list(waiting)))
