"""Device memory of a model that cannot be placed in the buffer: pools of captured graphs, workspaces (D).

Each model's has a tag of its own in torch_memory_saver: while the model is switched out, its pages go back to the
device with a copy on the host, and they come back at the same addresses, which is what graphs need. Only on CUDA, where
the process was started with torch_memory_saver preloaded; it has not run on a GPU yet.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from sglang.srt.utils.torch_memory_saver_adapter import TorchMemorySaverAdapter

GRAPHS = "SGLANG_MEMORY_SAVER_CUDA_GRAPH"
"""SGLang's switch for graphs in memory that can be given back."""


def usable(device: str) -> bool:
    """Whether memory can be given back here, and found again at the same addresses."""
    preloaded = "torch_memory_saver" in os.environ.get("LD_PRELOAD", "")
    return device.startswith("cuda") and preloaded and importlib.util.find_spec("torch_memory_saver") is not None


class TaggedSaver:
    """SGLang's adapter with the model's name before every tag."""

    def __init__(self, adapter: Any, model: str) -> None:
        self._adapter, self._model = adapter, model
        self.tags: set[str] = set()
        """Those in use."""

    def region(self, tag: str, enable_cpu_backup: bool = False) -> AbstractContextManager[None]:
        """Allocations inside belong to the tag."""
        context: AbstractContextManager[None] = self._adapter.region(
            tag=self._tag(tag), enable_cpu_backup=enable_cpu_backup
        )
        return context

    def cuda_graph(self, *, tag: str, **options: Any) -> AbstractContextManager[None]:
        """A graph captured inside has its pool under the tag."""
        context: AbstractContextManager[None] = self._adapter.cuda_graph(tag=self._tag(tag), **options)
        return context

    def pause(self, tag: str) -> None:
        """Give the tag's memory back."""
        self._adapter.pause(self._tag(tag))

    def resume(self, tag: str) -> None:
        """Have it again, at the same addresses."""
        self._adapter.resume(self._tag(tag))

    def _tag(self, tag: str) -> str:
        own = f"{self._model}/{tag}"
        self.tags.add(own)
        return own

    def __getattr__(self, name: str) -> Any:
        return getattr(self._adapter, name)


class Unbound:
    """One model's memory outside the buffer.

    Args:
        model: its name.
        adapter: SGLang's; None: nothing is given back.
    """

    def __init__(self, model: str, adapter: Any | None) -> None:
        self._saver = None if adapter is None else TaggedSaver(adapter, model)
        self._out = False

    @classmethod
    def of(cls, model: str, device: str) -> Unbound:
        """For a model that is about to be built on the device."""
        return cls(model, TorchMemorySaverAdapter.create(enable=True) if usable(device) else None)

    @property
    def active(self) -> bool:
        """Whether there is anything to give back."""
        return self._saver is not None

    @contextmanager
    def building(self) -> Iterator[None]:
        """Inside, what SGLang allocates in regions and captures in graphs is tagged as this model's."""
        if self._saver is None:
            yield
            return
        stock, saver, graphs = TorchMemorySaverAdapter.create, self._saver, os.environ.get(GRAPHS)
        TorchMemorySaverAdapter.create = staticmethod(lambda enable: saver if enable else stock(enable=False))
        os.environ[GRAPHS] = "1"
        try:
            yield
        finally:
            TorchMemorySaverAdapter.create = staticmethod(stock)
            if graphs is None:
                del os.environ[GRAPHS]
            else:
                os.environ[GRAPHS] = graphs

    def leave(self) -> None:
        """The model is switched out. Once or many times."""
        if self._saver is not None and not self._out:
            self._out = True
            for tag in sorted(self._saver.tags):
                self._saver._adapter.pause(tag)

    def enter(self) -> None:
        """The model is about to run."""
        if self._saver is not None and self._out:
            for tag in sorted(self._saver.tags):
                self._saver._adapter.resume(tag)
            self._out = False
