"""`SglangEngine`: several models, one SGLang scheduler each, over one device buffer of which one is valid at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

import torch
from sglang.srt.runtime_context import use_context

from talaria_common.errors import BadRequestError, ContextLengthError, EngineError, ModelNotFoundError
from talaria_gpu.engine.contract import EngineCall, ModelInfo, ModelLoad, StepResult, StepTokens, SwitchTiming
from talaria_gpu.engine.sglang import checks, opening
from talaria_gpu.engine.sglang.calls import Call
from talaria_gpu.engine.sglang.opening import OpenModel
from talaria_gpu.engine.sglang.spec import ModelSpec


class SglangEngine:
    """The engine contract on SGLang. Not thread-safe.

    Args:
        models: what to open, by name.
        device: "cpu", "cuda" or "cuda:N"; `environment.prepare(device)` must have run.
        kv_tokens: KV rows of each model.
        page_size: rows per page of the KV allocator; prefixes are shared in whole pages.
        max_running: calls in one batch, per model.
        chunked_prefill_tokens: most prompt tokens in one prefill step; longer prompts take several.
        buffer_bytes: the device buffer; None: what the largest model is estimated to need.
        threads: CPU threads of torch; None: leave as it is.
        seed: of the draws for calls that bring no seed.
        poison: overwrite all but the weights with garbage at every switch, so that reading stale bytes shows.
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
        poison: bool = False,
        progress: Callable[[str], None] = lambda _: None,
    ) -> None:
        if threads is not None:
            torch.set_num_threads(threads)
        self._device = torch.device(device)
        self._poison = poison
        self._random = Random(seed)  # noqa: S311 - seeds of sampling, no secret
        self._active: str | None = None
        self._calls: dict[str, Call] = {}
        self._serial = 0
        size = opening.estimate_bytes(models, kv_tokens, page_size) if buffer_bytes is None else buffer_bytes
        self._buffer = torch.zeros(size, dtype=torch.uint8, device=self._device)
        self._models: dict[str, OpenModel] = {}
        for name, spec in models.items():
            started = time.perf_counter()
            opened = opening.open_model(
                name,
                spec,
                self._buffer,
                device=device,
                kv_tokens=kv_tokens,
                page_size=page_size,
                max_running=max_running,
                chunked_prefill_tokens=chunked_prefill_tokens,
                seed=seed,
            )
            self._models[name] = opened
            progress(
                f"{name}: {opened.region.weight_bytes / 1e6:.0f} MB weights, "
                f"{opened.info.kv_capacity_tokens} KV tokens of {opened.info.kv_bytes_per_token} B, "
                f"opened in {time.perf_counter() - started:.1f} s"
            )

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
        entry = Call(call, request)
        self._calls[call.rid] = entry
        model.calls[request.rid] = entry

    def abort(self, rid: str) -> bool:
        """Drop a call in whatever state; its slot and KV are free when this returns."""
        entry = self._calls.get(rid)
        if entry is None:
            return False
        model = self._models[entry.call.model]
        self._forget(model, entry)
        with _inside(model):
            model.scheduler.drop(entry.request)
        return True

    def waiting(self, model: str) -> list[str]:
        """Rids whose prefill is not complete. A half prefilled one stands first; it goes on in any step that admits."""
        opened = self._model(model)
        return [opened.calls[r.rid].call.rid for r in opened.scheduler.queued() if r.rid in opened.calls]

    def has_unfinished(self, model: str) -> bool:
        """Whether the model has calls waiting, running or parked."""
        return bool(self._model(model).calls)

    def running(self, model: str) -> int:
        """Calls that hold device KV now, the half prefilled one included."""
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
            ran = model.scheduler.step(inner)
        fresh = again = 0
        for request, (start, length) in zip(ran.requests, ran.extents, strict=False):
            entry = model.calls.get(request.rid)
            if entry is not None:
                first, repeated = entry.account.extend(start, length)
                fresh, again = fresh + first, again + repeated
        return StepResult(
            kind=ran.kind,
            tokens=self._news(model, ran.requests),
            prefilled_tokens=fresh,
            recomputed_tokens=again,
            batch=len(ran.requests),
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

    # --- switches

    def switch(self, model: str) -> SwitchTiming:
        """Make `model` active; see the contract. To the active model: nothing happens (path "none")."""
        target = self._model(model)
        source = self._active
        if source == model:
            return SwitchTiming(
                source=source,
                target=model,
                path="none",
                phases_ms=(0.0,) * 5,
                total_ms=0.0,
                weight_bytes=target.region.weight_bytes,
            )
        clock = _Phases(self._device)
        retracted = 0
        if source is not None:
            outgoing = self._models[source]
            with _inside(outgoing):
                retracted = outgoing.scheduler.retract_all()
            outgoing.kv_epoch += 1
            outgoing.sessions.clear()
        self._active = None  # until the end: a failure in between leaves nothing that could be stepped
        clock.mark()
        copied = target.region.open_weights()
        clock.mark()
        if self._poison:
            target.region.poison()
        target.region.open_kv()
        clock.mark()
        checks.check_at_home(model, target.region)  # graphs and backends hold these addresses: equal, they stay valid
        clock.mark()
        self._active = model
        clock.mark()
        return SwitchTiming(
            source=source or "",
            target=model,
            path="h2d",
            phases_ms=clock.phases(),
            total_ms=sum(clock.phases()),
            weight_bytes=target.region.weight_bytes,
            h2d_bytes=copied,
            retracted=retracted,
        )

    # --- state

    def load(self, model: str) -> ModelLoad:
        """Current load; `cached_sessions` counts sessions that finished a call since the last switch away."""
        opened = self._model(model)
        scheduler = opened.scheduler
        queued = scheduler.queued()
        with _inside(opened):
            free = scheduler.token_to_kv_pool_allocator.available_size()
        return ModelLoad(
            waiting=len(queued),
            running=self.running(model),
            waiting_tokens=sum(len(r.origin_input_ids) + len(r.output_ids) for r in queued),
            kv_used_tokens=opened.info.kv_capacity_tokens - free,
            kv_epoch=opened.kv_epoch,
            cached_sessions=len(opened.sessions - {""}),
        )

    def check_idle(self) -> None:
        """See the contract: SGLang's own invariants, and ours, for every model."""
        if self._calls:
            raise EngineError(f"not idle: {len(self._calls)} calls are unfinished")
        for name, model in self._models.items():
            with _inside(model):
                checks.check_idle(name, model.scheduler)

    def next_event_in(self) -> float | None:
        """Nothing ever happens by itself."""
        return None

    def close(self) -> None:
        """Give the buffer and the host images back. The engine must not be used after this."""
        self._models.clear()
        self._calls.clear()
        self._active = None
        self._buffer.untyped_storage().resize_(0)  # at once, whoever still holds a view

    def _model(self, name: str) -> OpenModel:
        try:
            return self._models[name]
        except KeyError:
            raise ModelNotFoundError(f"model {name!r} is not open here", param="model") from None


@contextmanager
def _inside(model: OpenModel) -> Iterator[None]:
    """Inside, the model's runtime context is SGLang's current one, and torch records nothing for gradients."""
    with use_context(model.context), torch.inference_mode():
        yield


class _Phases:
    """Marks the ends of a switch's five phases."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks = [time.perf_counter()]

    def mark(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._marks.append(time.perf_counter())

    def phases(self) -> tuple[float, float, float, float, float]:
        """Save and teardown, open weights, KV shell, runtime and graphs, publish; ms."""
        a, b, c, d, e = ((y - x) * 1e3 for x, y in zip(self._marks, self._marks[1:], strict=False))
        return a, b, c, d, e
