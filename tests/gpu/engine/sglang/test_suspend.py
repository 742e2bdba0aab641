"""What decodes when a slot ends keeps its exact rows and goes on: no prefill, the same tokens."""

from __future__ import annotations

import warnings
from random import Random
from types import SimpleNamespace

import pytest
import torch

from talaria_gpu.hkvr.agreement import Alone
from talaria_gpu.hkvr.store import HostKv
from talaria_gpu.models.reference import assert_greedy
from tests.gpu.hkvr.fake_device import FakeDevice, FakeStates, descriptor

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]
QWEN3, MLA = "tiny-qwen3-random", "tiny-mla-random"
MODELS = (QWEN3, MLA)
NOBODY: frozenset[str] = frozenset()
MIB = 1 << 20


@pytest.fixture(
    scope="module", params=[pytest.param(16, id="page16"), pytest.param(1, id="page1", marks=pytest.mark.soak)]
)
def engine(request, make_engine):
    from talaria_gpu.engine.sglang.spec import HostKvOptions

    return make_engine(*MODELS, page_size=request.param, kv_tokens=640, host_kv=HostKvOptions(capacity_bytes=64 * MIB))


@pytest.fixture
def driver(engine, driver_for):
    return driver_for(engine)


@pytest.fixture(params=MODELS)
def model(request, engine):
    engine.switch(request.param)
    return request.param


def other(model):
    return QWEN3 if model == MLA else MLA


def test_decoding_goes_on_without_prefill(engine, driver, model, references, new_prompt):
    rids = [driver.submit(model, new_prompt(n), 24) for n in (21, 40)]
    for _ in range(6):
        driver.step()
    kept = [list(driver.outputs[rid].ids) for rid in rids]
    timing = engine.switch(other(model))
    assert (timing.suspended, timing.retracted) == (2, 0)
    assert engine.running(model) == 0
    assert engine.has_unfinished(model)
    assert engine.waiting(model) == []
    driver.run(other(model), new_prompt(120), 20)
    engine.switch(model)
    assert engine.running(model) == 2
    assert driver.step(NOBODY).kind == "decode"
    driver.drain(model)
    for rid, before in zip(rids, kept, strict=True):
        out = driver.outputs[rid]
        assert out.ids[: len(before)] == before
        assert out.last.recomputed_tokens == 0
        assert_greedy(references[model], out.prompt, out.ids)


def test_in_the_middle_of_a_chunked_prefill(engine, driver, model, references, new_prompt):
    rid = driver.submit(model, new_prompt(180), 6)
    assert driver.step().prefilled_tokens == 64
    assert engine.switch(other(model)).suspended == 1
    driver.run(other(model), new_prompt(30), 4)
    engine.switch(model)
    assert engine.waiting(model) == [rid]
    assert driver.step(frozenset({rid})).prefilled_tokens == 64
    driver.drain(model)
    out = driver.outputs[rid]
    assert (out.last.recomputed_tokens, out.last.prefilled_tokens) == (0, 180)
    assert_greedy(references[model], out.prompt, out.ids)


def test_abort_while_suspended(engine, driver, model, references, new_prompt):
    stay, go = driver.submit(model, new_prompt(30), 20), driver.submit(model, new_prompt(31), 20)
    for _ in range(4):
        driver.step()
    engine.switch(other(model))
    assert engine.abort(go)
    engine.switch(model)
    driver.drain(model)
    assert len(driver.outputs[go].ids) == 4
    assert_greedy(references[model], driver.outputs[stay].prompt, driver.outputs[stay].ids)


def test_freed_pages_are_garbage_at_once_but_not_in_anothers_bytes(engine, driver, model, new_prompt):
    gone, stays, later = (driver.submit(model, new_prompt(50), 20) for _ in range(3))
    for _ in range(6):
        driver.step()
    opened = engine._models[model]
    allocator = opened.scheduler.token_to_kv_pool_allocator
    before = set(allocator.get_all_free_pages().tolist())
    engine.abort(gone)
    freed = sorted(set(allocator.get_all_free_pages().tolist()) - before)
    assert freed
    rows = [page * allocator.page_size + i for page in freed for i in range(allocator.page_size)]
    assert all((layer[rows] == 0xFF).all() for layer in opened.region._kv)
    engine.switch(other(model))
    whole = engine._buffer.clone()
    engine.abort(stays)
    assert engine._buffer.equal(whole)
    engine.switch(model)
    driver.drain(model)
    assert len(driver.outputs[later].ids) == 20


def test_abort_of_all_while_suspended_gives_the_room_back(engine, driver, model, references, new_prompt):
    ids = new_prompt(180)
    half, running = driver.submit(model, ids, 6), driver.submit(model, new_prompt(20), 20)
    driver.step(frozenset({running}))
    driver.step(frozenset({half}))
    engine.switch(other(model))
    before = engine.host_kv_stats().taken_bytes
    assert engine.abort(half)
    assert engine.abort(running)
    assert engine.host_kv_stats().taken_bytes < before
    assert not engine.has_unfinished(model)
    engine.switch(model)
    assert driver.step().kind == "idle"
    out = driver.run(model, ids, 4)  # rows that were never put back must not be hit
    assert out.cached <= 64
    assert_greedy(references[model], out.prompt, out.ids)


def test_new_calls_come_while_others_are_suspended(engine, driver, model, references, new_prompt):
    old = driver.submit(model, new_prompt(30), 20)
    driver.step()
    driver.step()
    engine.switch(other(model))
    new = driver.submit(model, new_prompt(40), 6)
    assert engine.waiting(model) == [new]
    engine.switch(model)
    driver.drain(model)
    for rid in (old, new):
        out = driver.outputs[rid]
        assert out.last.recomputed_tokens == 0
        assert_greedy(references[model], out.prompt, out.ids)


def test_sampled_calls_say_the_same_with_and_without_suspension(engine, driver, model, new_prompt):
    ids = new_prompt(30)
    options = {"temperature": 0.9, "seed": 7, "frequency_penalty": 0.5}
    plain = driver.run(model, ids, 20, **options)
    rid = driver.submit(model, ids, 20, **options)
    for _ in range(5):
        driver.step()
    engine.switch(other(model))
    engine.switch(model)
    driver.drain(model)
    assert driver.outputs[rid].ids == plain.ids


def test_damaged_rows_are_computed_again(engine, driver, model, references, new_prompt):
    rid = driver.submit(model, new_prompt(50), 12)
    for _ in range(3):
        driver.step()
    engine.switch(other(model))
    (parked,) = engine._models[model].residence._suspension._parked
    engine._host_kv._pool[parked.pieces[0].cell.offset] ^= 1
    engine.switch(model)
    assert engine.waiting(model) == [rid]
    driver.drain(model)
    out = driver.outputs[rid]
    assert out.last.recomputed_tokens > 0
    assert_greedy(references[model], out.prompt, out.ids)


def broken(*_arguments, **_options):
    raise OSError("the link is down")


def test_rows_that_cannot_be_copied_out_are_computed_again(engine, driver, references, new_prompt, monkeypatch):
    engine.switch(QWEN3)
    rid = driver.submit(QWEN3, new_prompt(50), 12)
    for _ in range(3):
        driver.step()
    with monkeypatch.context() as patch:
        patch.setattr(engine._host_kv._outward, "out", broken)
        timing = engine.switch(MLA)
    assert (timing.suspended, timing.retracted) == (0, 1)
    engine.switch(QWEN3)
    driver.drain(QWEN3)
    assert_greedy(references[QWEN3], driver.outputs[rid].prompt, driver.outputs[rid].ids)


def test_rows_that_cannot_be_copied_back_are_computed_again(engine, driver, references, new_prompt, monkeypatch):
    engine.switch(QWEN3)
    rid = driver.submit(QWEN3, new_prompt(50), 12)
    for _ in range(3):
        driver.step()
    engine.switch(MLA)
    with monkeypatch.context() as patch:
        patch.setattr(engine._host_kv._inward, "back", broken)
        engine.switch(QWEN3)
    assert engine.waiting(QWEN3) == [rid]
    driver.drain(QWEN3)
    assert driver.outputs[rid].last.recomputed_tokens > 0
    assert_greedy(references[QWEN3], driver.outputs[rid].prompt, driver.outputs[rid].ids)


class AnotherFailed(Alone):
    """The other rank's answer to everything is no."""

    def least(self, values):
        return [0] * len(values)


def test_what_another_rank_could_not_suspend_this_one_does_not_keep(engine, driver, new_prompt, monkeypatch):
    engine.switch(QWEN3)
    driver.submit(QWEN3, new_prompt(50), 12)
    for _ in range(3):
        driver.step()
    suspension = engine._models[QWEN3].residence._suspension
    with monkeypatch.context() as patch:
        patch.setattr(suspension, "_ranks", AnotherFailed())
        timing = engine.switch(MLA)
    assert (timing.suspended, timing.retracted) == (0, 1)
    assert not suspension.active
    engine.switch(QWEN3)
    driver.drain(QWEN3)


def test_no_room_retracts(make_engine, driver_for, references, new_prompt):
    from talaria_gpu.engine.sglang.spec import HostKvOptions

    engine = make_engine(*MODELS, host_kv=HostKvOptions(capacity_bytes=8 * 40000))
    driver = driver_for(engine)
    engine.switch(QWEN3)
    rid = driver.submit(QWEN3, new_prompt(300), 12)
    while not driver.outputs[rid].ids:
        driver.step()
    timing = engine.switch(MLA)
    assert (timing.suspended, timing.retracted) == (0, 1)
    engine.switch(QWEN3)
    driver.drain(QWEN3)
    assert_greedy(references[QWEN3], driver.outputs[rid].prompt, driver.outputs[rid].ids)


def grown(random, driver, model, fresh):
    """A new prompt, or a finished call's conversation carried on."""
    finished = [o for o in driver.outputs.values() if o.finished and o.model == model and len(o.prompt) < 150]
    if finished and random.random() < 0.6:
        before = random.choice(finished)
        return before.prompt + before.ids + fresh(random.randint(1, 20))
    return fresh(random.randint(1, 140))


def random_life(engine, driver, references, fresh, seed, *, stage=False):
    """Random submits, admissions, aborts and switches over the host: tokens are exact, and nothing leaks."""
    random, aborted = Random(seed), set()
    counted = dict.fromkeys(("switches", "suspended", "retracted", "staged"), 0)
    for _ in range(160):
        what, model = random.random(), random.choice(MODELS)
        if what < 0.18:
            driver.submit(model, grown(random, driver, model, fresh), random.randint(1, 14))
        elif what < 0.23:
            calls = [r for r, o in driver.outputs.items() if not o.finished and r not in aborted]
            if calls:
                aborted.add(victim := random.choice(calls))
                assert engine.abort(victim)
        elif what < 0.33:
            timing = engine.switch(model)
            counted["switches"] += timing.path != "none"
            counted["suspended"] += timing.suspended
            counted["retracted"] += timing.retracted
            counted["staged"] += timing.d2d_bytes > 0
        elif what < 0.43 and stage:
            engine.stage(model)
        elif engine.active is not None:
            waiting = engine.waiting(engine.active)
            some = frozenset(random.sample(waiting, random.randint(0, len(waiting))))
            driver.step(random.choice([None, some, frozenset()]))
    for model in MODELS:
        engine.switch(model)
        driver.drain(model)
    engine.check_idle()
    done = [o for rid, o in driver.outputs.items() if rid not in aborted]
    assert counted["switches"] > 3
    assert len(done) > 10
    for out in done:
        assert out.finished == "length"
        assert_greedy(references[out.model], out.prompt, out.ids)
    return counted


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_random_life(engine, driver, references, new_prompt, seed):
    before = engine.host_kv_stats().counts.restored
    counted = random_life(engine, driver, references, new_prompt, seed)
    assert counted["suspended"] > 0
    assert counted["retracted"] == 0
    assert engine.host_kv_stats().counts.restored > before


def test_random_life_with_staging_and_canaries_in_a_small_pool(make_engine, driver_for, references, new_prompt):
    """All of the memory substrate at once: leased tails, evicted blocks, refused ones, retracts for want of room."""
    from talaria_gpu.engine.sglang.spec import HostKvOptions, MemoryOptions

    engine = make_engine(
        *MODELS,
        kv_tokens=640,
        memory=MemoryOptions(staging=True, chunk_bytes=64 << 10, canary_every=2),
        host_kv=HostKvOptions(capacity_bytes=2 * MIB),
    )
    counted = dict.fromkeys(("switches", "suspended", "retracted", "staged"), 0)
    for seed in (3, 4):
        for what, count in random_life(engine, driver_for(engine), references, new_prompt, seed, stage=True).items():
            counted[what] += count
    assert counted["suspended"] > 0
    assert counted["staged"] > 0
    counts = engine.host_kv_stats().counts
    assert counts.restored > 0
    assert counts.evicted > 0


def test_what_another_rank_could_not_park_is_not_gone_on_with(monkeypatch):
    """A rank that parked the rest alone would evict alone for it, and the registries would part."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from talaria_gpu.engine.sglang import environment

        environment.prepare("cpu")
        from talaria_gpu.engine.sglang import suspend
        from talaria_gpu.engine.sglang.identity import Pools

    kv = FakeDevice(descriptor("hybrid", complete=False))
    states = FakeStates(kv.kv.descriptor)
    store = HostKv(64 << 10, torch.device("cpu"))
    parked, park = [], store.park
    monkeypatch.setattr(store, "park", lambda *part: parked.append(part) or park(*part))
    monkeypatch.setattr(suspend, "evict_all", lambda _: None)
    answers = [1, 0]  # the other rank's: it has room, and then its first copy fails
    ranks = SimpleNamespace(rank=0, size=2, least=lambda values: [min(*values, answers.pop(0))])
    allocator = SimpleNamespace(page_size=2, get_all_free_pages=lambda: torch.arange(5, 32))
    slots = SimpleNamespace(size=31, free_slots=torch.arange(3, 32))
    it = suspend.Suspension(store, Pools(kv.kv, states.parts), None, allocator, slots=slots, ranks=ranks)
    assert not it.suspend()
    assert not it.active
    assert (len(parked), answers) == (1, [])
    assert store.stats().taken_bytes == 0
    store.close()
