"""One call's life on the real engine: admission, chunks, cache, limits, ends and aborts; with pages of 16 and of 1."""

from __future__ import annotations

import pytest

from talaria_common.errors import BadRequestError, ContextLengthError, EngineError, ModelNotFoundError
from talaria_common.ids import new_rid
from talaria_gpu.engine.contract import EngineCall, Sampling
from talaria_gpu.models.reference import assert_greedy

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]
QWEN3, MLA = "tiny-qwen3-random", "tiny-mla-random"
NOBODY: frozenset[str] = frozenset()


@pytest.fixture(
    scope="module", params=[pytest.param(16, id="page16"), pytest.param(1, id="page1", marks=pytest.mark.soak)]
)
def engine(request, make_engine):
    return make_engine(QWEN3, MLA, page_size=request.param)


@pytest.fixture(params=[QWEN3, MLA])
def model(request, engine):
    engine.switch(request.param)
    return request.param


@pytest.fixture
def driver(engine, driver_for):
    return driver_for(engine)


def used(engine, model) -> int:
    return engine.load(model).kv_used_tokens


# --- admission


def test_only_admitted_calls_prefill(engine, driver, model, new_prompt):
    a, b = (driver.submit(model, new_prompt(20), 4) for _ in range(2))
    assert engine.waiting(model) == [a, b]
    assert driver.step(NOBODY).kind == "idle"
    ran = driver.step(frozenset({b}))
    assert (ran.kind, ran.batch, ran.prefilled_tokens) == ("prefill", 1, 20)
    assert engine.waiting(model) == [a]
    assert driver.step(NOBODY).kind == "decode"
    assert len(driver.outputs[b].ids) == 2
    assert driver.outputs[a].ids == []
    assert driver.step(frozenset({a, "unknown"})).kind == "prefill"
    driver.drain(model)


def test_more_calls_than_slots_wait_their_turn(engine, driver, model, references, new_prompt):
    rids = [driver.submit(model, new_prompt(12), 5) for _ in range(7)]
    driver.step()
    assert engine.running(model) <= 4
    driver.drain(model)
    for rid in rids:
        assert_greedy(references[model], driver.outputs[rid].prompt, driver.outputs[rid].ids)


def test_kv_pressure_retracts_and_tokens_stay_exact(engine, driver, references, new_prompt):
    """Four calls that together outgrow 1024 KV rows: SGLang retracts some, they wait first in line, none differs."""
    model = QWEN3
    engine.switch(model)
    rids = [driver.submit(model, new_prompt(180), 90) for _ in range(4)]
    driver.drain(model)
    outputs = [driver.outputs[rid] for rid in rids]
    assert any(out.last.recomputed_tokens for out in outputs)
    for out in outputs:
        assert_greedy(references[model], out.prompt, out.ids)


# --- chunked prefill


def test_a_long_prompt_takes_several_steps_and_others_go_on(engine, driver, model, references, new_prompt):
    short = driver.submit(model, new_prompt(10), 12)
    driver.step()
    long = driver.submit(model, new_prompt(200), 4)
    sizes = []
    while not driver.outputs[long].ids:
        done = driver.step(frozenset({long}))
        sizes.append(done.prefilled_tokens)
        assert done.half == ("" if driver.outputs[long].ids else long)
        if not driver.outputs[long].ids:
            assert engine.waiting(model) == [long]
            before = len(driver.outputs[short].ids)
            assert driver.step(NOBODY).kind == "decode"
            assert len(driver.outputs[short].ids) == before + 1
    assert sum(sizes) == 200
    assert len(sizes) == 4
    assert max(sizes) <= 64
    driver.drain(model)
    for rid in (short, long):
        assert_greedy(references[model], driver.outputs[rid].prompt, driver.outputs[rid].ids)


def test_a_switch_half_way_through_a_prefill(engine, driver, model, references, new_prompt):
    rid = driver.submit(model, new_prompt(180), 4)
    driver.step()
    assert engine.switch(QWEN3 if model == MLA else MLA).retracted == 1
    assert engine.running(model) == 0
    assert engine.waiting(model) == [rid]
    engine.switch(model)
    driver.drain(model)
    out = driver.outputs[rid]
    assert out.last.recomputed_tokens == 64
    assert_greedy(references[model], out.prompt, out.ids)


# --- retract


def test_retracted_calls_wait_first_and_keep_their_tokens(engine, driver, model, references, new_prompt):
    early, late = driver.submit(model, new_prompt(20), 10), driver.submit(model, new_prompt(20), 10)
    driver.step(frozenset({late}))
    for _ in range(3):
        driver.step(NOBODY)
    assert engine.switch(QWEN3 if model == MLA else MLA).retracted == 1
    kept = list(driver.outputs[late].ids)
    assert len(kept) == 4
    assert engine.waiting(model) == [late, early]
    assert engine.has_unfinished(model)
    engine.switch(model)
    driver.drain(model)
    assert driver.outputs[late].ids[:4] == kept
    for rid in (early, late):
        assert_greedy(references[model], driver.outputs[rid].prompt, driver.outputs[rid].ids)


# --- abort, in every state


def test_abort_waiting(engine, driver, model, new_prompt):
    rid = driver.submit(model, new_prompt(20))
    assert engine.abort(rid)
    assert not engine.abort(rid)
    assert not engine.has_unfinished(model)
    assert driver.step().kind == "idle"


def test_abort_running_frees_at_once_and_says_no_more(engine, driver, model, references, new_prompt):
    stay, go = driver.submit(model, new_prompt(20), 6), driver.submit(model, new_prompt(40), 50)
    driver.step()
    driver.step()
    before = used(engine, model)
    said = len(driver.outputs[go].ids)
    engine.abort(go)
    assert used(engine, model) < before
    assert engine.running(model) == 1
    driver.drain(model)
    assert len(driver.outputs[go].ids) == said
    assert_greedy(references[model], driver.outputs[stay].prompt, driver.outputs[stay].ids)


def test_abort_right_after_the_prefill(engine, driver, model, new_prompt):
    rid = driver.submit(model, new_prompt(20), 6)
    driver.step()
    engine.abort(rid)
    assert driver.step().kind == "idle"


def test_abort_half_way_through_a_prefill(engine, driver, model, references, new_prompt):
    rid = driver.submit(model, new_prompt(200))
    other = driver.submit(model, new_prompt(30), 4)
    driver.step()
    driver.step()
    assert engine.running(model) >= 1
    engine.abort(rid)
    assert engine.running(model) == 0
    driver.drain(model)
    assert driver.outputs[rid].ids == []
    assert_greedy(references[model], driver.outputs[other].prompt, driver.outputs[other].ids)


def test_abort_parked(engine, driver, model, new_prompt):
    rids = [driver.submit(model, new_prompt(20), 20), driver.submit(model, new_prompt(150), 20)]
    driver.step()
    driver.step()
    engine.switch(QWEN3 if model == MLA else MLA)
    for rid in rids:
        assert engine.abort(rid)
    assert not engine.has_unfinished(model)
    engine.switch(model)
    assert driver.step().kind == "idle"


def test_abort_then_switch_without_a_step_between(engine, driver, model, new_prompt):
    rids = [driver.submit(model, new_prompt(n), 20) for n in (20, 20, 150)]
    for _ in range(3):
        driver.step()
    engine.abort(rids[0])
    engine.abort(rids[2])
    assert engine.switch(QWEN3 if model == MLA else MLA).retracted == 1
    assert engine.waiting(model) == [rids[1]]


def test_ids_that_begin_alike_are_different(engine, driver, model, new_prompt):
    """SGLang aborts by prefix; the engine's own ids have one length."""
    sampling = Sampling(max_new_tokens=3, temperature=0.0, ignore_eos=True)
    for rid in ("session-1", "session-12"):
        engine.submit(EngineCall(rid=rid, model=model, input_ids=new_prompt(10), sampling=sampling))
    assert engine.abort("session-1")
    assert engine.waiting(model) == ["session-12"]
    assert engine.abort("session-12")


# --- prefix cache


def test_a_second_turn_finds_the_first_cached(engine, driver, model, references, new_prompt):
    first = driver.run(model, new_prompt(40), 8)
    second = driver.run(model, first.prompt + first.ids + new_prompt(12), 8)
    page = engine._models[model].scheduler.page_size
    known = (40 + 8 - 1) // page * page  # the last token's KV was never computed
    assert second.cached == known
    assert second.last.cache_source == "device"
    assert second.last.prefilled_tokens == len(second.prompt) - known
    assert_greedy(references[model], second.prompt, second.ids)


def test_a_repeated_prompt_still_computes_its_last_token(engine, driver, model, new_prompt):
    ids = new_prompt(32)
    driver.run(model, ids, 2)
    again = driver.run(model, ids, 2)
    assert 0 < again.cached < 32


def test_prefixes_are_not_shared_across_salts(driver, model, new_prompt):
    ids = new_prompt(64)
    first = driver.run(model, ids, 2, salt="tenant-a")
    assert driver.run(model, ids, 2, salt="tenant-b").cached == 0
    assert driver.run(model, ids, 2).cached == 0
    assert driver.run(model, ids, 2, salt="tenant-a").cached >= 48
    assert driver.run(model, ids, 2, salt="tenant-b").ids == first.ids


# --- ends


def test_stop_tokens_end_a_call_and_are_not_output(driver, model, new_prompt):
    ids = new_prompt(20)
    free = driver.run(model, ids, 8)
    at = next(i for i in range(1, 8) if free.ids[i] not in free.ids[:i])
    stopped = driver.run(model, ids, 8, stop_token_ids=(free.ids[at],))
    assert stopped.finished == "stop"
    assert stopped.ids == free.ids[:at]
    other = driver.run(model, ids, 8, stop_token_ids=(free.ids[at],), ignore_eos=False)
    assert (other.finished, other.ids) == ("stop", free.ids[:at])


def test_a_stop_token_first_gives_an_empty_answer(driver, model, new_prompt):
    ids = new_prompt(20)
    first = driver.run(model, ids, 1).ids[0]
    out = driver.run(model, ids, 8, stop_token_ids=(first,))
    assert (out.finished, out.ids) == ("stop", [])


def test_the_whole_context_is_served(engine, driver, model, new_prompt):
    limit = engine.models()[model].context_tokens
    assert limit == 512
    out = driver.run(model, new_prompt(limit - 1), 1)
    assert (out.finished, len(out.ids)) == ("length", 1)
    out = driver.run(model, new_prompt(limit - 3), 3)
    assert (out.finished, len(out.ids)) == ("length", 3)


def test_what_can_never_fit_is_refused_and_not_queued(engine, driver, model, new_prompt):
    with pytest.raises(ContextLengthError, match="512"):
        driver.submit(model, new_prompt(510), 3)
    with pytest.raises(ContextLengthError):
        driver.submit(model, new_prompt(600), 1)
    with pytest.raises(ModelNotFoundError):
        driver.submit("nobody", [1], 1)
    with pytest.raises(BadRequestError):
        driver.submit(model, [], 1)
    with pytest.raises(BadRequestError):
        driver.submit(model, [49152], 1)
    with pytest.raises(BadRequestError):
        driver.submit(model, [1], 0)
    with pytest.raises(BadRequestError, match="top_p"):
        driver.submit(model, [1], 1, top_p=1.5)
    assert not engine.has_unfinished(model)
    assert engine.load(model).waiting == 0


def test_a_rid_in_use_is_refused(engine, driver, model, new_prompt):
    rid = driver.submit(model, new_prompt(5), 2)
    with pytest.raises(BadRequestError, match="already"):
        engine.submit(EngineCall(rid=rid, model=model, input_ids=[1], sampling=Sampling(max_new_tokens=1)))
    driver.drain(model)


# --- load and leaks


def test_load_counts(engine, driver, model, new_prompt):
    engine.switch(QWEN3 if model == MLA else MLA)
    engine.switch(model)  # empties the cache
    driver.submit(model, new_prompt(30), 4, session="s1")
    load = engine.load(model)
    assert (load.waiting, load.running, load.waiting_tokens, load.kv_used_tokens) == (1, 0, 30, 0)
    driver.step()
    load = engine.load(model)
    assert (load.waiting, load.running, load.waiting_tokens) == (0, 1, 0)
    assert load.kv_used_tokens >= load.kv_held_tokens >= 30
    driver.drain(model)
    load = engine.load(model)
    assert load.kv_held_tokens == 0 < load.kv_used_tokens, "its prefix can be evicted"
    assert (load.running, load.cached_sessions) == (0, 1)
    assert engine.switch(model).path == "none"
    assert engine.load(model).kv_epoch == load.kv_epoch


def test_the_idle_check_finds_a_leak(engine, driver, model):
    scheduler = engine._models[model].scheduler
    allocator, rows = scheduler.token_to_kv_pool_allocator, scheduler.req_to_token_pool
    taken = allocator.alloc(scheduler.page_size)
    with pytest.raises(Exception, match="leak"):
        engine.check_idle()
    allocator.free(taken)
    slot = rows.free_slots.pop()
    with pytest.raises(Exception, match="leak"):
        engine.check_idle()
    rows.free_slots.append(slot)
    engine.check_idle()
    rid = driver.submit(model, [1, 2, 3], 1)
    with pytest.raises(EngineError, match="unfinished"):
        engine.check_idle()
    engine.abort(rid)


def test_nothing_steps_before_the_first_switch(make_engine):
    fresh = make_engine(MLA)
    assert fresh.active is None
    with pytest.raises(EngineError, match="switch"):
        fresh.step(None)
    assert not fresh.abort(new_rid())
