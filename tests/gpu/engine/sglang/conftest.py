"""Real SGLang in the test process: engines are expensive (import 10 s, models 2-5 s each), so tests share them.

Every test leaves its engine idle; `check_idle` runs after each, so a leak names the test that made it.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import warnings
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import pytest

from talaria_common.ids import new_rid
from talaria_common.settings import ModelSettings
from talaria_gpu.engine.contract import EngineCall, Sampling, StepTokens
from talaria_gpu.models import prepare

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch is imported: before any test module does

SMOLLM2, QWEN3, MLA = "smollm2-135m-instruct", "tiny-qwen3-random", "tiny-mla-random"
HYBRID, HYBRID_DENSE = "tiny-hybrid-random", "tiny-hybrid-dense-random"
SOURCES = {
    SMOLLM2: "smollm2",
    QWEN3: "tiny-qwen3",
    MLA: "tiny-mla",
    HYBRID: "tiny-hybrid",
    HYBRID_DENSE: "tiny-hybrid-dense",
}
KV_TOKENS = 1024
CHUNK = 64


@pytest.fixture(scope="session")
def paths():
    if importlib.util.find_spec("sglang") is None:
        pytest.skip("SGLang is not installed (requirements/engine-cpu.txt)")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers warns about its own loaders
        return {name: prepare(name, ModelSettings(source=source)) for name, source in SOURCES.items()}


@pytest.fixture(scope="module")
def make_engine(paths):
    """Builds engines; they are closed at the module's end, or the session would need a dozen GiB."""
    from talaria_gpu.engine.sglang import ModelSpec, environment

    made = []

    def make(*names: str, **changes):
        # Importing SGLang and building a model warns of kernels that a CPU lacks.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            environment.prepare("cpu")
            from talaria_gpu.engine.sglang.engine import SglangEngine

            options = {
                "device": "cpu",
                "kv_tokens": KV_TOKENS,
                "page_size": 16,
                "max_running": 4,
                "chunked_prefill_tokens": CHUNK,
                "buffer_bytes": None,
                "threads": None,
                "seed": 0,
                "poison": True,
            }
            specs = {n: ModelSpec(path=paths[n], dtype="float32", context_tokens=512) for n in names}
            made.append(SglangEngine(specs, **(options | changes)))
        return made[-1]

    yield make
    for engine in made:
        engine.close()
    made.clear()
    gc.unfreeze()  # SGLang freezes what it has built, cycles and all
    gc.collect()


@pytest.fixture(scope="session")
def references(paths):
    """Reference models, loaded when first asked for."""
    from talaria_gpu.models.reference import Reference

    class Loaded(dict):
        def __missing__(self, name):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self[name] = Reference(paths[name])
            return self[name]

    return Loaded()


@dataclass
class Output:
    """What came out of one call."""

    prompt: list[int]
    model: str = ""
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list = field(default_factory=list)
    last: StepTokens | None = None

    @property
    def finished(self) -> str:
        return self.last.finished if self.last else ""

    @property
    def cached(self) -> int:
        assert self.last is not None
        return self.last.cached_tokens


class Driver:
    """Submits calls and collects their tokens; asserts that every prompt token is accounted for once."""

    def __init__(self, engine) -> None:
        self.engine = engine
        self.outputs: dict[str, Output] = {}

    def submit(self, model, ids, n=8, *, salt="", session="", **sampling) -> str:
        sampling = {"temperature": 0.0, "ignore_eos": True} | sampling
        rid = new_rid()
        self.engine.submit(
            EngineCall(
                rid=rid,
                model=model,
                input_ids=list(ids),
                sampling=Sampling(max_new_tokens=n, **sampling),
                salt=salt,
                session=session,
            )
        )
        self.outputs[rid] = Output(list(ids), model)
        return rid

    def step(self, admit=None):
        result = self.engine.step(admit)
        for update in result.tokens:
            out = self.outputs[update.rid]
            assert not out.finished, "a token after the end"
            out.ids += update.token_ids
            out.logprobs += update.logprobs
            out.top += update.top
            out.last = update
            assert update.prefilled_tokens == len(out.prompt) - update.cached_tokens
        return result

    def drain(self, model, limit=400):
        """Step until nothing of the model is unfinished."""
        for _ in range(limit):
            if not self.engine.has_unfinished(model):
                return
            self.step()
        raise AssertionError("did not finish")

    def run(self, model, ids, n=8, **options) -> Output:
        """One call from start to end; switches when needed."""
        self.engine.switch(model)
        rid = self.submit(model, ids, n, **options)
        self.drain(model)
        return self.outputs[rid]


_seeds = count(1)


def prompt(length: int, seed: int | None = None) -> list[int]:
    """Random token ids; fresh ones unless a seed is given."""
    from random import Random

    random = Random(next(_seeds) if seed is None else -seed)
    return [random.randrange(1000, 40000) for _ in range(length)]


@pytest.fixture
def new_prompt():
    return prompt


@pytest.fixture
def driver_for():
    """Wraps an engine; afterwards drops what a failed test left, and checks for leaks."""
    drivers = []

    def make(engine):
        drivers.append(Driver(engine))
        return drivers[-1]

    yield make
    for driver in drivers:
        for rid in driver.outputs:
            driver.engine.abort(rid)
        driver.engine.check_idle()


@pytest.fixture(scope="session")
def engine_dir() -> Path:
    import talaria_gpu.engine.sglang

    return Path(talaria_gpu.engine.sglang.__file__).parent
