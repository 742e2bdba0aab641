"""Start-up: sizes that do not fit, what a process needs, what is imported when, and stand-ins that stand back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import threading

import pytest
import torch

from talaria_common.errors import EngineError
from talaria_common.settings import parse
from talaria_gpu.engine.contract import SwitchFailedError
from talaria_gpu.models.reference import assert_greedy

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]
QWEN3, MLA = "tiny-qwen3-random", "tiny-mla-random"
MIB = 1 << 20


@pytest.fixture(scope="module")
def small(make_engine):
    """One engine for the tests that only look."""
    return make_engine(QWEN3, MLA)


def run_python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=os.environ | env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_a_buffer_too_small_is_refused_with_the_arithmetic(make_engine):
    with pytest.raises(EngineError) as caught:
        make_engine(QWEN3, buffer_bytes=224 * MIB)
    message = str(caught.value)
    weights, rows, row_bytes = 231751168, 1024 + 16, 3 * 2 * 4 * 64 * 4
    for part in (QWEN3, str(weights), str(rows), str(row_bytes), f"{224 * MIB} B", "buffer_mib"):
        assert part in message
    needed = int(message.split("at least ")[1].split(",", maxsplit=1)[0])
    assert (needed - 1) * MIB < weights + rows * row_bytes <= needed * MIB


def test_the_suggested_size_is_enough(make_engine):
    with pytest.raises(EngineError) as caught:
        make_engine(MLA, buffer_bytes=100 * MIB)
    needed = int(str(caught.value).split("at least ")[1].split(",")[0])
    engine = make_engine(MLA, buffer_bytes=needed * MIB)
    assert engine.buffer_bytes == needed * MIB
    engine.switch(MLA)
    engine.check_idle()


def test_build_makes_an_engine_from_settings(paths):
    import warnings

    from talaria_gpu.engine.sglang import build

    settings = parse(
        {
            "models": {
                MLA: {"source": "tiny-mla", "dtype": "float32", "context_tokens": 256},
                QWEN3: {"source": "tiny-qwen3", "dtype": "float32", "context_tokens": 256},
            },
            "instances": [
                {"id": "cold-0", "models": [QWEN3, MLA], "open": [MLA], "kv_tokens": 640, "page_size": 1, "threads": 1}
            ],
        }
    )
    said: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine = build(settings.instances[0], paths, settings, progress=said.append)
    info = engine.models()[MLA]
    assert (info.context_tokens, info.kv_capacity_tokens, info.max_running) == (256, 640, 8)
    assert info.eos_token_ids == (2,)
    assert said[0] == "importing SGLang"
    assert MLA in said[-1]
    assert set(engine.models()) == {MLA}
    assert opened(engine, QWEN3)
    assert set(engine.models()) == {MLA, QWEN3}
    engine.close()


def test_an_estimated_buffer_is_close_to_what_is_needed(small):
    needed = max(m.region.end for m in small._models.values())
    assert needed <= small.buffer_bytes <= needed * 1.5


def test_a_pool_that_comes_out_smaller_is_noticed(small):
    from talaria_gpu.engine.sglang import checks

    with pytest.raises(EngineError, match="KV tokens 1024, expected 2048"):
        checks.check_built(MLA, small._models[MLA].scheduler, 2048, 16, 4)
    with pytest.raises(EngineError, match="calls in a batch 4, expected 5"):
        checks.check_built(MLA, small._models[MLA].scheduler, 1024, 16, 5)


def test_nothing_heavy_is_imported_before_build():
    code = """
        import sys
        import talaria_gpu.engine.sglang
        import talaria_gpu.models
        print([m for m in ("torch", "sglang", "transformers") if m in sys.modules])
    """
    assert run_python(code).stdout.strip() == "[]"


def test_stand_ins_are_not_importable_by_name():
    done = run_python("import talaria_gpu.engine.sglang.standins; import sgl_kernel")
    assert "No module named 'sgl_kernel'" in done.stderr


def test_stand_ins_refuse_to_stand_beside_the_real_kernels(tmp_path):
    (tmp_path / "sgl_kernel").mkdir()
    (tmp_path / "sgl_kernel" / "__init__.py").write_text("")
    code = "from talaria_gpu.engine.sglang import environment; environment.prepare('cpu')"
    done = run_python(code, PYTHONPATH=str(tmp_path))
    assert done.returncode != 0
    assert "the compiled sgl_kernel is installed here" in done.stderr


@pytest.mark.usefixtures("small")
def test_no_port_is_open_to_other_machines():
    import psutil

    listening = [c.laddr.ip for c in psutil.Process().net_connections() if c.status == psutil.CONN_LISTEN]
    assert set(listening) <= {"127.0.0.1", "::1"}


@pytest.mark.usefixtures("small")
def test_a_missing_kernel_fails_when_called_not_silently():
    import sgl_kernel

    with pytest.raises(RuntimeError, match=r"sgl_kernel\.anything has no CPU stand-in"):
        sgl_kernel.anything(1)


def test_another_sglang_is_refused(monkeypatch):
    from talaria_gpu.engine.sglang import environment

    monkeypatch.setattr(environment, "SGLANG_VERSION", "0.0.1")
    with pytest.raises(EngineError, match=r"knows 0\.0\.1 only"):
        environment.prepare("cpu")


def opened(engine, model):
    """Ask until it is open."""
    for _ in range(1000):
        if engine.open_model(model):
            return True
        if (reading := engine._catalog.reading.get(model)) is not None:
            reading.exception()  # which waits
    raise AssertionError("it was not opened")


@pytest.fixture
def decoding(small, driver_for, new_prompt):
    """One model serves a call, the other is closed."""
    small.switch(MLA)
    if QWEN3 in small.models():
        small.close_model(QWEN3)
    driver = driver_for(small)
    driver.submit(MLA, new_prompt(20), 12)
    for _ in range(3):
        driver.step()
    return driver


@pytest.mark.parametrize("error", [KeyError("rope"), ValueError("no such layer"), RuntimeError("out of memory")])
def test_a_model_that_sglang_does_not_take_is_refused(  # noqa: PLR0917 - fixtures
    small, decoding, references, new_prompt, monkeypatch, error
):
    """What serves goes on, nothing of the refused one is left, and the next try may succeed."""
    from talaria_gpu.engine.sglang import checks

    images = small._switcher.store.host_bytes

    def refuse(*_arguments):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(checks, "check_inside", refuse)
        with pytest.raises(EngineError, match=str(error.args[0])):
            opened(small, QWEN3)
    assert (small.active, list(small.models())) == (MLA, [MLA])
    assert small._switcher.store.host_bytes == images
    decoding.drain(MLA)
    opened(small, QWEN3)
    decoding.run(QWEN3, new_prompt(20), 4)
    for out in decoding.outputs.values():
        assert_greedy(references[out.model], out.prompt, out.ids)


@pytest.fixture
def refused_files(small, decoding, monkeypatch, tmp_path):
    """Opens the closed model from a changed copy of its files, and says why that was refused; then it is opened."""
    from talaria_gpu.engine.sglang import ModelSpec

    known = small._catalog._specs[QWEN3].path
    for file in known.iterdir():
        (tmp_path / file.name).symlink_to(file)

    def refusal() -> str:
        with monkeypatch.context() as patch:
            patch.setitem(small._catalog._specs, QWEN3, ModelSpec(path=tmp_path, dtype="float32", context_tokens=512))
            with pytest.raises(EngineError) as caught:
                opened(small, QWEN3)
        decoding.drain(MLA)
        opened(small, QWEN3)
        return str(caught.value)

    return tmp_path, refusal


def test_an_architecture_that_sglang_does_not_know_is_refused(refused_files):
    directory, refusal = refused_files
    config = json.loads((directory / "config.json").read_text()) | {"architectures": ["NobodyForCausalLM"]}
    (directory / "config.json").unlink()
    (directory / "config.json").write_text(json.dumps(config))
    assert "NobodyForCausalLM" in refusal()


def test_a_file_that_cannot_be_read_is_refused(refused_files):
    directory, refusal = refused_files
    (directory / "more.safetensors").symlink_to(directory / "gone")
    assert "more.safetensors" in refusal()


def test_a_failed_way_back_is_no_refusal(small, decoding, monkeypatch):
    """Whoever takes it for the reason why a model was not opened would step an engine without a model."""

    def fails(_source, target, *_hooks):
        raise SwitchFailedError(target.info.name, None, "the link is down")

    with monkeypatch.context() as patch:
        patch.setattr(small._switcher, "switch", fails)
        with pytest.raises(RuntimeError, match=r"did not come back.*the link is down"):
            opened(small, QWEN3)
    assert small.active is None
    small.switch(MLA)
    decoding.drain(MLA)
    assert [out.finished for out in decoding.outputs.values()] == ["length"]


def test_a_moved_address_is_noticed_and_the_engine_stops(small):
    """The last test: it breaks the engine."""
    engine = small
    engine.switch(MLA)
    norm = engine._models[QWEN3].scheduler.model_runner.model.model.norm
    norm.weight.data = norm.weight.data.clone()
    with pytest.raises(EngineError, match=r"1 of \d+ device addresses moved"):
        engine.switch(QWEN3)
    assert engine.active is None
    with pytest.raises(EngineError):
        engine.step(None)


class Meeting:
    """Two ranks that are threads: `least` waits for the other's values."""

    size = 2

    def __init__(self, rank: int, barrier: threading.Barrier, said: dict[int, list[int]]) -> None:
        self.rank, self._barrier, self._said = rank, barrier, said

    def least(self, values):
        self._said[self.rank] = list(values)
        self._barrier.wait(20)
        found = [min(pair) for pair in zip(*self._said.values(), strict=True)]
        self._barrier.wait(20)
        return found


@pytest.mark.parametrize("fails", ["before its weights", "for want of memory"])
def test_what_one_rank_cannot_build_none_does(small, monkeypatch, fails):
    """And nobody waits for it inside SGLang, or takes it for lost. `small`: SGLang has been imported."""
    from talaria_gpu.engine.sglang import catalog as catalogs
    from talaria_gpu.weights.store import WeightStore

    def open_model(name, spec, buffer, *, make_image, ranks):
        if fails == "before its weights" and ranks.rank == 1:
            raise ValueError("no such architecture")
        make_image(64)
        pytest.fail("a rank went on alone")

    def make(store, name, size):
        if fails == "for want of memory" and store is stores[1]:
            raise EngineError("page-locked memory is not to be had")
        return torch.zeros(size, dtype=torch.uint8)

    monkeypatch.setattr(catalogs.opening, "open_model", open_model)
    monkeypatch.setattr(WeightStore, "make", make)
    barrier, said = threading.Barrier(2), {}
    stores = [WeightStore(None) for _ in range(2)]
    ended = {}

    def build(rank):
        ranks = Meeting(rank, barrier, said)
        it = catalogs.Catalog(
            {"m": None}, None, stores[rank], ranks=ranks, canary=False, options={"ranks": ranks}, progress=print
        )
        with pytest.raises(EngineError) as raised:
            it.build("m")
        ended[rank] = str(raised.value)

    threads = [threading.Thread(target=build, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert ended[0] == "another rank cannot build m"
    assert ("architecture" if fails == "before its weights" else "page-locked") in ended[1]
