"""The round scheduler's promises: properties over any arrivals, every small case, and the named situations."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from talaria_gpu.engine.contract import StepResult
from talaria_gpu.sched.ablation import NAMES, Ablation, Name
from talaria_gpu.sched.config import SlotConfig
from talaria_gpu.sched.messages import Turn
from talaria_gpu.sched.plan import SlotPlan
from talaria_gpu.sched.slot import Slot
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
            prompt=draw(st.integers(1, 120)),
            tokens=draw(st.integers(1, 60)),
            cached=draw(st.integers(0, 100)),
            back=draw(st.booleans()),
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
    t_ttft_ms=st.sampled_from([100.0, 1000.0, 10_000.0]),
    t_tpot_ms=st.sampled_from([5.0, 30.0, 100.0]),
    patience_ms=st.sampled_from([0.0, 100.0, 10_000.0]),
    ablation=st.sampled_from([Ablation.named(name) for name in NAMES]),
    suspends=st.booleans(),
)


devices = st.fixed_dictionaries(
    {
        "switch_ms": st.sampled_from([0, 30, 200]),
        "chunk": st.sampled_from([0, 0, 7]),
        "rows": st.sampled_from([0, 180, 260, 500]),
        "places": st.sampled_from([0, 1, 2, 4]),
        "cautious": st.booleans(),
    }
)
"""No call of `jobs` needs more than 180 rows."""


@given(jobs=jobs(), config=configs, device=devices)
@settings(max_examples=300, deadline=None)
def test_any_arrivals_end_and_keep_the_rules(jobs: list[Job], config: SlotConfig, device: dict[str, Any]) -> None:
    toy = Toy(MODELS, config, jobs, **device)
    toy.work()
    for job in jobs:
        if job.deadline_ms is None and job.leave_ms is None:
            assert toy.done[job.rid] == "length"
    assert toy.core.resting or toy.core.handle(toy.now, Turn())


@given(jobs=jobs(max_jobs=6), config=configs, device=devices)
@settings(max_examples=100, deadline=None)
def test_few_calls_against_the_rules_by_enumeration(
    jobs: list[Job], config: SlotConfig, device: dict[str, Any]
) -> None:
    Toy(MODELS, config, jobs, **device | {"chunk": 0}, oracle=True).work()


@given(jobs=jobs(models=("a",)), config=configs, device=devices)
@settings(max_examples=100, deadline=None)
def test_a_model_alone_has_no_rounds(jobs: list[Job], config: SlotConfig, device: dict[str, Any]) -> None:
    toy = Toy(("a",), config, jobs, active="a", **device)
    toy.work()
    assert not toy.switches
    assert not toy.overs


@pytest.mark.parametrize("rows", [0, 110])
@pytest.mark.parametrize("suspends", [False, True])
def test_every_small_case_against_the_rules_by_enumeration(suspends: bool, rows: int) -> None:
    """Two models, up to four calls: each new or returning, small or large, at one of a few moments.

    110 rows are enough for any call, but not for a large one beside the first.
    """
    config = SlotConfig(slot_ms=120.0, drain_ms=20.0, t_ttft_ms=400.0, t_tpot_ms=50.0, suspends=suspends)
    fixed = [Job("x0", "a", 0, prompt=30, tokens=20), Job("y0", "b", 5, prompt=10, tokens=12)]
    kinds = [
        (model, at, back, prompt)
        for model in "ab"
        for at in (35, 90, 160)
        for back, prompt in ((False, 15), (True, 15), (True, 70))
    ]
    sps = 0
    for case in itertools.combinations_with_replacement(kinds, 2):
        more = [
            Job(f"z{i}", m, at, prompt=prompt, tokens=4, cached=10, back=back)
            for i, (m, at, back, prompt) in enumerate(case)
        ]
        toy = Toy(("a", "b"), config, [*fixed, *more], switch_ms=5, oracle=True, rows=rows)
        toy.work()
        assert set(toy.done.values()) == {"length"}, case
        assert all(x != y for x, y in itertools.pairwise(toy.switches)), case
        sps += len(toy.sps)
    assert sps > 50, "the cases exercise SP"


def test_three_busy_models_rotate_in_order() -> None:
    backlog = [Job(f"{m}{i}", m, 0, tokens=100) for m in "cab" for i in range(3)]
    toy = Toy(MODELS, SlotConfig(slot_ms=200.0, drain_ms=50.0), backlog)
    toy.work()
    assert toy.switches[:6] == ["a", "b", "c", "a", "b", "c"]
    assert toy.overs[0].reason == "budget"
    assert toy.overs[0].running == 3


def test_a_return_enters_the_open_slot_and_waits_for_the_next_without_sp() -> None:
    """a's slot is 300 ms; the session's next call comes at 120 ms, with 90 of its 100 prompt tokens cached."""
    busy = [Job("a0", "a", 0, tokens=80), Job("b0", "b", 1, tokens=80)]
    back = Job("a1", "a", 120, prompt=100, tokens=5, cached=90, back=True)
    first = {}
    for name in ("talaria", "no-sp"):
        toy = Toy(("a", "b"), SlotConfig(slot_ms=300.0, ablation=Ablation.named(name)), [*busy, back])
        toy.work()
        first[name] = toy.first_ms["a1"]
        over = toy.overs[0]
        assert (over.sp_admitted, over.sp_deferred) == ((1, 0) if name == "talaria" else (0, 1))
    assert first["talaria"] < 160
    assert first["no-sp"] > 500


def test_a_new_session_waits_for_p_though_returns_go_by_and_no_longer_than_a_round() -> None:
    busy = [Job("a0", "a", 0, tokens=400), Job("b0", "b", 1, tokens=400)]
    returns = [Job(f"a{i}", "a", 40 * i, prompt=30, tokens=4, cached=20, back=True) for i in range(1, 60)]
    new = Job("n", "a", 60, prompt=30, tokens=4)
    toy = Toy(("a", "b"), SlotConfig(slot_ms=300.0), [*busy, *returns, new], switch_ms=10)
    toy.work()
    assert toy.overs[0].sp_admitted > 3
    assert 300 < toy.first_ms["n"] < 60 + 2 * (300 + 300 + 20)


@given(
    every=st.integers(15, 120),
    prompt=st.integers(12, 200),
    tokens=st.integers(1, 80),
    large=st.integers(1, 900),
    t_ttft_ms=st.sampled_from([200.0, 1500.0, 10_000.0]),
    suspends=st.booleans(),
    places=st.sampled_from([0, 1, 2, 4]),
    rows=st.sampled_from([0, 1000]),
    cautious=st.booleans(),
)
@settings(max_examples=15, deadline=None)
def test_a_new_session_s_wait_is_bounded_while_returns_keep_coming(  # noqa: PLR0917 - one argument a strategy
    every: int,
    prompt: int,
    tokens: int,
    large: int,
    t_ttft_ms: float,
    suspends: bool,
    places: int,
    rows: int,
    cautious: bool,
) -> None:
    """Whatever the load: once overdue, each slot of its model lets it in, or one that came before it and is, too.

    If the device is full, that is so as soon as what runs has ended, for nobody else gets in meanwhile.
    """
    config = SlotConfig(slot_ms=100.0, t_ttft_ms=t_ttft_ms, t_tpot_ms=30.0, patience_ms=400.0, suspends=suspends)
    returns = [
        Job(f"a{i}", "a", every * i, prompt=prompt, tokens=tokens, cached=prompt - 10, back=True) for i in range(1, 40)
    ]
    new = Job("n", "a", 5 * every + 1, prompt=large, tokens=2)
    other = [Job(f"b{i}", "b", 1 + i, tokens=700) for i in range(3)]
    toy = Toy(("a", "b"), config, [*other, new, *returns], 10, places=places, rows=rows, cautious=cautious)
    toy.work()
    overdue_ms = new.at_ms + config.patience_ms
    slots = sum(overdue_ms < ms < toy.first_ms["n"] for ms, model in toy.opened if model == "a")
    full = [over.decodes for over in toy.overs if over.model == "a" and over.reason == "budget"]
    drain = -(-tokens // max(1, min(full, default=tokens))) if places or rows else 0
    assert slots <= 6 * (1 + drain), f"{slots} slots went by"


@pytest.mark.parametrize(
    ("rows", "places", "cautious", "prompt"),
    [(0, 2, False, 30), (200, 0, False, 150), (200, 0, True, 120)],
    ids=["places", "rows", "refused"],
)
def test_a_call_that_the_device_has_no_room_for_is_not_passed_for_ever(
    rows: int, places: int, cautious: bool, prompt: int
) -> None:
    """Returns of 42 rows keep the device full; for a new session they have to stop once it has waited for 400 ms."""
    config = SlotConfig(slot_ms=200.0, patience_ms=400.0, suspends=True)
    returns = [Job(f"a{i}", "a", 30 * i, prompt=30, tokens=12, cached=20, back=True) for i in range(200)]
    other = [Job(f"b{i}", "b", 400 * i, tokens=100) for i in range(20)]
    new = Job("n", "a", 100, prompt=prompt, tokens=4)
    toy = Toy(("a", "b"), config, [new, *returns, *other], 10, rows=rows, places=places, cautious=cautious)
    toy.work()
    assert toy.first_ms["n"] < 2000, "though returns come until 6000"
    late = [job.rid for job in returns if toy.first_ms[job.rid] > toy.first_ms["n"]]
    assert len(late) > 100
    assert any(over.sp_admitted for over in toy.overs)


def test_a_refused_call_does_not_hold_its_slot() -> None:
    """The scheduler foresees room for a's large call, the executor has none: a's slots end in time all the same."""
    config = SlotConfig(slot_ms=200.0, patience_ms=0.0, t_ttft_ms=1000.0, suspends=True)
    jobs = [
        Job("a0", "a", 0, prompt=30, tokens=400),
        Job("b0", "b", 1, prompt=30, tokens=400),
        Job("large", "a", 50, prompt=300, tokens=2),
    ]
    toy = Toy(("a", "b"), config, jobs, 10, rows=500, cautious=True)
    toy.work()
    assert toy.in_vain > 10
    assert toy.switches.count("b") > 3
    assert max(over.active_ms for over in toy.overs) < 900
    assert any(over.deferred_why == {"rows": 1} for over in toy.overs)


def test_what_p_had_no_room_for_may_enter_through_sp_and_is_counted() -> None:
    """Two sessions come back while b has its slot; a runs one and has two places. When the first ends, SP goes on."""
    config = SlotConfig(slot_ms=400.0, suspends=True)
    jobs = [
        Job("a0", "a", 0, prompt=30, tokens=60),
        Job("b0", "b", 1, prompt=30, tokens=60),
        Job("a1", "a", 420, prompt=30, tokens=5, cached=20, back=True),
        Job("a2", "a", 430, prompt=30, tokens=5, cached=20, back=True),
    ]
    toy = Toy(("a", "b"), config, jobs, 10, places=2)
    toy.work()
    carried = [over for over in toy.overs if over.sp_carried]
    assert [(over.model, over.sp_carried, over.sp_admitted) for over in carried] == [("a", 1, 1)]
    assert toy.opened[2][1] == "a"
    assert toy.opened[2][0] < toy.first_ms["a1"] < toy.first_ms["a2"] < toy.opened[3][0], "both in the one slot"


def test_a_long_prompt_is_answered_though_its_prefill_outlasts_every_slot() -> None:
    """Chunked: 40 chunks of 20 ms, in slots of 50 ms that a busy neighbour wants; short calls keep coming."""
    short = [Job(f"a{i}", "a", 30 * i, prompt=5, tokens=4) for i in range(60)]
    other = [Job(f"b{i}", "b", 30 * i, prompt=5, tokens=4) for i in range(60)]
    long = Job("long", "a", 1, prompt=800, tokens=2)
    toy = Toy(("a", "b"), SlotConfig(slot_ms=50.0, drain_ms=10.0), [long, *short, *other], 5, chunk=20)
    toy.work()
    assert toy.done["long"] == "length"


def test_a_slow_prefill_earns_as_much_decode_before_it_is_thrown_away() -> None:
    """Prefills of 500 ms in slots of 100 ms: half of the time is decode, not a fiftieth."""
    slow = [Job(f"{m}{i}", m, 0, prompt=250, tokens=120) for m in "ab" for i in range(2)]
    toy = Toy(("a", "b"), SlotConfig(slot_ms=100.0, drain_ms=10.0, t_ttft_ms=500.0), slow)
    toy.work()
    cut = [over for over in toy.overs if over.reason == "budget"]
    assert cut
    for over in cut:
        assert over.decodes * DECODE >= over.p_ms + over.sp_ms - 1e-6
    assert len(toy.switches) <= 10


def test_who_leaves_half_prefilled_leaves_nothing_to_be_earned() -> None:
    """20 s into a prompt its client goes: no decode has to pay for that, and the slot has the room again."""
    slot = Slot("a", opened=0.0, plan=SlotPlan("a", 30_000.0, 10, 100.0), end=30.0, mark=0.0)
    slot.stepped(0.1, StepResult(kind="prefill", wall_ms=100.0), started=["runs"])
    for n in range(20):
        slot.stepped(1.1 + n, StepResult(kind="prefill", wall_ms=1000.0, half="long"))
    room_ms = slot.room_ms(20.1, 10.0, lossy=True)
    assert slot.lost_ms == 20_100
    slot.left("short")
    assert slot.lost_ms == 20_100
    slot.left("long")
    assert slot.lost_ms == 100
    assert slot.room_ms(20.1, 10.0, lossy=True) == room_ms + 20_000


def test_infeasible_targets_are_reported_in_every_slot() -> None:
    backlog = [Job(f"{m}{i}", m, 0, prompt=100, tokens=300) for m in "ab" for i in range(3)]
    config = SlotConfig(slot_ms=50.0, t_ttft_ms=200.0, t_tpot_ms=12.0, suspends=True)
    toy = Toy(("a", "b"), config, backlog)
    toy.work()
    late = toy.overs[2:-1]
    assert late
    assert all(over.infeasible for over in late)
    assert all("ttft" in over.infeasible for over in late if over.round_planned_ms > 180)


def test_two_models_with_one_session_each_do_not_thrash() -> None:
    """Ten quick turns of a session while another model waits: an idle slot lingers for the return, switches are dear."""
    turns = [Job(f"a{i}", "a", 150 * i, prompt=20, tokens=5, cached=15, back=i > 0) for i in range(20)]
    other = [Job("b0", "b", 10, tokens=10), Job("b1", "b", 2500, tokens=200)]
    toy = Toy(("a", "b"), SlotConfig(slot_ms=1000.0), [*turns, *other], switch_ms=300)
    toy.work()
    assert len(toy.switches) <= 8


DECODE = 10


@given(
    switch_ms=st.sampled_from([50, 300, 1500]),
    gap=st.integers(1, 400),
    turns=st.integers(2, 12),
    slot_ms=st.sampled_from([50.0, 300.0, 2000.0]),
    name=st.sampled_from(NAMES),
)
@settings(max_examples=40, deadline=None)
def test_two_models_share_the_device_without_thrashing(
    switch_ms: int, gap: int, turns: int, slot_ms: float, name: Name
) -> None:
    """Two models with sessions of quick turns: every slot runs something, and there are no more slots than turns.

    A turn that is longer than a slot may hold takes another for each time that it is put back.
    """
    jobs = [
        Job(f"{m}{i}", m, (gap + 60) * i, prompt=40, tokens=6, cached=30, back=i > 0)
        for m in "ab"
        for i in range(turns)
    ]
    toy = Toy(("a", "b"), SlotConfig(slot_ms=slot_ms, ablation=Ablation.named(name)), jobs, switch_ms=switch_ms)
    toy.work()
    assert all(over.prefills + over.decodes for over in toy.overs)
    assert all(x != y for x, y in itertools.pairwise(toy.switches))
    assert len(toy.switches) <= 2 * turns + sum(over.running for over in toy.overs)


def test_dfin_comes_when_nothing_more_fits_and_defers() -> None:
    config = SlotConfig(slot_ms=100.0, t_tpot_ms=20.0, suspends=True)
    toy = Toy(
        ("a", "b"),
        config,
        [
            Job("a0", "a", 0, tokens=200),
            Job("b0", "b", 1, tokens=200),
            *(Job(f"a{i}", "a", 20 * i, prompt=60, cached=30, back=True, tokens=50) for i in range(1, 30)),
        ],
    )
    toy.work()
    assert any(over.sp_deferred for over in toy.overs)
    assert all(over.dfin_ms > 0 for over in toy.overs if over.reason == "budget")
    assert all(over.decodes >= over.protected for over in toy.overs if over.reason == "budget")
    assert all(sum(over.deferred_why.values()) == over.deferred for over in toy.overs)
    assert any(over.deferred_why.get("time") for over in toy.overs)
