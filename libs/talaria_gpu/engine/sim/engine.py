"""The sim engine: batches like a real one, takes time on a clock instead of computing (DESIGN 8).

It never blocks. A step whose batch takes time starts it and answers "idle"; `next_event_in` says how long it runs, and
the first step from then on returns its result. With all times 0 every step returns at once. What it promises is what a
real engine promises: exact prefix reuse within (model, salt) since the last switch, KV bounds and retraction; and its
tokens are a pure function of the prompt (`sim.tokens`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from talaria_common.clock import Clock
from talaria_common.errors import BadRequestError, ContextLengthError, EngineError, ModelNotFoundError
from talaria_common.settings import InstanceSettings
from talaria_gpu.engine.contract import EngineCall, ModelInfo, ModelLoad, StepResult, SwitchTiming
from talaria_gpu.engine.sim.pool import SimCall, SimPool
from talaria_gpu.engine.sim.tokens import EOS, VOCAB_SIZE

_MIB = 1 << 20
_CATCH_UP_MS = 100.0
"""How far a starved process may lag behind the modelled device and still make it up."""


@dataclass(frozen=True, slots=True)
class _Flight:
    """The batch on the device."""

    kind: Literal["prefill", "decode"]
    calls: tuple[tuple[SimCall, int], ...]
    """With the tokens that each prefills."""
    recomputed: int
    due: float
    wall_ms: float


class SimEngine:
    """`contract.Engine` over a device model."""

    def __init__(self, instance: InstanceSettings, clock: Clock) -> None:
        """An engine with the models of `instance`, timed by `instance.sim` on `clock`.

        A single model is in the device buffer from the start; of several, none is.
        """
        self._sim = sim = instance.sim
        self._clock = clock
        self._context = min(sim.context_tokens, sim.kv_capacity_tokens)
        self._pools = {
            name: SimPool(sim.kv_capacity_tokens, instance.page_size, sim.max_running) for name in instance.models
        }
        self._model_of: dict[str, str] = {}
        self._active = instance.models[0] if len(instance.models) == 1 else None
        self._flight: _Flight | None = None
        self._free_at = 0.0
        """When the device is, or was, done with its last batch or switch."""

    # --- what there is

    def models(self) -> dict[str, ModelInfo]:
        """The open models by name."""
        sim = self._sim
        return {
            name: ModelInfo(
                name=name,
                context_tokens=self._context,
                kv_capacity_tokens=sim.kv_capacity_tokens,
                weight_bytes=sim.weight_mib * _MIB,
                kv_bytes_per_token=sim.kv_bytes_per_token,
                max_running=sim.max_running,
                eos_token_ids=(EOS,),
                vocab_size=VOCAB_SIZE,
            )
            for name in self._pools
        }

    @property
    def active(self) -> str | None:
        """The model in the device buffer."""
        return self._active

    @property
    def buffer_bytes(self) -> int:
        """What the modelled device buffer would hold: one model's weights and KV."""
        return self._sim.weight_mib * _MIB + self._sim.kv_capacity_tokens * self._sim.kv_bytes_per_token

    def waiting(self, model: str) -> list[str]:
        """Rids waiting for prefill, retracted ones first."""
        return list(self._pools[model].waiting)

    def has_unfinished(self, model: str) -> bool:
        """Whether the model has calls waiting or running."""
        pool = self._pools[model]
        return bool(pool.waiting or pool.running)

    def running(self, model: str) -> int:
        """Calls of the model that hold device KV."""
        return len(self._pools[model].running)

    def load(self, model: str) -> ModelLoad:
        """Current load of one model."""
        return self._pools[model].load()

    def next_event_in(self) -> float | None:
        """Seconds until the batch or switch under way is over; None: nothing is under way."""
        now = self._clock.now()
        if self._flight is None and self._free_at <= now:
            return None
        return max(0.0, (self._flight.due if self._flight else self._free_at) - now)

    # --- calls

    def submit(self, call: EngineCall) -> None:
        """Queue a call.

        Raises:
            ModelNotFoundError: the model is not open.
            BadRequestError: no tokens, an id that is none, or no token asked for.
            ContextLengthError: prompt and completion exceed the context.
        """
        pool = self._pools.get(call.model)
        if pool is None:
            raise ModelNotFoundError(f"model {call.model!r} is not open here")
        if not call.input_ids:
            raise BadRequestError("the prompt has no tokens")
        if call.sampling.max_new_tokens < 1:
            raise BadRequestError("at least one token has to be asked for", param="max_tokens")
        total = len(call.input_ids) + call.sampling.max_new_tokens
        if total > self._context:
            raise ContextLengthError(
                f"{len(call.input_ids)} prompt tokens and {call.sampling.max_new_tokens} new ones exceed the context "
                f"of {self._context} tokens"
            )
        if call.rid in self._model_of:
            raise BadRequestError(f"call {call.rid} is here already")
        try:
            pool.waiting[call.rid] = SimCall.of(call)
        except (OverflowError, TypeError) as e:
            raise BadRequestError(f"token ids: {e}") from e
        self._model_of[call.rid] = call.model

    def abort(self, rid: str) -> bool:
        """Drop a call; its rows are free at once."""
        model = self._model_of.pop(rid, None)
        return model is not None and self._pools[model].drop(rid)

    # --- the device

    def step(self, admit: frozenset[str] | None) -> StepResult:
        """Return the batch under way if it is done, else start one; see the module."""
        now = self._clock.now()
        if self._flight is None and self._active is not None and self._free_at <= now:
            self._start(self._pools[self._active], admit, now)
        flight = self._flight
        if flight is None or flight.due > now:
            return StepResult(kind="idle")
        self._flight = None
        return self._land(flight, now)

    def switch(self, model: str) -> SwitchTiming:
        """Make `model` active; it can be stepped once `switch_ms` have passed."""
        if model not in self._pools:
            raise ModelNotFoundError(f"model {model!r} is not open here")
        if model == self._active:
            raise EngineError(f"{model} is active already")
        now = self._clock.now()
        retracted, source = 0, self._active or ""
        if self._active is not None:
            retracted = self._pools[self._active].deactivate()
        self._flight = None
        self._active = model
        took = self._sim.switch_ms
        self._free_at = now + took / 1000
        size = self._sim.weight_mib * _MIB
        return SwitchTiming(
            source=source,
            target=model,
            path="h2d",
            phases_ms=(0.0, took, 0.0, 0.0, 0.0),
            total_ms=took,
            weight_bytes=size,
            h2d_bytes=size,
            retracted=retracted,
        )

    def check_idle(self) -> None:
        """Raises EngineError naming what leaked."""
        for name, pool in self._pools.items():
            problem = pool.check()
            if problem:
                raise EngineError(f"{name}: {problem}")
        if self._model_of:
            raise EngineError(f"{len(self._model_of)} calls are known but in no queue")

    def close(self) -> None:
        """Forget everything."""
        self._flight = None
        self._pools.clear()
        self._model_of.clear()

    def _start(self, pool: SimPool, admit: frozenset[str] | None, now: float) -> None:
        sim = self._sim
        batch = pool.admit(admit, now) if pool.waiting else []
        if batch:
            tokens = sum(todo for _, todo in batch)
            wall_ms = sim.ttft_ms + sim.prefill_ms_per_ktoken * tokens / 1000
            recomputed = sum(todo for call, todo in batch if call.recomputed)
            self._flight = _Flight("prefill", tuple(batch), recomputed, now + wall_ms / 1000, wall_ms)
        elif pool.running:
            wall_ms = sim.decode_step_ms
            # Decode follows the batch before without a gap, as on a device: a caller that came a little late to fetch
            # that one must not make the stream slower than its pace.
            late_ms = (now - self._free_at) * 1000
            start = self._free_at if late_ms < max(wall_ms, _CATCH_UP_MS) else now
            calls = tuple((call, 0) for call in pool.grow())
            self._flight = _Flight("decode", calls, 0, start + wall_ms / 1000, wall_ms)
        if self._flight is not None:
            self._free_at = self._flight.due

    def _land(self, flight: _Flight, now: float) -> StepResult:
        pool = self._pools[self._active or ""]
        out = []
        for call, _ in flight.calls:
            if not call.alive:
                continue
            if flight.kind == "prefill":
                pool.prefilled(call, now)
            tokens = call.emit()
            if tokens.finished:
                pool.finish(call, now)
                del self._model_of[call.call.rid]
            out.append(tokens)
        return StepResult(
            kind=flight.kind,
            tokens=out,
            prefilled_tokens=sum(todo for _, todo in flight.calls) - flight.recomputed,
            recomputed_tokens=flight.recomputed,
            batch=len(flight.calls),
            wall_ms=flight.wall_ms,
        )
