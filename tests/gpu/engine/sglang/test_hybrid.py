"""Hybrids: KV of the attention layers and the state of the recurrent ones leave together and come back together."""

from __future__ import annotations

import threading

import pytest

from talaria_gpu.models.reference import assert_greedy
from tests.gpu.engine.sglang.conftest import HYBRID, HYBRID_DENSE, QWEN3

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]
MIB = 1 << 20
INTERVAL = 64
"""Tokens between the states of an answer, with pages."""


@pytest.fixture(
    scope="module", params=[pytest.param(16, id="page16"), pytest.param(1, id="page1", marks=pytest.mark.soak)]
)
def engine(request, make_engine):
    from talaria_gpu.engine.sglang.spec import HostKvOptions

    return make_engine(
        HYBRID, QWEN3, page_size=request.param, kv_tokens=640, host_kv=HostKvOptions(capacity_bytes=64 * MIB)
    )


@pytest.fixture
def driver(engine, driver_for):
    engine.switch(HYBRID)
    return driver_for(engine)


def page(engine) -> int:
    return engine._models[HYBRID].scheduler.page_size


def kept(engine, computed: int) -> int:
    """Tokens of the longest prefix that has a state, of so many computed ones."""
    return computed if page(engine) == 1 else computed // INTERVAL * INTERVAL


def away(engine) -> None:
    """Another model and back: rows and states are NaN in between."""
    engine.switch(QWEN3)
    engine.switch(HYBRID)


def counts(engine):
    return engine.host_kv_stats().counts


def test_three_turns_over_forced_switches(engine, driver, references, new_prompt):
    """Every turn restores all up to the last state, and says what a full recompute says; the other model's, too."""
    history, end = new_prompt(75), 0
    for turn in range(3):
        out = driver.run(HYBRID, history, 60)
        assert_greedy(references[HYBRID], out.prompt, out.ids)
        assert (out.cached, out.last.cache_source) == (end, "host" if turn else "none")
        end = kept(engine, len(out.prompt) + len(out.ids) - 1)
        assert end > len(out.prompt)
        history = out.prompt + out.ids + new_prompt(11)
        other = driver.run(QWEN3, new_prompt(40), 6)
        assert_greedy(references[QWEN3], other.prompt, other.ids)
    assert engine.load(HYBRID).restore_ms_per_token > 0


def test_a_regenerated_answer_restores_the_prompt(engine, driver, references, new_prompt):
    ids = new_prompt(130)
    driver.run(HYBRID, ids, 70)
    away(engine)
    out = driver.run(HYBRID, [*ids[:-1], 5], 6)
    assert out.cached == 128  # the end of its second chunk
    assert_greedy(references[HYBRID], out.prompt, out.ids)


def test_prefix_state(engine, driver, new_prompt):
    ids = new_prompt(100)
    out = driver.run(HYBRID, ids, 40)
    end = kept(engine, 139)
    away(engine)
    rid = driver.submit(HYBRID, out.prompt + out.ids, 2)
    assert engine.prefix_state(rid) == (0, end)
    driver.drain(HYBRID)
    assert driver.outputs[rid].cached == end


def test_several_sessions_on_few_states(engine, driver, references, new_prompt):
    """More sessions than the device has room for states: what it lost comes from the host, without any switch."""
    sessions = [new_prompt(70 + 5 * n) for n in range(12)]
    outs = [driver.run(HYBRID, ids, 4) for ids in sessions]
    before = counts(engine).restored
    for out in outs[:4]:
        again = driver.run(HYBRID, out.prompt + out.ids + new_prompt(5), 4)
        assert again.cached >= kept(engine, len(out.prompt))
        assert_greedy(references[HYBRID], again.prompt, again.ids)
    assert counts(engine).restored > before


def test_suspended_in_decode_and_in_a_chunked_prefill(engine, driver, references, new_prompt):
    rids = [driver.submit(HYBRID, new_prompt(n), 30) for n in (33, 64)]
    for _ in range(9):
        driver.step()
    rids.append(driver.submit(HYBRID, new_prompt(150), 6))
    assert driver.step().prefilled_tokens == 64
    timing = engine.switch(QWEN3)
    assert (timing.suspended, timing.retracted) == (3, 0)
    driver.run(QWEN3, new_prompt(90), 12)
    engine.switch(HYBRID)
    driver.drain(HYBRID)
    for rid in rids:
        out = driver.outputs[rid]
        assert out.last.recomputed_tokens == 0
        assert_greedy(references[HYBRID], out.prompt, out.ids)


def test_aborted_while_suspended(engine, driver, references, new_prompt):
    stay, go = (driver.submit(HYBRID, new_prompt(n), 20) for n in (30, 31))
    for _ in range(5):
        driver.step()
    engine.switch(QWEN3)
    assert engine.abort(go)
    engine.switch(HYBRID)
    driver.drain(HYBRID)
    out = driver.outputs[stay]
    assert_greedy(references[HYBRID], out.prompt, out.ids)


def test_a_corrupt_state_is_declined_and_an_earlier_one_serves(engine, driver, references, new_prompt):
    ids = new_prompt(140)
    driver.run(HYBRID, ids, 4)
    away(engine)
    rid = driver.submit(HYBRID, [*ids, 9], 6)
    request = engine._calls[rid].request
    found = engine._models[HYBRID].residence._saver.find(request)
    assert found.tokens == (128 if page(engine) == 16 else 140)
    engine._host_kv._pool[found.states[0].cell.offset + 7] ^= 255
    before = counts(engine).corrupt
    driver.drain(HYBRID)
    out = driver.outputs[rid]
    assert out.cached == (64 if page(engine) == 16 else 128)
    assert counts(engine).corrupt == before + 1
    assert_greedy(references[HYBRID], out.prompt, out.ids)


def test_the_negative_control(engine, driver, references, new_prompt):
    """Unchecked, the same corruption changes the tokens: equality above does depend on the state's bytes."""
    ids, store = new_prompt(140), engine._host_kv
    driver.run(HYBRID, ids, 2)
    away(engine)
    rid = driver.submit(HYBRID, [*ids, 9], 8)
    for block in engine._models[HYBRID].residence._saver.find(engine._calls[rid].request).states:
        store._pool[block.cell.offset : block.cell.offset + block.cell.size] ^= 0x80
    store._verify = False
    try:
        driver.drain(HYBRID)
    finally:
        store._verify = True
        store.registry.drop_model(engine._models[HYBRID].residence._pools.kv.descriptor.identity)
    out = driver.outputs[rid]
    with pytest.raises(AssertionError):
        assert_greedy(references[HYBRID], out.prompt, out.ids)
    away(engine)


def test_cancelled_in_mid_restore(engine, driver, references, new_prompt):
    ids = new_prompt(140)
    driver.run(HYBRID, ids, 2)
    away(engine)
    other = driver.submit(HYBRID, new_prompt(20), 6)
    driver.step()
    go = threading.Event()
    engine._host_kv._in.submit(go.wait, 0)
    rid = driver.submit(HYBRID, [*ids, 9], 4)
    driver.step()
    assert engine.abort(rid)
    driver.step()
    go.set()
    driver.drain(HYBRID)
    engine.check_idle()
    assert_greedy(references[HYBRID], driver.outputs[other].prompt, driver.outputs[other].ids)


@pytest.fixture
def few_states(make_engine, driver_for, new_prompt):
    """Two calls at most and 12 states; ten sessions of 64 tokens on the host, one call decoding."""
    from talaria_gpu.engine.sglang.spec import HostKvOptions

    engine = make_engine(HYBRID, QWEN3, max_running=2, kv_tokens=800, host_kv=HostKvOptions(capacity_bytes=64 * MIB))
    driver = driver_for(engine)
    sessions = [[*new_prompt(64), 9] for _ in range(10)]
    for ids in sessions:
        driver.run(HYBRID, ids, 2)
    away(engine)
    running = driver.submit(HYBRID, new_prompt(20), 90)
    driver.step()
    return engine, driver, sessions, running


def test_prefixes_for_nobody_leave_states_for_who_comes(few_states, references, new_prompt):
    """Restores of cancelled calls, and prefixes held for calls that are not admitted any more, each with a state."""
    engine, driver, sessions, running = few_states
    assert engine._models[HYBRID].scheduler.states == 12
    go = threading.Event()
    try:
        engine._host_kv._in.submit(go.wait, 0)
        for ids in sessions:
            rid = driver.submit(HYBRID, ids, 4)
            driver.step()
            assert engine.abort(rid)
        fresh = driver.submit(HYBRID, new_prompt(20), 4)
        for _ in range(3):
            driver.step()
    finally:
        go.set()
    driver.step()
    while not driver.outputs[fresh].finished:
        driver.step()
    held = []
    for ids in sessions:
        held.append(driver.submit(HYBRID, ids, 4))
        driver.step(frozenset({held[-1]}))
        engine._host_kv._reads and engine._host_kv._reads[-1].transfer.wait()
        assert driver.step(frozenset()).kind == "decode"
    late = driver.submit(HYBRID, new_prompt(20), 4)
    assert driver.step(frozenset({late})).kind == "prefill"
    driver.drain(HYBRID)
    for rid in (running, fresh, late, *held):
        out = driver.outputs[rid]
        assert out.finished == "length"
        assert_greedy(references[HYBRID], out.prompt, out.ids)
    assert [driver.outputs[rid].cached for rid in held] == [64] * 10


@pytest.mark.soak
@pytest.mark.parametrize("page_size", [16, 1])
def test_two_hybrids_share_one_buffer(make_engine, driver_for, references, new_prompt, page_size):
    """Overlapping weights, KV and states; without host KV running calls are retracted and computed again."""
    from talaria_gpu.engine.sglang.spec import HostKvOptions

    for host_kv in (HostKvOptions(capacity_bytes=64 * MIB), None):
        engine = make_engine(HYBRID, HYBRID_DENSE, page_size=page_size, kv_tokens=640, host_kv=host_kv)
        driver = driver_for(engine)
        history = {m: new_prompt(70) for m in (HYBRID, HYBRID_DENSE)}
        for _ in range(3):
            for model, ids in history.items():
                engine.switch(model)
                rid = driver.submit(model, ids, 70)
                for _ in range(5):
                    driver.step()
                away_to = HYBRID if model == HYBRID_DENSE else HYBRID_DENSE
                timing = engine.switch(away_to)
                assert (timing.suspended, timing.retracted) == ((1, 0) if host_kv else (0, 1))
                engine.switch(model)
                driver.drain(model)
                out = driver.outputs[rid]
                assert_greedy(references[model], out.prompt, out.ids)
                history[model] = out.prompt + out.ids + new_prompt(5)
        engine.check_idle()
