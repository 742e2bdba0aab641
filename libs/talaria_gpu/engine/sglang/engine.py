"""`SglangEngine`: several models, one SGLang scheduler each, over one device buffer of which one is valid at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import torch

from talaria_common.errors import BadRequestError, ContextLengthError, EngineError
from talaria_gpu.engine.contract import (
    EngineCall,
    HostKvFigures,
    ModelInfo,
    ModelLoad,
    PrefixState,
    Staged,
    StepResult,
    StepTokens,
    SwitchFailedError,
    SwitchTiming,
)
from talaria_gpu.engine.sglang import checks, opening
from talaria_gpu.engine.sglang.calls import Call
from talaria_gpu.engine.sglang.catalog import Catalog
from talaria_gpu.engine.sglang.opening import OpenModel
from talaria_gpu.engine.sglang.spec import HostKvOptions, MemoryOptions, ModelSpec
from talaria_gpu.engine.sglang.switching import Switcher
from talaria_gpu.hkvr.agreement import Alone, RankLostError, Ranks
from talaria_gpu.hkvr.figures import figures_of
from talaria_gpu.hkvr.records import Stats
from talaria_gpu.hkvr.store import HostKv
from talaria_gpu.staging.chunks import State
from talaria_gpu.staging.stager import Stager


class SglangEngine:
    """The engine contract on SGLang. Not thread-safe.

    Args:
        models: what to serve, by name. One whose files are damaged is left out, if another is whole.
        device: "cpu", "cuda" or "cuda:N"; `environment.prepare(device)` must have run.
        kv_tokens: KV rows of each model.
        page_size: rows per page of the KV allocator; prefixes are shared in whole pages.
        max_running: calls in one batch, per model.
        chunked_prefill_tokens: most prompt tokens in one prefill step; longer prompts take several.
        buffer_bytes: the device buffer; None: what the largest model is estimated to need.
        threads: CPU threads of torch; None: leave as it is.
        seed: of the draws for calls that bring no seed.
        memory: how weights are kept and moved.
        host_kv: how KV is kept on the host; None: a switch forgets it, and retracts what decodes.
        ranks: the processes that this one is one of, each with a share of every model.
        meeting: a file, made by nobody, where several ranks find each other.
        poison: for tests: overwrite all but the weights with garbage at every switch, so that reading stale bytes
            shows, and end with an error when a call's counts do not add up.
        initially: which of the models to open now; None: all.
        progress: told what is being done, in words.

    Raises:
        EngineError: a model does not fit the buffer (with the arithmetic), or SGLang is not as expected.
    """

    def __init__(
        self,
        models: dict[str, ModelSpec],
        *,
        device: str,
        kv_tokens: int,
        page_size: int,
        max_running: int,
        chunked_prefill_tokens: int,
        buffer_bytes: int | None,
        threads: int | None,
        seed: int,
        memory: MemoryOptions = MemoryOptions(),  # noqa: B008 - frozen
        host_kv: HostKvOptions | None = None,
        ranks: Ranks = Alone(),  # noqa: B008 - has no state
        meeting: Path | None = None,
        poison: bool = False,
        initially: Sequence[str] | None = None,
        progress: Callable[[str], None] = lambda _: None,
    ) -> None:
        if threads is not None:
            torch.set_num_threads(threads)
        self._device = _share(device, ranks.rank)
        self._ranks = ranks
        self._random = Random(seed)  # noqa: S311 - seeds of sampling, no secret
        self._active: str | None = None
        self._calls: dict[str, Call] = {}
        self._serial = 0
        if buffer_bytes is None:
            buffer_bytes = opening.estimate_bytes(models, kv_tokens, page_size, max_running)
        if self._device.type == "cuda":
            memory.check_share(buffer_bytes, torch.cuda.get_device_properties(self._device).total_memory)
        self._buffer = torch.zeros(buffer_bytes, dtype=torch.uint8, device=self._device)
        self._switcher = Switcher(self._buffer, memory, poison=poison, ranks=ranks)
        self._host_kv = (
            None if host_kv is None else _host_kv(host_kv, self._device, self._recompute_cost, ranks, poison)
        )
        self._strict = poison
        self._suspended = 0
        options: dict[str, Any] = {
            "host_kv": self._host_kv,
            "suspends": host_kv is not None and host_kv.suspends,
            "device": device,
            "kv_tokens": kv_tokens,
            "page_size": page_size,
            "max_running": max_running,
            "chunked_prefill_tokens": chunked_prefill_tokens,
            "seed": seed,
            "ranks": ranks,
            "meeting": meeting,
        }
        self._catalog = Catalog(
            models,
            self._buffer,
            self._switcher.store,
            ranks=ranks,
            canary=memory.canary_every > 0,
            options=options,
            progress=progress,
        )
        self._models = self._catalog.models
        self._catalog.build_all(list(models) if initially is None else initially)

    # --- what is open

    @property
    def buffer_bytes(self) -> int:
        """Size of the device buffer."""
        return int(self._buffer.numel())

    @property
    def active(self) -> str | None:
        """The model whose weights are in the buffer."""
        return self._active

    def models(self) -> dict[str, ModelInfo]:
        """The open models by name."""
        return {name: model.info for name, model in self._models.items()}

    # --- calls

    def submit(self, call: EngineCall) -> None:
        """Queue a call; see the contract. Also raises BadRequestError for values that no model can take."""
        model = self._model(call.model)
        if call.rid in self._calls:
            raise BadRequestError(f"call {call.rid} is with the engine already")
        vocabulary = model.info.vocab_size
        if not call.input_ids or not all(0 <= token < vocabulary for token in call.input_ids):
            raise BadRequestError(f"a prompt needs at least one token, each in 0..{vocabulary - 1}", param="messages")
        if call.sampling.max_new_tokens < 1:
            raise BadRequestError("max_new_tokens must be at least 1", param="max_tokens")
        asked, limit = len(call.input_ids) + call.sampling.max_new_tokens, model.info.context_tokens
        if asked > limit:
            raise ContextLengthError(
                f"this model's context is {limit} tokens; the prompt has {len(call.input_ids)}, and up to "
                f"{call.sampling.max_new_tokens} new ones were asked for",
                param="messages",
            )
        own = call.sampling.seed
        seed = self._random.getrandbits(63) if own is None else own
        self._serial += 1
        with _inside(model):
            try:
                request = model.scheduler.submit(call, f"{self._serial:016x}", seed)
            except ValueError as e:
                raise BadRequestError(str(e)) from e
            model.residence.came(request)
        entry = Call(call, request)
        self._calls[call.rid] = entry
        model.calls[request.rid] = entry

    def abort(self, rid: str) -> bool:
        """Drop a call in whatever state; its slot and KV are free when this returns.

        But for rows into which a prefix is being restored: they are free by the next step.
        """
        entry = self._calls.get(rid)
        if entry is None:
            return False
        model = self._models[entry.call.model]
        with _inside(model):
            model.scheduler.drop(entry.request)
        self._forget(model, entry)
        return True

    def waiting(self, model: str) -> list[str]:
        """Rids whose prefill is not complete. A half prefilled one stands first; it goes on in any step that admits."""
        opened = self._model(model)
        return [opened.calls[r.rid].call.rid for r in opened.scheduler.queued() if r.rid in opened.calls]

    def prefix_state(self, rid: str) -> PrefixState:
        """See the contract; a look-up counts as a use for the prefix tree's eviction."""
        entry = self._calls.get(rid)
        if entry is None:
            return PrefixState()
        model = self._models[entry.call.model]
        with _inside(model):
            return model.residence.prefix_state(entry.request, active=entry.call.model == self._active)

    def has_unfinished(self, model: str) -> bool:
        """Whether the model has calls waiting, running or parked."""
        return bool(self._model(model).calls)

    def running(self, model: str) -> int:
        """Calls that hold device KV now, the half prefilled one included."""
        if model != self._active:
            return 0
        return sum(entry.request.kv.holds_kv for entry in self._model(model).calls.values())

    # --- steps

    def step(self, admit: frozenset[str] | None) -> StepResult:
        """One batch of the active model; see the contract."""
        if self._active is None:
            raise EngineError("no model is active: switch to one first")
        model = self._models[self._active]
        started = time.perf_counter()
        inner = None if admit is None else frozenset(self._calls[rid].request.rid for rid in admit & self._calls.keys())
        with _inside(model):
            ran = model.residence.step(inner)
        fresh = again = 0
        for request, (start, length) in zip(ran.requests, ran.extents, strict=False):
            entry = model.calls.get(request.rid)
            if entry is not None:
                entry.from_host |= model.residence.from_host(request.rid, start)
                first, repeated = entry.account.extend(start, length)
                fresh, again = fresh + first, again + repeated
        restored, restore_ms = model.residence.take_restored()
        half = model.calls.get(model.scheduler.chunked_req.rid) if model.scheduler.chunked_req is not None else None
        return StepResult(
            kind=ran.kind,
            tokens=self._news(model, ran.requests),
            prefilled_tokens=fresh,
            recomputed_tokens=again,
            batch=len(ran.requests),
            restored_tokens=restored,
            restore_ms=restore_ms if restored else 0.0,
            half="" if half is None else half.call.rid,
            wall_ms=(time.perf_counter() - started) * 1e3,
        )

    def _news(self, model: OpenModel, requests: tuple[Any, ...]) -> list[StepTokens]:
        news = []
        for request in requests:
            entry = model.calls.get(request.rid)
            update = entry.news() if entry is not None else None
            if entry is not None and update is not None:
                news.append(update)
                if update.finished:
                    model.sessions.add(entry.call.session)
                    if self._strict and update.finished != "error":
                        entry.account.check()
                    self._forget(model, entry)
        for rid, reason in model.scheduler.failed.items():
            entry = model.calls.get(rid)
            if entry is not None:
                news.append(entry.failure(reason))
                self._forget(model, entry)
        model.scheduler.failed.clear()
        return news

    def _forget(self, model: OpenModel, entry: Call) -> None:
        self._calls.pop(entry.call.rid, None)
        model.calls.pop(entry.request.rid, None)
        with _inside(model):
            model.residence.left(entry.request)

    # --- switches

    def switch(self, model: str) -> SwitchTiming:
        """Make `model` active; see the contract. To the active model: nothing happens (path "none")."""
        target = self._model(model)
        source = self._active
        if source == model:
            return SwitchTiming(
                rank=self._ranks.rank,
                source=source,
                target=model,
                path="none",
                phases_ms=(0.0,) * 5,
                total_ms=0.0,
                weight_bytes=target.region.weight_bytes,
            )
        outgoing = None if source is None else self._models[source]
        self._active = None  # until the end: a failure in between leaves nothing that could be stepped
        try:
            timing = self._switcher.switch(outgoing, target, self._leave, self._enter)
        except SwitchFailedError as e:
            self._active = e.active
            raise
        self._active = model
        return msgspec.structs.replace(timing, suspended=self._suspended)

    def _leave(self, model: OpenModel) -> int:
        """Phase 1: take the model's calls and prefixes off the device. How many calls were decoding."""
        with _inside(model):
            self._suspended, retracted = model.residence.leave()
            if model.residence.take_forgot():
                model.kv_epoch += 1
        model.unbound.leave()
        if not model.residence.keeps_prefixes:
            model.sessions.clear()
        return retracted

    def _enter(self, model: OpenModel) -> None:
        """Phase 5: the model's weights and KV tensors are in place: its suspended calls come back."""
        with _inside(model):
            model.residence.enter()

    def stage(self, model: str) -> None:
        """See the contract."""
        if self._active is not None and model in self._models:
            self._switcher.stage(self._models[self._active], self._models[model])

    @property
    def staged_model(self) -> str | None:
        """The model whose weights are being staged, or are staged."""
        return self._switcher.stager.model if self._switcher.stager else None

    @property
    def stager(self) -> Stager | None:
        """The staging under way, for who wants to watch it."""
        return self._switcher.stager

    @property
    def staging_slack_bytes(self) -> int:
        """See the contract."""
        return 0 if self._active is None else self._switcher.slack_bytes(self._models[self._active])

    @property
    def staged(self) -> Staged:
        """See the contract."""
        stager = self._switcher.stager
        return Staged() if stager is None else Staged(stager.model, stager.bytes_in(State.CLEAN))

    # --- opening and closing at run time

    def open_model(self, model: str) -> bool:
        """See the contract. Its files are read in the background; building it takes the engine's own thread."""
        if model in self._models:
            return True
        if not self._catalog.read(model):
            return False
        with self._vacated():
            self._catalog.build(model)
        return True

    def close_model(self, model: str) -> None:
        """See the contract."""
        opened = self._model(model)
        if opened.calls:
            raise BadRequestError(f"{model} has {len(opened.calls)} unfinished calls", param="model")
        self._switcher.cancel()
        if self._active == model:
            self._leave(opened)
            self._switcher.opened(None)
            self._active = None
        del opened
        self._catalog.drop(model)

    @contextmanager
    def _vacated(self) -> Iterator[None]:
        """Inside, no model is active and the buffer may be overwritten; the active one comes back afterwards.

        Raises:
            RuntimeError: it could not come back: the engine must not be used any more. Not an EngineError, which would
                be taken for the reason why some model was not opened.
        """
        active = None if self._active is None else self._models[self._active]
        self._switcher.cancel()
        self._active = None
        if active is not None:
            self._leave(active)
        try:
            yield
        except RankLostError:
            raise
        except EngineError:
            self._come_back(active)
            raise
        self._come_back(active)

    def _come_back(self, active: OpenModel | None) -> None:
        if active is None:
            return
        try:
            self._switcher.switch(None, active, self._leave, self._enter)
        except RankLostError:
            raise
        except EngineError as e:
            raise RuntimeError(f"{active.info.name} did not come back after another model was opened: {e}") from e
        self._active = active.info.name

    # --- state

    def load(self, model: str) -> ModelLoad:
        """Current load; `cached_sessions` counts sessions that finished a call since the last switch away."""
        opened = self._model(model)
        scheduler = opened.scheduler
        queued = scheduler.queued()
        with _inside(opened):
            free, spare = scheduler.token_to_kv_pool_allocator.available_size(), scheduler.free_tokens
        return ModelLoad(
            waiting=len(queued),
            running=self.running(model),
            waiting_tokens=sum(len(r.origin_input_ids) + len(r.output_ids) for r in queued),
            kv_used_tokens=opened.info.kv_capacity_tokens - free if model == self._active else 0,
            kv_held_tokens=max(0, opened.info.kv_capacity_tokens - spare) if model == self._active else 0,
            kv_epoch=opened.kv_epoch,
            cached_sessions=len(opened.sessions - {""}),
            host_kv_tokens=opened.residence.host_tokens,
            restore_ms_per_token=opened.residence.restore_ms_per_token,
        )

    @property
    def host_kv(self) -> HostKvFigures | None:
        """See the contract."""
        if self._host_kv is None:
            return None
        stats = self._host_kv.stats()
        return figures_of(self._host_kv.registry, stats.d2h_bytes, stats.h2d_bytes)

    def host_kv_stats(self) -> Stats | None:
        """Totals of the host KV; None: there is none."""
        return None if self._host_kv is None else self._host_kv.stats()

    def check_idle(self) -> None:
        """See the contract: SGLang's own invariants, and ours, for every model."""
        if self._calls:
            raise EngineError(f"not idle: {len(self._calls)} calls are unfinished")
        for name, model in self._models.items():
            with _inside(model):
                model.residence.settle()
                checks.check_idle(name, model.scheduler)
        if self._host_kv is not None and (wrong := self._host_kv.check_idle()):
            raise EngineError(f"host KV: {wrong}")

    def next_event_in(self) -> float | None:
        """Nothing ever happens by itself."""
        return None

    def close(self) -> None:
        """Give the buffer and the host images back. The engine must not be used after this."""
        self._catalog.close()
        self._switcher.close()
        if self._host_kv is not None:
            self._host_kv.close()
        self._calls.clear()
        self._active = None
        self._buffer.untyped_storage().resize_(0)  # at once, whoever still holds a view

    def _recompute_cost(self, name: str) -> float:
        """Of one token, relative to other models: a pass costs in proportion to the weights. Closed: nothing."""
        opened = self._models.get(name)
        return 0.0 if opened is None else float(opened.info.weight_bytes)

    def _model(self, name: str) -> OpenModel:
        return self._catalog.get(name)


def _inside(model: OpenModel) -> AbstractContextManager[None]:
    return model.inside()


def _share(device: str, rank: int) -> torch.device:
    """The rank's device: on CUDA, so many after the one named."""
    kind, _, index = device.partition(":")
    return torch.device(kind) if kind == "cpu" else torch.device(kind, int(index or 0) + rank)


def _host_kv(
    options: HostKvOptions, device: torch.device, cost: Callable[[str], float], ranks: Ranks, poison: bool
) -> HostKv:
    return HostKv(
        options.capacity_bytes,
        device,
        verify=options.verify,
        d2h_gbps=options.d2h_gbps,
        h2d_gbps=options.h2d_gbps,
        cost_ms_per_token=cost,
        ranks=ranks,
        poison=poison,
    )
