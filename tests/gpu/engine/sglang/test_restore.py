"""Prefixes that come back from the host: exact tokens over poisoned device memory, ordinary hits, honest figures."""

from __future__ import annotations

import threading

import pytest

from talaria_gpu.models.reference import assert_greedy

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]
SMOLLM2, QWEN3, MLA = "smollm2-135m-instruct", "tiny-qwen3-random", "tiny-mla-random"
MODELS = (SMOLLM2, QWEN3, MLA)
NOBODY: frozenset[str] = frozenset()
MIB = 1 << 20


@pytest.fixture(scope="module", params=[16, 1], ids=["page16", "page1"])
def engine(request, make_engine):
    from talaria_gpu.engine.sglang.spec import HostKvOptions

    models = MODELS if request.param == 16 else (QWEN3, MLA)
    return make_engine(*models, page_size=request.param, host_kv=HostKvOptions(capacity_bytes=64 * MIB))


@pytest.fixture
def driver(engine, driver_for):
    return driver_for(engine)


@pytest.fixture(params=[QWEN3, MLA])
def model(request, engine):
    engine.switch(request.param)
    return request.param


def away(engine, model):
    """Switch to another model and back: the device rows are NaN in between."""
    engine.switch(QWEN3 if model != QWEN3 else MLA)
    engine.switch(model)


def gate(stream):
    """Holds a copy stream back until set."""
    event = threading.Event()
    stream.submit(event.wait, 0)
    return event


def counts(engine):
    return engine.host_kv_stats().counts


def test_three_turns_over_forced_switches(engine, driver, references, new_prompt):
    """Every turn of every model restores all full blocks of the last one, and says what a full recompute says."""
    history = {m: new_prompt(75) for m in engine.models()}
    ends: dict[str, int] = {}
    for turn in range(3):
        for m in engine.models():
            out = driver.run(m, history[m], 9)
            assert_greedy(references[m], out.prompt, out.ids)
            assert out.cached == ends.get(m, 0)
            assert out.last.cache_source == ("host" if turn else "none")
            ends[m] = (len(out.prompt) + len(out.ids) - 1) // 16 * 16
            history[m] = out.prompt + out.ids + new_prompt(11)
    assert all(engine.load(m).restore_ms_per_token > 0 for m in history)
    assert all(engine.load(m).host_kv_tokens >= ends[m] for m in history)


def test_nothing_is_copied_when_the_device_still_has_it(engine, driver, model, new_prompt):
    ids = new_prompt(64)
    driver.run(model, ids, 2)
    before = engine.host_kv_stats().h2d_bytes
    out = driver.run(model, ids, 2)
    assert (out.cached, out.last.cache_source) == (
        48 if engine._models[model].scheduler.page_size == 16 else 63,
        "device",
    )
    assert engine.host_kv_stats().h2d_bytes == before


def test_the_part_that_the_device_lost_is_restored(engine, driver, model, references, new_prompt):
    """Under KV pressure, without any switch: a hot instance uses the host, too."""
    ids = new_prompt(200)
    driver.run(model, ids, 2)
    for _ in range(5):
        driver.run(model, new_prompt(190), 2)
    out = driver.run(model, [*ids, 5, 6, 7], 4)
    assert out.last.cache_source == "host"
    assert out.cached == 192
    assert_greedy(references[model], out.prompt, out.ids)


def test_two_calls_of_one_prefix_restore_it_once(engine, driver, model, references, new_prompt):
    ids = new_prompt(96)
    driver.run(model, ids, 2)
    away(engine, model)
    before = counts(engine).restored_tokens
    rids = [driver.submit(model, [*ids, n], 4) for n in (1, 2)]
    driver.drain(model)
    assert counts(engine).restored_tokens - before == 96
    for rid in rids:
        out = driver.outputs[rid]
        assert out.cached >= 96
        assert_greedy(references[model], out.prompt, out.ids)


def test_never_the_whole_prompt(engine, driver, model, references, new_prompt):
    """The last token must be computed: of a prompt that ends with a block, that block is not restored."""
    ids = new_prompt(64)
    driver.run(model, ids, 2)
    away(engine, model)
    out = driver.run(model, ids, 4)
    assert (out.cached, out.last.prefilled_tokens) == (48, 16)
    assert_greedy(references[model], out.prompt, out.ids)


def test_another_tenant_restores_nothing(engine, driver, model, new_prompt):
    ids = new_prompt(64)
    driver.run(model, ids, 2, salt="a")
    away(engine, model)
    assert driver.run(model, ids, 2, salt="b").cached == 0
    away(engine, model)
    assert driver.run(model, ids, 2, salt="a").cached == 48


def test_prefix_state(engine, driver, model, new_prompt):
    ids = new_prompt(70)
    driver.run(model, ids, 2)
    away(engine, model)
    rid = driver.submit(model, ids, 2)
    assert engine.prefix_state(rid) == (0, 64)
    assert engine.prefix_state("unknown") == (0, 0)
    driver.drain(model)
    rid = driver.submit(model, ids, 2)
    device, host = engine.prefix_state(rid)
    assert device >= 64
    assert host == 0


def test_others_run_while_a_prefix_is_on_its_way(engine, driver, model, references, new_prompt):
    ids = new_prompt(64)
    driver.run(model, ids, 2)
    away(engine, model)
    other = driver.submit(model, new_prompt(20), 12)
    driver.step()
    go = gate(engine._host_kv._in)
    rid = driver.submit(model, [*ids, 9], 4)
    for _ in range(3):
        assert driver.step().kind == "decode"
    assert engine.waiting(model) == [rid]
    go.set()
    driver.drain(model)
    assert driver.outputs[rid].cached == 64
    for each in (rid, other):
        assert_greedy(references[model], driver.outputs[each].prompt, driver.outputs[each].ids)


def test_cancel_in_mid_restore(engine, driver, model, references, new_prompt):
    ids = new_prompt(64)
    driver.run(model, ids, 2)
    away(engine, model)
    other = driver.submit(model, new_prompt(20), 6)
    driver.step()
    go = gate(engine._host_kv._in)
    rid = driver.submit(model, [*ids, 9], 4)
    driver.step()
    assert engine.abort(rid)
    driver.step()
    go.set()
    driver.drain(model)
    engine.check_idle()
    assert_greedy(references[model], driver.outputs[other].prompt, driver.outputs[other].ids)
    out = driver.run(model, [*ids, 9], 4)
    assert out.cached >= 64
    assert_greedy(references[model], out.prompt, out.ids)


def test_a_switch_in_mid_restore(engine, driver, model, references, new_prompt):
    ids = new_prompt(64)
    driver.run(model, ids, 2)
    away(engine, model)
    other = driver.submit(model, new_prompt(20), 6)
    driver.step()
    go = gate(engine._host_kv._in)
    rid = driver.submit(model, [*ids, 9], 4)
    driver.step()
    go.set()
    away(engine, model)
    driver.drain(model)
    for each in (rid, other):
        assert_greedy(references[model], driver.outputs[each].prompt, driver.outputs[each].ids)
    assert driver.outputs[rid].cached == 64


def test_a_call_that_is_not_admitted_restores_nothing(engine, driver, model, new_prompt):
    ids = new_prompt(64)
    driver.run(model, ids, 2)
    away(engine, model)
    before = engine.host_kv_stats().h2d_bytes
    rid = driver.submit(model, ids, 2)
    assert driver.step(NOBODY).kind == "idle"
    assert engine.host_kv_stats().h2d_bytes == before
    assert driver.step(frozenset({rid})).kind == "prefill"
    driver.drain(model)


def test_a_corrupt_block_is_recomputed_and_counted(engine, driver, model, references, new_prompt):
    ids = new_prompt(80)
    driver.run(model, ids, 2)
    away(engine, model)
    store, before = engine._host_kv, counts(engine).corrupt
    rid = driver.submit(model, [*ids, 9], 6)
    request = engine._calls[rid].request
    third = engine._models[model].residence._saver.find(request).blocks[2]
    store._pool[third.cell.offset + 100] ^= 255
    driver.drain(model)
    out = driver.outputs[rid]
    assert out.cached == 32
    assert counts(engine).corrupt == before + 1
    assert_greedy(references[model], out.prompt, out.ids)
    away(engine, model)
    out = driver.run(model, [*ids, 9], 6)
    assert out.cached == 80
    assert_greedy(references[model], out.prompt, out.ids)


def test_the_negative_control(engine, driver, model, references, new_prompt):
    """Without the checksum the same corruption changes the tokens: equality above does depend on the bytes."""
    ids, store = new_prompt(80), engine._host_kv
    driver.run(model, ids, 2)
    away(engine, model)
    rid = driver.submit(model, [*ids, 9], 8)
    request = engine._calls[rid].request
    for block in engine._models[model].residence._saver.find(request).blocks:
        store._pool[block.cell.offset : block.cell.offset + block.cell.size] ^= 0x80
    store._verify = False
    try:
        driver.drain(model)
    finally:
        store._verify = True
        store.registry.drop_model(engine._models[model].residence._pools.kv.descriptor.identity)
    out = driver.outputs[rid]
    with pytest.raises(AssertionError):
        assert_greedy(references[model], out.prompt, out.ids)
    away(engine, model)


def test_the_epoch_stands_while_prefixes_survive(engine, driver, model, new_prompt):
    epoch = engine.load(model).kv_epoch
    driver.run(model, new_prompt(40), 2, session="s")
    away(engine, model)
    assert engine.load(model).kv_epoch == epoch
    assert engine.load(model).cached_sessions > 0


def test_a_full_pool_refuses_and_the_epoch_rises(make_engine, driver_for, references, new_prompt):
    """A pool of a few blocks: what finds no room is recomputed, and routers are told that prefixes are missing."""
    from talaria_gpu.engine.sglang.spec import HostKvOptions

    engine = make_engine(QWEN3, MLA, host_kv=HostKvOptions(capacity_bytes=8 * 40000))
    driver = driver_for(engine)
    ids = new_prompt(400)
    out = driver.run(QWEN3, ids, 2)
    epoch = engine.load(QWEN3).kv_epoch
    engine.switch(MLA)
    assert engine.load(QWEN3).kv_epoch == epoch + 1
    out = driver.run(QWEN3, ids, 4)
    assert 0 <= out.cached < 384
    assert_greedy(references[QWEN3], out.prompt, out.ids)
    assert engine.host_kv_stats().counts.refused > 0
