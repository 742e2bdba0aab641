"""Random submits, admissions, aborts and switches: whatever happens, tokens are exact and nothing leaks."""

from __future__ import annotations

from random import Random

import pytest

from talaria_gpu.models.reference import assert_greedy

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]
QWEN3, MLA = "tiny-qwen3-random", "tiny-mla-random"
MODELS = (QWEN3, MLA)


@pytest.fixture(
    scope="module", params=[pytest.param(16, id="page16"), pytest.param(1, id="page1", marks=pytest.mark.soak)]
)
def engine(request, make_engine):
    return make_engine(*MODELS, page_size=request.param, kv_tokens=512, max_running=3)


def grown(random: Random, driver, model, fresh) -> list[int]:
    """A new prompt, or a finished call's conversation carried on."""
    finished = [o for o in driver.outputs.values() if o.finished and o.model == model and len(o.prompt) < 150]
    if finished and random.random() < 0.6:
        before = random.choice(finished)
        return before.prompt + before.ids + fresh(random.randint(1, 20))
    return fresh(random.randint(1, 140))


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_random_life(engine, driver_for, references, new_prompt, seed):
    random, driver = Random(seed), driver_for(engine)
    aborted: set[str] = set()
    switches = 0
    for _ in range(160):
        what = random.random()
        model = random.choice(MODELS)
        if what < 0.18:
            driver.submit(model, grown(random, driver, model, new_prompt), random.randint(1, 14))
        elif what < 0.23:
            open_calls = [r for r, o in driver.outputs.items() if not o.finished and r not in aborted]
            if open_calls:
                aborted.add(victim := random.choice(open_calls))
                assert engine.abort(victim)
        elif what < 0.33:
            switches += engine.switch(model).path != "none"
        elif engine.active is not None:
            waiting = engine.waiting(engine.active)
            some = frozenset(random.sample(waiting, random.randint(0, len(waiting))))
            driver.step(random.choice([None, some, frozenset()]))
        for name in MODELS:
            assert engine.running(name) == 0 or name == engine.active
    for model in MODELS:
        engine.switch(model)
        driver.drain(model)
    engine.check_idle()
    assert switches > 3
    done = [(rid, o) for rid, o in driver.outputs.items() if rid not in aborted]
    assert len(done) > 10
    for _, out in done:
        assert out.finished == "length"
        assert_greedy(references[out.model], out.prompt, out.ids)
