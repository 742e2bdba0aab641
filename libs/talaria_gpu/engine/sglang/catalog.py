"""The models that an engine may open, and those that are open: read from disk, built, dropped."""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from talaria_common.errors import EngineError, ModelNotFoundError
from talaria_gpu.engine.sglang import canary as golden
from talaria_gpu.engine.sglang import opening
from talaria_gpu.engine.sglang.opening import OpenModel
from talaria_gpu.engine.sglang.spec import ModelSpec
from talaria_gpu.hkvr.agreement import RankLostError, Ranks
from talaria_gpu.weights import checkpoint
from talaria_gpu.weights.store import WeightStore


class Catalog:
    """Opens into one device buffer, and leaves a host image of each model's weights in the store. Not thread-safe.

    Args:
        specs: what may be opened, by name.
        buffer: the device buffer; a model that is built overwrites it.
        store: of the host images.
        ranks: the processes that this one is one of.
        canary: note the first tokens of a fixed prompt when a model is built.
        options: passed on to `opening.open_model`.
        progress: told what is being done, in words.
    """

    def __init__(
        self,
        specs: Mapping[str, ModelSpec],
        buffer: torch.Tensor,
        store: WeightStore,
        *,
        ranks: Ranks,
        canary: bool,
        options: Mapping[str, Any],
        progress: Callable[[str], None],
    ) -> None:
        self._specs = dict(specs)
        self._buffer = buffer
        self._store = store
        self._ranks = ranks
        self._canary = canary
        self._options = options
        self._progress = progress
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="checkpoints")
        self.reading: dict[str, Future[None]] = {}
        """Models whose files are being read, or have been."""
        self.models: dict[str, OpenModel] = {}
        """The open ones, by name; the same object always."""

    def get(self, name: str) -> OpenModel:
        """An open model. Raises ModelNotFoundError."""
        try:
            return self.models[name]
        except KeyError:
            raise ModelNotFoundError(f"model {name!r} is not open here", param="model") from None

    def build_all(self, names: Collection[str]) -> None:
        """Open those of the models whose files are whole. Raises EngineError if none is, or if one does not fit."""
        damaged = {name: problem for name in names if (problem := _damage(self._specs[name]))}
        for name, problem in damaged.items():
            self._progress(f"{name} cannot be opened: {problem}")
        if len(damaged) == len(names):
            raise EngineError("; ".join(damaged.values()))
        for name in names:
            if name not in damaged:
                self.build(name)

    def read(self, name: str) -> bool:
        """Have a model's files read in the background; True once they are, on all ranks.

        Raises:
            ModelNotFoundError: it is none of the specs.
            EngineError: they cannot be read.
        """
        if name not in self._specs:
            raise ModelNotFoundError(f"model {name!r} is not configured here", param="model")
        reading = self.reading.get(name)
        if reading is None:
            self.reading[name] = self._reader.submit(checkpoint.read_ahead, self._specs[name].path)
            return False
        if not self._ranks.least([int(reading.done())])[0]:
            return False
        del self.reading[name]
        problem = reading.exception()
        if not self._ranks.least([int(problem is None)])[0] and problem is None:
            raise EngineError(f"another rank cannot read the files of {name}")
        if problem is not None:
            raise EngineError(f"the files of {name} cannot be read: {problem}") from problem
        return True

    def build(self, name: str) -> None:
        """Open a model; the buffer holds its weights afterwards, and nothing may be active meanwhile.

        Once its weights have room in the host memory of all ranks, or not, all go on, or none.

        Raises:
            EngineError: it could not be built; nothing of it is left.
        """
        started = time.perf_counter()
        images: list[torch.Tensor] = []
        agreed = False

        def make_image(size: int) -> torch.Tensor:
            nonlocal agreed
            problem: EngineError | None = None
            try:
                images.append(self._store.make(name, size))
            except EngineError as e:
                problem = e
            agreed = True
            well = self._ranks.least([int(problem is None)])[0]
            if problem is not None:
                raise problem
            if not well:
                raise EngineError(f"another rank cannot build {name}")
            return images[0]

        try:
            opened = opening.open_model(name, self._specs[name], self._buffer, make_image=make_image, **self._options)
            if self._canary:
                opened.golden = golden.first_tokens(opened)
            opened.unbound.leave()
        except Exception as e:
            if not agreed and not isinstance(e, RankLostError):
                self._ranks.least([0])  # the others ask before their weights are loaded, and would wait for ever
            for image in images:
                self._store.put(name, image)
                self._store.drop(name)  # page-locked memory does not go by itself
            traceback.clear_frames(e.__traceback__)  # they hold what was built
            _collect()
            if isinstance(e, EngineError) or not self._is_of_the_model(e):
                raise
            raise EngineError(f"{name} could not be built: {type(e).__name__}: {e}") from e
        self._store.put(name, images[0])
        self.models[name] = opened
        self._progress(
            f"{name}: {opened.region.weight_bytes / 1e6:.0f} MB weights, "
            f"{opened.info.kv_capacity_tokens} KV tokens of {opened.info.kv_bytes_per_token} B, "
            f"opened in {time.perf_counter() - started:.1f} s"
        )

    def drop(self, name: str) -> None:
        """Close an open model, which is not active and has no calls."""
        self._store.drop(name)
        self.models.pop(name).region.release()
        _collect()

    def close(self) -> None:
        """Forget all models; nothing may be opened after this."""
        self._reader.shutdown()
        self.models.clear()

    def _is_of_the_model(self, error: Exception) -> bool:
        """Whether SGLang refused a model, by whatever error; with several ranks one of them may have gone instead."""
        return self._ranks.size == 1 or not isinstance(error, RuntimeError)


def _collect() -> None:
    """Free a model's scheduler: what was built at start is frozen, and it is full of cycles."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()


def _damage(spec: ModelSpec) -> str:
    """What is wrong with the model's files; "" if nothing is."""
    try:
        checkpoint.check(spec.path)
    except (EngineError, OSError) as e:
        return str(e)
    return ""
