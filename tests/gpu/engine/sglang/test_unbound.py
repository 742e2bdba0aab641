"""Memory outside the buffer, on a saver that only takes notes: a tag per model, out and back in order."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

pytestmark = pytest.mark.engine


class Notes:
    enabled = True

    def __init__(self) -> None:
        self.said: list[tuple[str, str]] = []

    def region(self, tag, enable_cpu_backup):
        self.said.append(("region", tag))
        return nullcontext()

    def cuda_graph(self, tag, **options):
        assert options == {"enable_cpu_backup": True}
        self.said.append(("graph", tag))
        return nullcontext()

    def pause(self, tag):
        self.said.append(("pause", tag))

    def resume(self, tag):
        self.said.append(("resume", tag))


@pytest.fixture
def unbound(paths):
    from talaria_gpu.engine.sglang import environment

    environment.prepare("cpu")
    from talaria_gpu.engine.sglang import unbound

    return unbound


def test_each_models_memory_leaves_and_comes_back_under_its_own_tags(unbound):
    from sglang.srt.utils.torch_memory_saver_adapter import TorchMemorySaverAdapter as Adapter

    notes = Notes()
    a, b = (unbound.Unbound(name, notes) for name in "ab")
    for model in (a, b):
        with model.building():
            saver = Adapter.create(enable=True)
            assert saver.enabled
            with saver.region("workspace"), saver.cuda_graph(tag="cuda_graph", enable_cpu_backup=True):
                pass
            assert not Adapter.create(enable=False).enabled
        model.leave()
    notes.said.clear()
    a.enter()
    a.enter()
    a.leave()
    b.enter()
    assert notes.said == [
        ("resume", "a/cuda_graph"),
        ("resume", "a/workspace"),
        ("pause", "a/cuda_graph"),
        ("pause", "a/workspace"),
        ("resume", "b/cuda_graph"),
        ("resume", "b/workspace"),
    ]


def test_without_a_saver_nothing_happens(unbound, monkeypatch):
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    for device in ("cpu", "cuda:0"):
        model = unbound.Unbound.of("m", device)
        assert not model.active
        with model.building():
            pass
        model.leave()
        model.enter()
