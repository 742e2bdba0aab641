"""Staging and switches on real SGLang: every path class, KV that takes its pages back, failures, open and close."""

from __future__ import annotations

import shutil

import pytest
import torch

from talaria_common.errors import BadRequestError, EngineError, ModelNotFoundError
from talaria_gpu.engine.contract import SwitchFailedError
from talaria_gpu.models.reference import assert_greedy

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]
QWEN3, MLA = "tiny-qwen3-random", "tiny-mla-random"
MIB = 1 << 20


@pytest.fixture(scope="module")
def options():
    """How the engines here keep weights; small chunks, and a canary at every switch."""
    from talaria_gpu.engine.sglang.spec import MemoryOptions

    def make(**changes):
        return MemoryOptions(**({"staging": True, "chunk_bytes": 256 << 10, "canary_every": 1} | changes))

    return make


@pytest.fixture(scope="module")
def roomy(make_engine, options):
    """KV tails as large as a model."""
    return make_engine(QWEN3, MLA, kv_tokens=40960, memory=options())


@pytest.fixture(
    scope="module", params=[pytest.param(16, id="page16"), pytest.param(1, id="page1", marks=pytest.mark.soak)]
)
def tight(request, make_engine, options):
    """KV that calls fill."""
    return make_engine(QWEN3, MLA, page_size=request.param, kv_tokens=1024, memory=options(chunk_bytes=64 << 10))


def image_of(engine, model: str) -> torch.Tensor:
    image = engine._switcher.store.acquire(model)
    engine._switcher.store.release(model)
    return image


def check_account(timing) -> None:
    assert timing.d2d_bytes + timing.h2d_bytes == timing.weight_bytes
    assert timing.dirty_bytes + timing.missing_bytes == timing.h2d_bytes


def switch(engine, model: str):
    """Switch, and check what every switch owes."""
    timing = engine.switch(model)
    weights = engine.models()[model].weight_bytes
    check_account(timing)
    assert timing.weight_bytes == weights
    assert timing.canary == (engine._switcher._options.canary_every == 1)
    assert torch.equal(engine._buffer[:weights], image_of(engine, model))
    assert engine._switcher.stager is None
    return timing


def staged(engine, model: str):
    """Stage all that there is room for."""
    engine.stage(model)
    stager = engine._switcher.stager
    assert stager is not None
    stager.join()
    return stager


def test_all_path_classes_in_turn(roomy, driver_for, references, new_prompt):
    driver = driver_for(roomy)
    seen = []
    for model, other in ((QWEN3, MLA), (MLA, QWEN3)) * 2:
        if roomy.active != model:
            switch(roomy, model)
        rid = driver.submit(model, new_prompt(100), 12)
        driver.step()
        if seen:
            staged(roomy, other)
        driver.drain(model)
        out = driver.outputs[rid]
        assert_greedy(references[model], out.prompt, out.ids)
        seen.append(switch(roomy, other).path)
    assert seen == ["h2d", "d2d", "d2d", "d2d"]


def test_staging_comes_and_goes_without_a_trace(roomy, driver_for, references, new_prompt):
    driver = driver_for(roomy)
    roomy.active == QWEN3 or switch(roomy, QWEN3)
    slack = roomy.staging_slack_bytes
    assert slack > 0
    stager = staged(roomy, MLA)
    roomy.stage(MLA)
    assert roomy._switcher.stager is stager
    assert roomy.staging_slack_bytes == slack
    roomy.check_idle()
    out = driver.run(QWEN3, new_prompt(200), 8)
    assert_greedy(references[QWEN3], out.prompt, out.ids)
    roomy._switcher.cancel()
    assert roomy._models[QWEN3].scheduler.token_to_kv_pool_allocator.leased_pages == 0
    roomy.check_idle()
    assert switch(roomy, MLA).path == "h2d"


def test_calls_take_pages_back_while_weights_are_staged(tight, driver_for, references, new_prompt):
    """Decode until the tails are needed: chunks turn dirty, tokens stay right on both sides of the switch."""
    driver = driver_for(tight)
    for model, other in ((QWEN3, MLA), (MLA, QWEN3)):
        if tight.active != model:
            switch(tight, model)
        rids = [driver.submit(model, new_prompt(length), 60) for length in (150, 90, 130, 110)]
        driver.step()
        driver.step()
        staged(tight, other)
        driver.drain(model)
        allocator = tight._models[model].scheduler.token_to_kv_pool_allocator
        pages = allocator.unleased_pages()
        assert pages == sorted(pages)
        timing = switch(tight, other)
        assert timing.dirty_bytes > 0
        assert timing.path == "partial"
        for rid in rids:
            out = driver.outputs[rid]
            assert_greedy(references[model], out.prompt, out.ids)
    out = driver.run(QWEN3, new_prompt(80), 20)
    assert_greedy(references[QWEN3], out.prompt, out.ids)


def test_staging_under_way_at_the_switch(tight, driver_for, references, new_prompt):
    driver = driver_for(tight)
    switch(tight, QWEN3) if tight.active != QWEN3 else None
    for model in (MLA, QWEN3, MLA):
        tight.stage(model)
        switch(tight, model)
        out = driver.run(model, new_prompt(40), 6)
        assert_greedy(references[model], out.prompt, out.ids)


def test_a_failed_switch_rolls_back(tight, driver_for, references, new_prompt, monkeypatch):
    from talaria_gpu.streams import CopyThread

    class Failing(CopyThread):
        def move(self, target, source) -> None:
            if not broken or target.data_ptr() % 3 == 0:
                super().move(target, source)
                return
            broken.pop()
            raise OSError("the link is down")

    driver, broken = driver_for(tight), [True]
    switch(tight, QWEN3) if tight.active != QWEN3 else None
    rid = driver.submit(QWEN3, new_prompt(60), 20)
    for _ in range(5):
        driver.step()
    stream = Failing("failing", torch.device("cpu"))
    monkeypatch.setattr(tight._switcher, "_h2d", stream)
    with pytest.raises(SwitchFailedError, match="the link is down") as caught:
        tight.switch(MLA)
    assert (caught.value.model, caught.value.active, tight.active) == (MLA, QWEN3, QWEN3)
    driver.drain(QWEN3)
    out = driver.outputs[rid]
    assert_greedy(references[QWEN3], out.prompt, out.ids)
    switch(tight, MLA)
    monkeypatch.undo()
    stream.close()


def test_when_the_way_back_fails_too_nothing_is_served(tight, monkeypatch):
    from talaria_gpu.streams import CopyThread

    class Dead(CopyThread):
        def move(self, target, source) -> None:
            raise OSError("the link is down")

    switch(tight, QWEN3) if tight.active != QWEN3 else None
    stream = Dead("dead", torch.device("cpu"))
    monkeypatch.setattr(tight._switcher, "_h2d", stream)
    with pytest.raises(EngineError, match="so did the way back") as caught:
        tight.switch(MLA)
    assert not isinstance(caught.value, SwitchFailedError)
    assert tight.active is None
    monkeypatch.undo()
    stream.close()
    switch(tight, QWEN3)


def test_the_canary_sees_wrong_weights(tight):
    switch(tight, QWEN3) if tight.active != QWEN3 else None
    image = image_of(tight, MLA)
    good = image.clone()
    image.view(torch.float32).mul_(-1.0)
    with pytest.raises(EngineError, match="canary failed"):
        tight.switch(MLA)
    assert tight.active is None
    image.copy_(good)
    switch(tight, MLA)


def test_close_and_open_at_run_time(tight, driver_for, references, new_prompt):
    driver = driver_for(tight)
    switch(tight, MLA) if tight.active != MLA else None
    rid = driver.submit(MLA, new_prompt(50), 5)
    with pytest.raises(BadRequestError, match="unfinished"):
        tight.close_model(MLA)
    driver.drain(MLA)
    before = tight._switcher.store.host_bytes
    tight.close_model(MLA)
    assert tight.active is None
    assert list(tight.models()) == [QWEN3]
    assert tight._switcher.store.host_bytes < before
    with pytest.raises(ModelNotFoundError):
        driver.submit(MLA, new_prompt(5), 5)
    del driver.outputs[rid]
    switch(tight, QWEN3)
    rid = driver.submit(QWEN3, new_prompt(90), 30)
    for _ in range(4):
        driver.step()
    while not tight.open_model(MLA):
        driver.step()
    assert tight.active == QWEN3
    driver.drain(QWEN3)
    out = driver.outputs[rid]
    assert_greedy(references[QWEN3], out.prompt, out.ids)
    switch(tight, MLA)
    out = driver.run(MLA, new_prompt(70), 10)
    assert_greedy(references[MLA], out.prompt, out.ids)
    with pytest.raises(ModelNotFoundError):
        tight.open_model("nobody")


@pytest.fixture
def cut_short(paths, tmp_path):
    """The name of a model whose weights file lacks its end."""
    copy = tmp_path / "cut"
    shutil.copytree(paths[MLA], copy)
    weights = next(copy.glob("*.safetensors"))
    with weights.open("r+b") as f:
        f.truncate(weights.stat().st_size - 1000)
    paths["cut"] = copy
    yield "cut"
    del paths["cut"]


def opened(engine, model: str) -> None:
    while not engine.open_model(model):
        pass


def test_a_model_file_cut_short_fails_its_model_only(make_engine, cut_short, driver_for, references, new_prompt):
    said: list[str] = []
    engine = make_engine(MLA, cut_short, progress=said.append)
    assert list(engine.models()) == [MLA]
    assert "cut cannot be opened" in said[0]
    with pytest.raises(EngineError, match="it is cut short"):
        opened(engine, cut_short)
    out = driver_for(engine).run(MLA, new_prompt(30), 6)
    assert_greedy(references[MLA], out.prompt, out.ids)
    with pytest.raises(EngineError, match="it is cut short"):
        make_engine(cut_short)
