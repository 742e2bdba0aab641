"""Random calls, sessions, staging and switches among four families, with and without host KV: tokens, books, memory."""

from __future__ import annotations

import warnings
from random import Random
from statistics import median

import psutil
import pytest

from talaria_gpu.models.reference import assert_greedy

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]
MIB = 1 << 20
FAMILIES = ("mini-llama", "mini-qwen3", "mini-mla", "mini-hybrid")
VOCABULARY = 4096
HOST_BYTES = 104 * MIB
"""The largest images fit, two or three of them, and not all."""
HOST_KV_BYTES = 6 * MIB
"""Of host KV: sessions are evicted, and now and then there is no room for a suspension."""


@pytest.fixture(scope="module")
def families(paths, tmp_path_factory):
    """Four families with a small vocabulary: 20 to 50 MB each, so that a thousand switches take minutes."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers warns about its own classes
        from talaria_gpu.models import torchvision_ops

        torchvision_ops.declare_missing()
        from transformers import LlamaConfig, LlamaForCausalLM

        from talaria_gpu.models import random_weights, tiny_hybrid, tiny_mla, tiny_qwen3

        patch.setitem(random_weights.COMMON, "vocab_size", VOCABULARY)
        for name in FAMILIES:
            paths[name] = tmp_path_factory.mktemp(name)
        config = LlamaConfig(
            **random_weights.COMMON, intermediate_size=1024, num_hidden_layers=2, num_attention_heads=8
        )
        random_weights.save_random(LlamaForCausalLM, config, 5, paths["mini-llama"])
        tiny_qwen3.make(paths["mini-qwen3"])
        tiny_mla.make(paths["mini-mla"])
        tiny_hybrid.make(paths["mini-hybrid"])
    yield
    for name in FAMILIES:
        del paths[name]


@pytest.fixture(scope="module")
def build(families, make_engine):
    from talaria_gpu.engine.sglang.spec import HostKvOptions, MemoryOptions

    def make(*, host_kv: bool):
        memory = MemoryOptions(staging=True, chunk_bytes=256 << 10, host_weights_bytes=HOST_BYTES, canary_every=4)
        kept = HostKvOptions(capacity_bytes=HOST_KV_BYTES) if host_kv else None
        return make_engine(*FAMILIES, kv_tokens=1024, memory=memory, host_kv=kept)

    return make


class Soak:
    """One life; `slot` is a slot with its switch."""

    def __init__(self, engine, driver, references, seed: int) -> None:
        self.engine, self.driver, self.references, self.random = engine, driver, references, Random(seed)
        self.models = list(engine.models())
        self.paths = dict.fromkeys(("h2d", "partial", "d2d"), 0)
        self.canaries = self.suspended = self.retracted = self.restored = self.aborted = 0
        self.own_bytes: list[int] = []
        self.live: list[str] = []
        self.sessions: dict[str, list[list[int]]] = {model: [] for model in self.models}
        """Conversations that may go on."""

    def run(self, switches: int) -> None:
        for done in range(switches):
            self.slot()
            if done % 25 == 24:
                self.finish()
        third = len(self.own_bytes) // 3
        first, last = median(self.own_bytes[third : 2 * third]), median(self.own_bytes[-third:])
        assert last - first < 64 * MIB, f"{first / MIB:.0f} MiB, then {last / MIB:.0f} MiB"
        assert self.canaries
        assert self.engine._switcher.store.host_bytes <= HOST_BYTES

    def slot(self) -> None:
        engine, driver, random = self.engine, self.driver, self.random
        target = random.choice([m for m in self.models if m != engine.active])
        if random.random() < 0.7:
            model = random.choice(self.models)
            self.live.append(driver.submit(model, self.prompt(model), random.randint(1, 8)))
        if self.live and random.random() < 0.05:
            rid = self.live.pop(random.randrange(len(self.live)))
            self.aborted += engine.abort(rid)
            driver.outputs.pop(rid)
        if engine.active is not None:
            if random.random() < 0.8:
                guess = target if random.random() < 0.8 else random.choice(self.models)
                engine.stage(guess)
            for _ in range(random.randint(0, 4)):
                driver.step()
            if engine._switcher.stager is not None and random.random() < 0.5:
                engine._switcher.stager.join()
        self.switch(target)

    def prompt(self, model: str) -> list[int]:
        random = self.random
        fresh = [random.randrange(3, VOCABULARY) for _ in range(random.randint(5, 60))]
        if self.sessions[model] and random.random() < 0.5:
            return random.choice(self.sessions[model]) + fresh[:10]
        return fresh

    def switch(self, target: str) -> None:
        timing = self.engine.switch(target)
        assert timing.d2d_bytes + timing.h2d_bytes == timing.weight_bytes
        assert timing.dirty_bytes + timing.missing_bytes == timing.h2d_bytes
        self.canaries += timing.canary
        self.suspended += timing.suspended
        self.retracted += timing.retracted
        self.paths[timing.path] += 1
        memory = psutil.Process().memory_info()
        # Mapped files are not ours, and which images are on the host changes.
        self.own_bytes.append(memory.rss - memory.shared - self.engine._switcher.store.host_bytes)

    def finish(self) -> None:
        for model in self.models:
            if model != self.engine.active:
                self.engine.switch(model)
            self.driver.drain(model)
        for rid in self.live:
            out = self.driver.outputs.pop(rid)
            assert_greedy(self.references[out.model], out.prompt, out.ids)
            self.restored += out.last.cache_source == "host"
            if len(out.prompt) < 250:
                self.sessions[out.model] = [*self.sessions[out.model][-5:], out.prompt + out.ids]
        self.live.clear()
        self.engine.check_idle()


def test_random_switches_among_four_families(build, driver_for, references):
    engine = build(host_kv=True)
    life = Soak(engine, driver_for(engine), references, 1)
    life.run(50)
    assert min(life.paths["h2d"], life.paths["partial"] + life.paths["d2d"]) > 5
    assert life.suspended > 0
    assert life.restored > 0
    store = engine._switcher.store.stats
    assert store.evictions > 0
    assert store.loads > 0


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("host_kv", [True, False], ids=["host-kv", "plain"])
def test_a_thousand_switches_among_four_families(build, driver_for, references, host_kv):
    engine = build(host_kv=host_kv)
    life = Soak(engine, driver_for(engine), references, 2)
    life.run(1000)
    assert life.aborted > 0
    if not host_kv:
        assert life.retracted > 0
        return
    assert life.suspended > 0
    assert life.restored > 0
    counts = engine.host_kv_stats().counts
    assert counts.evicted > 0
    assert counts.corrupt == counts.failed == 0
