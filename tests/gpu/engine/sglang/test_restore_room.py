"""Rows are short, restores cancelled or failing: what runs goes on, and nobody's call pays for another's prefix."""

from __future__ import annotations

import threading

import pytest

from talaria_gpu.models.reference import assert_greedy
from tests.gpu.engine.sglang.conftest import MLA, QWEN3

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]
PAGE, PAGES = 16, 56
NOBODY: frozenset[str] = frozenset()
MIB = 1 << 20


@pytest.fixture(scope="module")
def engine(make_engine):
    from talaria_gpu.engine.sglang.spec import HostKvOptions

    return make_engine(QWEN3, MLA, kv_tokens=PAGES * PAGE, host_kv=HostKvOptions(capacity_bytes=64 * MIB))


@pytest.fixture
def driver(engine, driver_for):
    engine.switch(QWEN3)
    return driver_for(engine)


@pytest.fixture
def on_host(engine, driver, new_prompt):
    """A prompt of so many tokens and one more; all but the last are on the host, none on the device."""

    def make(tokens: int) -> list[int]:
        ids = [*new_prompt(tokens), 9]
        driver.run(QWEN3, ids, 2)
        engine.switch(MLA)
        engine.switch(QWEN3)
        return ids

    return make


@pytest.fixture
def gate(engine, driver):
    """Holds the copies back that come after it, until set; a failed test lets them go."""
    made = []

    def make() -> threading.Event:
        made.append(threading.Event())
        engine._host_kv._in.submit(made[-1].wait, 0)
        return made[-1]

    yield make
    for each in made:
        each.set()


def restorer(engine):
    return engine._models[QWEN3].residence._restorer


def exact(references, *outs) -> None:
    for out in outs:
        assert out.finished == "length"
        assert_greedy(references[QWEN3], out.prompt, out.ids)


def test_a_half_prefilled_prompt_keeps_the_rows_it_needs(engine, driver, references, new_prompt, on_host):
    """The running call's reserve and the prefix together leave too little: SGLang would give the chunk no rows."""
    ids = on_host(480)
    running = driver.submit(QWEN3, new_prompt(40), 440)
    driver.step()
    half = driver.submit(QWEN3, new_prompt(450), 8)
    assert driver.step().prefilled_tokens == 64
    coming = driver.submit(QWEN3, ids, 4)
    driver.drain(QWEN3, 900)
    assert driver.outputs[coming].cached == 480
    exact(references, *(driver.outputs[rid] for rid in (running, half, coming)))


def test_a_running_call_keeps_the_rows_of_its_next_token(engine, driver, references, new_prompt, on_host):
    """All free rows would go to the prefix: SGLang would end the only running call for want of a page."""
    ids = on_host(30 * PAGE)
    running = driver.submit(QWEN3, new_prompt(25 * PAGE), 64)
    while len(driver.outputs[running].ids) < 17:  # 26 pages of 56 are full, the next token needs another
        driver.step()
    coming = driver.submit(QWEN3, ids, 4)
    driver.drain(QWEN3)
    assert driver.outputs[coming].cached == 480
    exact(references, driver.outputs[running], driver.outputs[coming])


@pytest.mark.soak
@pytest.mark.parametrize(
    ("chunks", "decoded"),
    [pytest.param(1, 430, id="no-rows-for-the-chunk"), pytest.param(7, 440, id="no-rows-for-the-next-token")],
)
def test_a_half_prefilled_prompt_waits_for_rows_that_were_promised_twice(  # noqa: PLR0917 - fixtures
    engine, driver, references, new_prompt, chunks, decoded
):
    """SGLang counts on a share of what running calls may still say, and a paused prompt sees them say all of it."""
    running = driver.submit(QWEN3, new_prompt(40), 440)
    driver.step()
    half = driver.submit(QWEN3, new_prompt(450), 8)
    for _ in range(chunks):
        assert driver.step().prefilled_tokens == 64
    while len(driver.outputs[running].ids) < decoded:
        assert driver.step(NOBODY).kind == "decode"
    driver.drain(QWEN3)
    exact(references, driver.outputs[running], driver.outputs[half])


def test_all_are_cancelled_in_mid_restore(engine, driver, references, new_prompt, on_host, gate, monkeypatch):  # noqa: PLR0917 - fixtures
    """A step with nothing left to run waits for the rows that are still coming: SGLang would take them for a leak."""
    ids = on_host(64)
    running = driver.submit(QWEN3, new_prompt(20), 30)
    driver.step()
    go = gate()
    rid = driver.submit(QWEN3, ids, 4)
    driver.step()
    transfer = restorer(engine)._coming[next(iter(restorer(engine)._coming))].restore.transfer
    wait = transfer.wait
    monkeypatch.setattr(transfer, "wait", lambda: (go.set(), wait())[1])
    assert engine.abort(rid)
    assert engine.abort(running)
    assert not go.is_set()
    assert driver.step(NOBODY).kind == "idle"
    assert go.is_set()
    exact(references, driver.run(QWEN3, ids, 4))


def test_a_copy_that_fails_is_not_tried_for_ever(engine, driver, references, new_prompt, on_host, monkeypatch):  # noqa: PLR0917 - fixtures
    """The call's prefix is computed instead; a later call tries again."""
    ids = on_host(96)
    tried: list[int] = []

    def broken(*_arguments):
        tried.append(1)
        raise OSError("the link is down")

    before = engine.host_kv_stats().counts.failed
    running = driver.submit(QWEN3, new_prompt(20), 60)
    driver.step()
    with monkeypatch.context() as patch:
        patch.setattr(engine._host_kv._inward, "back", broken)
        out = driver.outputs[driver.submit(QWEN3, ids, 4)]
        driver.drain(QWEN3)
    assert (len(tried), engine.host_kv_stats().counts.failed - before) == (1, 1)
    assert out.cached == 0
    exact(references, out, driver.outputs[running])
    engine.switch(MLA)
    out = driver.run(QWEN3, ids, 4)
    assert out.cached == 96
    exact(references, out)
