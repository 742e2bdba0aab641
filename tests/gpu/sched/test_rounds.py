"""The round scheduler's promises: properties over any arrivals, every small case, and the named situations."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from talaria_gpu.sched.ablation import NAMES, Ablation, Name
from talaria_gpu.sched.config import SlotConfig
from talaria_gpu.sched.messages import Phase, Turn
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


@given(jobs=jobs(), config=configs, switch_ms=st.sampled_from([0, 30, 200]), chunk=st.sampled_from([0, 0, 7]))
@settings(max_examples=300, deadline=None)
def test_any_arrivals_end_and_keep_the_rules(jobs: list[Job], config: SlotConfig, switch_ms: int, chunk: int) -> None:
    toy = Toy(MODELS, config, jobs, switch_ms, chunk)
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


@pytest.mark.parametrize("suspends", [False, True])
def test_every_small_case_against_the_rules_by_enumeration(suspends: bool) -> None:
    """Two models, up to four calls: each new or returning, small or large, at one of a few moments."""
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
        toy = Toy(("a", "b"), config, [*fixed, *more], switch_ms=5, oracle=True)
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
    assert toy.overs[0].retracted == 3


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
)
@settings(max_examples=15, deadline=None)
def test_a_new_session_s_wait_is_bounded_while_returns_keep_coming(  # noqa: PLR0917 - one argument a strategy
    every: int, prompt: int, tokens: int, large: int, t_ttft_ms: float, suspends: bool
) -> None:
    """Whatever the load: once overdue, each slot of its model lets it in, or one that came before it and is, too."""
    config = SlotConfig(slot_ms=100.0, t_ttft_ms=t_ttft_ms, t_tpot_ms=30.0, patience_ms=400.0, suspends=suspends)
    returns = [
        Job(f"a{i}", "a", every * i, prompt=prompt, tokens=tokens, cached=prompt - 10, back=True) for i in range(1, 40)
    ]
    new = Job("n", "a", 5 * every + 1, prompt=large, tokens=2)
    toy = Toy(("a", "b"), config, [Job("b0", "b", 1, tokens=3000), new, *returns], switch_ms=10)
    toy.work()
    overdue_ms = new.at_ms + config.patience_ms
    slots = sum(overdue_ms < ms < toy.first_ms["n"] for ms, model in toy.opened if model == "a")
    assert slots <= 6, f"{slots} slots went by"


def test_what_p_had_no_room_for_may_enter_through_sp_and_is_counted() -> None:
    """P is full after the first; the call whose prefix is there gets in as soon as decode has freed time."""
    config = SlotConfig(slot_ms=200.0, t_ttft_ms=600.0, t_tpot_ms=30.0, suspends=True)
    warm = [Job("w0", "a", 0, prompt=50, tokens=3), Job("w1", "b", 0, prompt=50, tokens=3)]
    crowd = [Job(f"a{i}", "a", 400, prompt=150, tokens=9, cached=120, back=True) for i in range(6)]
    other = [Job("b0", "b", 390, prompt=100, tokens=30)]
    toy = Toy(("a", "b"), config, [*warm, *crowd, *other], switch_ms=5)
    toy.work()
    assert set(toy.done.values()) == {"length"}


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
    assert len(toy.switches) <= 2 * turns + sum(over.retracted for over in toy.overs)


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
    assert Phase.DFIN in Phase
