"""Every default model says what a full recompute says: alone, in a batch, and across switches with garbage in between."""

from __future__ import annotations

import pytest

from talaria_gpu.models.reference import assert_greedy

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]
SMOLLM2, QWEN3, MLA = "smollm2-135m-instruct", "tiny-qwen3-random", "tiny-mla-random"
MODELS = (SMOLLM2, QWEN3, MLA)


@pytest.fixture(scope="module")
def engine(make_engine):
    return make_engine(*MODELS)


@pytest.fixture
def driver(engine, driver_for):
    return driver_for(engine)


@pytest.mark.parametrize("model", MODELS)
def test_a_batch_of_calls_matches_the_reference(model, engine, driver, references, new_prompt):
    engine.switch(model)
    rids = [driver.submit(model, new_prompt(n), 8) for n in (5, 33, 48)]
    driver.drain(model)
    for rid in rids:
        out = driver.outputs[rid]
        assert out.finished == "length"
        assert len(out.ids) == 8
        assert_greedy(references[model], out.prompt, out.ids)


@pytest.mark.soak
def test_interleaved_over_24_switches_with_poison(engine, driver, references, new_prompt):
    """Each slot decodes three tokens of calls that the switch then retracts; addresses are compared by the engine."""
    n = 16
    home = {name: model.region.home for name, model in engine._models.items()}
    rids = {model: [driver.submit(model, new_prompt(length), n) for length in (21, 30)] for model in MODELS}
    retracted = switches = 0
    for _ in range(8):
        for model in MODELS:
            timing = engine.switch(model)
            switches += timing.path != "none"
            retracted += timing.retracted
            assert timing.h2d_bytes == timing.weight_bytes
            for _ in range(3):
                driver.step()
            assert engine._models[model].region.addresses() == home[model]
    for model in MODELS:
        engine.switch(model)
        driver.drain(model)
    assert switches >= 20
    assert retracted >= 20
    for model, calls in rids.items():
        for rid in calls:
            out = driver.outputs[rid]
            assert len(out.ids) == n
            assert out.last.recomputed_tokens > 0
            assert_greedy(references[model], out.prompt, out.ids)


@pytest.fixture(scope="module")
def kept(make_engine):
    """As the workers of a cold instance make it: what a switch takes off the device waits on the host."""
    from talaria_gpu.engine.sglang.spec import HostKvOptions

    return make_engine(*MODELS, host_kv=HostKvOptions(capacity_bytes=256 << 20))


def test_interleaved_over_24_switches_with_host_kv_and_poison(kept, driver_for, references, new_prompt):
    """Each slot decodes three tokens of calls that the switch then suspends; afterwards they have a second turn."""
    n, driver = 16, driver_for(kept)
    home = {name: model.region.home for name, model in kept._models.items()}
    rids = {model: [driver.submit(model, new_prompt(length), n) for length in (21, 30)] for model in MODELS}
    suspended = switches = 0
    for _ in range(8):
        for model in MODELS:
            timing = kept.switch(model)
            switches += timing.path != "none"
            suspended += timing.suspended
            for _ in range(3):
                driver.step()
            assert kept._models[model].region.addresses() == home[model]
    for model in MODELS:
        kept.switch(model)
        driver.drain(model)
    assert switches >= 20
    assert suspended >= 20
    for model, calls in rids.items():
        kept.switch(model)
        for rid in calls:
            out = driver.outputs[rid]
            assert len(out.ids) == n
            assert out.last.recomputed_tokens == 0
            assert_greedy(references[model], out.prompt, out.ids)
            ids = [*out.prompt, *out.ids, *new_prompt(20)]
            again = driver.run(model, ids, 4)
            assert again.cached >= len(out.prompt) // 16 * 16
            assert again.last.cache_source == "host"
            assert_greedy(references[model], ids, again.ids)


def test_the_buffer_holds_the_largest_model_but_not_all(engine):
    largest = max(m.region.end for m in engine._models.values())
    assert largest <= engine.buffer_bytes
    assert engine.buffer_bytes < sum(info.weight_bytes for info in engine.models().values())


def test_the_default_buffer_is_less_than_the_weights_and_enough(engine):
    """talaria.toml's cold instance: 780 MiB, 4096 KV tokens."""
    from pathlib import Path

    from talaria_common.settings import load

    cold = next(i for i in load(Path("talaria.toml"), {}).instances if i.pool == "cold")
    size = cold.buffer_mib << 20
    infos = engine.models().values()
    assert set(cold.models) == {i.name for i in infos}
    assert size < sum(i.weight_bytes for i in infos)
    assert size >= max(i.weight_bytes + (cold.kv_tokens + cold.page_size) * i.kv_bytes_per_token for i in infos)


def test_regions_overlap_and_the_outgoing_prefixes_are_gone(engine, driver, new_prompt):
    ids = new_prompt(64)
    driver.run(QWEN3, ids, 2)
    assert driver.run(QWEN3, ids, 2).cached == 48
    epoch = engine.load(QWEN3).kv_epoch
    engine.switch(MLA)
    assert engine.load(QWEN3).kv_epoch == epoch + 1
    assert engine.load(QWEN3).kv_used_tokens == 0
    again = driver.run(QWEN3, ids, 2)
    assert again.cached == 0
    assert again.last.prefilled_tokens == 64


def test_corrupt_kv_changes_the_tokens(engine, driver, references, new_prompt):
    """The negative control: equality above would not hold if wrong bytes were read."""
    for model in (QWEN3, MLA):
        engine.switch(model)
        rid = driver.submit(model, new_prompt(40), 8)
        driver.step()
        for layer in engine._models[model].region._kv:
            layer[16:].fill_(0x3F)
        driver.drain(model)
        out = driver.outputs[rid]
        with pytest.raises(AssertionError):
            assert_greedy(references[model], out.prompt, out.ids)
        engine.switch(SMOLLM2)  # away: the corrupt rows are cached
