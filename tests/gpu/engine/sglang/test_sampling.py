"""Seeds, penalties and log probabilities, against the reference's logits and across retracts."""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]
QWEN3, MLA = "tiny-qwen3-random", "tiny-mla-random"
NOBODY: frozenset[str] = frozenset()


@pytest.fixture(scope="module")
def engine(make_engine):
    return make_engine(QWEN3, MLA)


@pytest.fixture
def driver(engine, driver_for):
    engine.switch(QWEN3)
    return driver_for(engine)


def interrupted(driver, engine, ids, n, steps=3, **sampling):
    """One call that is retracted after `steps` tokens."""
    engine.switch(QWEN3)
    rid = driver.submit(QWEN3, ids, n, **sampling)
    for _ in range(steps):
        driver.step()
    assert engine.switch(MLA).retracted == 1
    engine.switch(QWEN3)
    driver.drain(QWEN3)
    out = driver.outputs[rid]
    assert out.last.recomputed_tokens > 0
    return out


# --- seeds


@pytest.mark.parametrize("top_p", [1.0, 0.8])
def test_a_seed_repeats_alone_in_a_batch_and_across_a_retract(engine, driver, new_prompt, top_p):
    ids = new_prompt(20)
    how = {"temperature": 0.9, "top_p": top_p, "seed": 7}
    alone = driver.run(QWEN3, ids, 10, **how)
    others = [
        driver.submit(QWEN3, new_prompt(15), 10, temperature=1.0, top_p=0.5),
        driver.submit(QWEN3, new_prompt(15), 10, temperature=0.0),
    ]
    driver.step(frozenset(others[:1]))
    mine = driver.submit(QWEN3, ids, 10, **how)
    driver.drain(QWEN3)
    assert driver.outputs[mine].ids == alone.ids
    assert interrupted(driver, engine, ids, 10, **how).ids == alone.ids
    assert driver.run(QWEN3, ids, 10, **(how | {"seed": 8})).ids != alone.ids


def test_big_and_negative_seeds_are_taken(driver, new_prompt):
    ids = new_prompt(10)
    outputs = {s: driver.run(QWEN3, ids, 6, temperature=1.0, seed=s).ids for s in (0, -1, 2**63 - 1, 2**64)}
    assert outputs[0] == outputs[2**64]
    assert len({tuple(o) for o in outputs.values()}) == 3


def test_without_a_seed_calls_differ(driver, new_prompt):
    ids = new_prompt(10)
    assert driver.run(QWEN3, ids, 8, temperature=1.0).ids != driver.run(QWEN3, ids, 8, temperature=1.0).ids


def test_greedy_rows_stay_greedy_beside_sampled_ones(driver, references, new_prompt):
    from talaria_gpu.models.reference import assert_greedy

    greedy = driver.submit(QWEN3, new_prompt(20), 8)
    driver.submit(QWEN3, new_prompt(20), 8, temperature=1.3, seed=1)
    driver.drain(QWEN3)
    out = driver.outputs[greedy]
    assert_greedy(references[QWEN3], out.prompt, out.ids)


def test_draw_follows_the_weights_and_never_picks_a_zero():
    import torch

    from talaria_gpu.engine.sglang.sampling import draw, uniform

    weights = torch.tensor([[0.0, 1.0, 0.0, 3.0, 0.0]]).repeat(20000, 1)
    positions = torch.arange(20000)
    seeds = torch.full_like(positions, 5)
    counts = torch.bincount(draw(weights, seeds, positions), minlength=5).tolist()
    assert counts[0] == counts[2] == counts[4] == 0
    assert abs(counts[3] / 20000 - 0.75) < 0.015
    u = uniform(seeds, positions)
    assert 0 <= float(u.min()) <= float(u.max()) < 1
    assert abs(float(u.mean()) - 0.5) < 0.01
    assert float(uniform(torch.tensor([5]), torch.tensor([77]))) == float(u[77])


def test_a_nucleus_holds_the_smallest_set_of_that_mass():
    import torch

    from talaria_gpu.engine.sglang.sampling import _nucleus

    probs = torch.tensor([[0.1, 0.4, 0.2, 0.3], [0.1, 0.4, 0.2, 0.3]])
    kept = _nucleus(probs, torch.tensor([0.6, 0.05])) > 0
    assert kept.tolist() == [[False, True, False, True], [False, True, False, False]]


# --- penalties


def penalised(reference, ids, n, frequency, presence):
    """The reference's greedy continuation with OpenAI's penalties on what it has said."""
    out: list[int] = []
    for _ in range(n):
        row = reference.logits([*ids, *out])[-1].clone()
        for token in set(out):
            row[token] -= frequency * out.count(token) + presence
        out.append(int(row.argmax()))
    return out


@pytest.mark.parametrize("penalties", [(1.5, 0.0), (0.0, 2.0), (0.7, 0.9)])
def test_penalties_match_the_reference_also_across_a_retract(engine, driver, references, new_prompt, penalties):
    frequency, presence = penalties
    # A prompt of one repeated token: without penalties this model says one token again and again.
    ids = new_prompt(1) * 12
    how = {"frequency_penalty": frequency, "presence_penalty": presence}
    expected = penalised(references[QWEN3], ids, 10, frequency, presence)
    assert driver.run(QWEN3, ids, 10, **how).ids == expected
    assert interrupted(driver, engine, ids, 10, steps=5, **how).ids == expected


# --- log probabilities


def test_logprobs_are_the_models_own(engine, driver, references, new_prompt):
    import torch

    for how in ({}, {"temperature": 0.7, "seed": 3}):
        ids = new_prompt(20)
        for out in (
            driver.run(QWEN3, ids, 6, logprobs=3, **how),
            interrupted(driver, engine, ids, 6, logprobs=3, **how),
        ):
            assert len(out.logprobs) == len(out.top) == len(out.ids) == 6
            rows = references[QWEN3].logits([*ids, *out.ids[:-1]])[len(ids) - 1 :].log_softmax(-1)
            for i, token in enumerate(out.ids):
                assert out.logprobs[i] == pytest.approx(float(rows[i][token]), abs=1e-3)
                assert [t for t, _ in out.top[i]] == rows[i].topk(3).indices.tolist()
                assert [v for _, v in out.top[i]] == pytest.approx(rows[i].topk(3).values.tolist(), abs=1e-3)
    assert torch.is_grad_enabled()


def test_logprobs_of_the_chosen_only_and_in_a_mixed_batch(driver, new_prompt):
    chosen, none, two = (driver.submit(QWEN3, new_prompt(10), 4, logprobs=k) for k in (0, None, 2))
    driver.drain(QWEN3)
    outputs = driver.outputs
    assert (len(outputs[chosen].logprobs), [len(t) for t in outputs[chosen].top]) == (4, [0] * 4)
    assert (outputs[none].logprobs, outputs[none].top) == ([], [])
    assert [len(t) for t in outputs[two].top] == [2] * 4


def test_a_stop_token_has_no_logprob(driver, new_prompt):
    ids = new_prompt(20)
    free = driver.run(QWEN3, ids, 4)
    out = driver.run(QWEN3, ids, 4, logprobs=1, stop_token_ids=(free.ids[2],))
    assert len(out.ids) == len(out.logprobs) == len(out.top) == free.ids.index(free.ids[2])
