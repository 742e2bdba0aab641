"""The whole mesh on real SGLang (CPU), one cold instance with the three default models: tokens, counts, leaks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from itertools import pairwise

import pytest
import pytest_asyncio

from talaria_common.settings import parse
from talaria_common.wire import Completion, Snapshot, decode
from talaria_gpu.models import prepare
from tests.mesh.settings import REAL_MODELS, real
from tests.support.load import Outcome, session, stream_chat
from tests.support.mesh import Mesh, mesh

pytestmark = [pytest.mark.mesh, pytest.mark.engine, pytest.mark.timeout(600), pytest.mark.asyncio(loop_scope="module")]

SESSIONS, TOKENS = 30, 24
ROUNDS = 8


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Mesh]:
    async with mesh(tmp_path_factory.mktemp("real"), real("cold-0"), ready_timeout_s=240) as it:
        yield it


def check_tokens(calls: list[Outcome]) -> int:
    """Every call's tokens are the lone model's (DESIGN 8); returns the ties met."""
    from talaria_gpu.models.reference import Reference, assert_greedy

    settings = parse(real("cold-0"))
    ties = 0
    for model in sorted({c.model for c in calls}):
        reference = Reference(prepare(model, settings.models[model]))
        for c in (c for c in calls if c.model == model):
            ties += assert_greedy(reference, c.prompt_token_ids, c.token_ids)
            if c.finish_reason == "stop":
                end = reference.logits([*c.prompt_token_ids, *c.token_ids])[-1].argmax().item()
                assert end in reference.end_tokens, f"{c.session}/{c.call} stopped where the model goes on with {end}"
    return ties


async def snapshot(it: Mesh, iid: str = "cold-0", *, idle: bool = False, checks: int = 0) -> Snapshot:
    """The next snapshot of an instance; with `idle`, the next that counts no call, after so many checks for leaks."""
    bus = await it.bus()
    got: asyncio.Queue[Snapshot] = asyncio.Queue()
    await bus.subscribe(f"talaria.v1.snapshot.{iid}", lambda m: got.put_nowait(decode(m.data, Snapshot)))
    try:
        async with asyncio.timeout(30):
            while True:
                s = await got.get()
                if s.idle_checks >= checks and (not idle or all(m.queued == m.running == 0 for m in s.models)):
                    return s
    finally:
        await bus.close()


async def test_a_person_gets_a_sensible_answer(running: Mesh) -> None:
    question = [{"role": "user", "content": "What is the capital of France?"}]
    answer = await running.chat("smollm2-135m-instruct", question, session="person", max_tokens=32, temperature=0)
    assert answer.status_code == 200
    assert "Paris" in answer.json()["choices"][0]["message"]["content"]


@pytest.mark.parametrize("model", list(REAL_MODELS))
async def test_a_session_alone_has_the_reference_tokens_and_cached_ones(running: Mesh, model: str) -> None:
    calls = await session(
        running.http, f"alone-{model}", model, calls=3, first="List the files of the project.", grow="README.md src",
        max_tokens=16,
    )  # fmt: skip
    assert [c.error for c in calls] == [""] * 3
    assert all(c.cached > 0 for c in calls[1:]), [c.usage for c in calls]
    assert all(c.headers["x-talaria-cache"] == "device" for c in calls[1:])
    check_tokens(calls)


async def test_interleaved_over_twenty_switches(running: Mesh) -> None:
    """One call after the other, each of another model than the last: every call needs a switch."""
    before = await snapshot(running, idle=True)
    talks: dict[str, list[dict[str, str]]] = {
        m: [{"role": "user", "content": f"Tell {m} a joke."}] for m in REAL_MODELS
    }
    calls: list[Outcome] = []
    for turn in range(ROUNDS):
        for model, talk in talks.items():
            it = await stream_chat(
                running.http, model, talk, session=f"turns-{model}", call=turn, max_tokens=8, temperature=0
            )
            assert it.error == ""
            calls.append(it)
            talk += [{"role": "assistant", "content": it.text or "-"}, {"role": "user", "content": f"Go on, {turn}."}]
    after = await snapshot(running, idle=True)
    assert after.switches - before.switches >= 20
    restored = [c for c in calls if c.headers["x-talaria-cache"] == "host"]
    assert {c.model for c in restored} == set(REAL_MODELS), "prefixes come back from host memory after a switch"
    assert all(c.cached > 0 for c in restored)
    check_tokens(calls)


async def test_sampling_with_a_seed_repeats(running: Mesh) -> None:
    ask = [{"role": "user", "content": "Make up a name for a cat."}]
    body = {"max_tokens": 12, "temperature": 1.0, "seed": 7}
    first, again, other = [
        await stream_chat(running.http, "smollm2-135m-instruct", ask, session=f"seed-{n}", **(body | {"seed": seed}))
        for n, seed in enumerate((7, 7, 8))
    ]
    assert first.token_ids == again.token_ids
    assert first.token_ids != other.token_ids


@pytest.mark.parametrize("turns", [5, pytest.param(10, marks=pytest.mark.soak)])
async def test_thirty_sessions_over_three_models(running: Mesh, turns: int) -> None:
    bus = await running.bus()
    ended: list[Completion] = []
    await bus.subscribe("talaria.v1.completion.*", lambda m: ended.append(decode(m.data, Completion)))
    await bus.flush()
    before = await snapshot(running, idle=True)
    models = list(REAL_MODELS)
    runs = await asyncio.gather(
        *(
            session(
                running.http, f"load-{turns}-{n}", models[n % 3], calls=turns, max_tokens=TOKENS, ignore_eos=True,
                first=f"Task {n}: look at module {n * 7} and say what it does.", grow="The tool printed line",
            )
            for n in range(SESSIONS)
        )
    )  # fmt: skip
    after = await snapshot(running, idle=True)
    await bus.close()
    calls = [c for r in runs for c in r]
    assert [f"{c.session}/{c.call}: {c.error}" for c in calls if c.error] == []
    assert len(calls) == SESSIONS * turns
    assert all(c.usage["completion_tokens"] == TOKENS == len(c.token_ids) for c in calls)
    assert 35 * turns < max(c.usage["prompt_tokens"] for c in calls) < 60 * turns

    # Each model has its slots; how many depends on the rounds. Twenty switches are in the test above.
    assert after.switches - before.switches >= len(models)
    # A leak is found when the engine is idle, ends it, and stays until then: so one call more shows there is none.
    await stream_chat(running.http, models[0], [{"role": "user", "content": "Still there?"}], session="x", max_tokens=2)
    last = await snapshot(running, idle=True, checks=after.idle_checks + 1)
    assert last.engine_restarts == 0, running.tail("cold-0")
    for r in runs:
        for a, b in pairwise(r):
            assert b.cached <= a.usage["prompt_tokens"] + TOKENS

    # every prompt token was either cached or computed, counted in the engine itself
    assert len(ended) == SESSIONS * turns
    assert all(c.ok for c in ended)
    computed = sum(c.prompt_tokens - c.cached_tokens for c in ended)
    assert after.prefilled_tokens - before.prefilled_tokens == computed
    check_tokens([r[-1] for r in runs])
