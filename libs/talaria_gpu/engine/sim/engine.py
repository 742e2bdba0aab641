"""The sim engine: batches like a real one, takes time on a clock instead of computing (DESIGN 8).

It never blocks. A step whose batch takes time starts it and answers "idle"; `next_event_in` says how long it runs, and
the first step from then on returns its result. With all times 0 every step returns at once. What it promises is what a
real engine promises: exact prefix reuse within (model, salt), KV bounds and retraction; and its tokens are a pure
function of the prompt (`sim.tokens`).

A device with a `Substrate` also keeps KV on the host (`sim.host`) and stages weights (`sim.staging`), with the plans,
bitmap and registry of the product; otherwise a switch forgets all KV and loads all weights.

In virtual time (`macro`) one decode step stands for as many iterations as can pass before anybody has to decide: until
a call ends, KV runs short, a prefix arrives from host, or `horizon`; a call that comes or goes meanwhile ends it at the
next iteration. What it does is what single iterations would have done (tested), so that a simulation costs by events
and not by tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from talaria_common.clock import Clock
from talaria_common.errors import BadRequestError, ContextLengthError, EngineError
from talaria_common.settings import InstanceSettings
from talaria_gpu.engine.contract import (
    EngineCall,
    HostKvFigures,
    ModelInfo,
    ModelLoad,
    PrefixState,
    Staged,
    StepResult,
    SwitchTiming,
)
from talaria_gpu.engine.sim.catalog import SimCatalog
from talaria_gpu.engine.sim.device import Device, FlatDevice
from talaria_gpu.engine.sim.flight import Flight, cut, decode
from talaria_gpu.engine.sim.pool import SimCall, SimPool
from talaria_gpu.engine.sim.substrate import SimSubstrate
from talaria_gpu.hkvr.figures import figures_of

_CATCH_UP_MS = 100.0
"""How far a starved process may lag behind the modelled device and still make it up."""


class SimEngine:
    """`contract.Engine` over a device model."""

    def __init__(
        self, instance: InstanceSettings, clock: Clock, device: Device | None = None, *, macro: bool = False
    ) -> None:
        """An engine with the models of `instance`, timed by `device` (default: `instance.sim`) on `clock`.

        A single model is in the device buffer from the start; of several, none is. All are open but those that
        `instance.open` leaves out. `macro`: see the module.
        """
        self._device = device or FlatDevice(instance.sim)
        self._clock = clock
        self._macro = macro
        self.horizon = math.inf
        """No macro-step goes on beyond this time, seconds, by more than one iteration."""
        self.most_steps: int | None = None
        """Nor does it have more iterations than this."""
        self._catalog = SimCatalog(instance, self._device)
        self._specs = self._catalog.specs
        self._pools = {
            name: SimPool(spec.kv_capacity_tokens, instance.page_size, spec.max_running)
            for name, spec in self._specs.items()
        }
        self._kept = SimSubstrate.of(self._device, self._specs, self._pools, instance.page_size, clock.now())
        self._model_of: dict[str, str] = {}
        self._active = instance.models[0] if len(instance.models) == 1 else None
        self._flight: Flight | None = None
        self._free_at = 0.0
        """When the device is, or was, done with its last batch or switch."""
        self._admit: frozenset[str] | None = None
        """What the step under way may prefill."""
        self._waited_ms = 0.0
        """Waits for copies that the next result has to account for."""

    # --- what there is

    def models(self) -> dict[str, ModelInfo]:
        """The open models by name."""
        return self._catalog.models()

    @property
    def capacities(self) -> dict[str, int]:
        """KV capacity in tokens of every model, closed ones too."""
        return {name: spec.kv_capacity_tokens for name, spec in self._specs.items()}

    @property
    def active(self) -> str | None:
        """The model in the device buffer."""
        return self._active

    @property
    def buffer_bytes(self) -> int:
        """What the modelled device buffer holds: one model's weights, KV and reserve."""
        if self._kept is not None:
            return self._kept.buffer_bytes
        return max(spec.kv_end_bytes for spec in self._specs.values())

    def waiting(self, model: str) -> list[str]:
        """Rids waiting for prefill, retracted ones first."""
        return list(self._pools[model].waiting)

    def has_unfinished(self, model: str) -> bool:
        """Whether the model has calls waiting or running."""
        pool = self._pools[model]
        return bool(pool.waiting or pool.running)

    @property
    def unfinished(self) -> int:
        """Calls of all models that are here."""
        return len(self._model_of)

    def running(self, model: str) -> int:
        """Calls of the model that hold device KV."""
        return self._pools[model].holding if model == self._active else 0

    def kv_used_tokens(self, model: str) -> int:
        """Device rows that the model's running calls and cached prefixes hold."""
        return self._pools[model].used if model == self._active else 0

    def load(self, model: str) -> ModelLoad:
        """Current load of one model."""
        active = model == self._active
        if self._kept is None or self._kept.host is None:
            return self._pools[model].load(active=active)
        host = self._kept.host
        return self._pools[model].load(
            active=active, host_kv_tokens=host.tokens(model), restore_ms_per_token=host.restore_ms_per_token(model)
        )

    @property
    def kept(self) -> SimSubstrate | None:
        """What keeps KV and stages weights, for who wants to watch it."""
        return self._kept

    def next_event_in(self) -> float | None:
        """Seconds until the batch or switch under way is over; None: nothing is under way."""
        now = self._clock.now()
        if self._flight is None and self._free_at <= now:
            return None
        return max(0.0, (self._flight.due if self._flight else self._free_at) - now)

    def prefix_state(self, rid: str) -> PrefixState:
        """What a waiting call would find on the device and on the host."""
        model = self._model_of.get(rid)
        if model is None:
            return PrefixState()
        pool = self._pools[model]
        device = pool.cached_tokens(rid) if model == self._active else 0
        call = pool.waiting.get(rid)
        if self._kept is None or self._kept.host is None or call is None:
            return PrefixState(device)
        self._kept.host.poll(self._clock.now())
        return PrefixState(device, max(0, self._kept.host.on_host(model, call) - device))

    # --- calls

    def submit(self, call: EngineCall) -> None:
        """Queue a call.

        Raises:
            ModelNotFoundError: the model is not open.
            BadRequestError: no tokens, an id that is none, or no token asked for.
            ContextLengthError: prompt and completion exceed the context.
        """
        self._catalog.require(call.model)
        pool = self._pools[call.model]
        if not call.input_ids:
            raise BadRequestError("the prompt has no tokens")
        if call.sampling.max_new_tokens < 1:
            raise BadRequestError("at least one token has to be asked for", param="max_tokens")
        total = len(call.input_ids) + call.sampling.max_new_tokens
        context = self._specs[call.model].context_tokens
        if total > context:
            raise ContextLengthError(
                f"{len(call.input_ids)} prompt tokens and {call.sampling.max_new_tokens} new ones exceed the context "
                f"of {context} tokens"
            )
        if call.rid in self._model_of:
            raise BadRequestError(f"call {call.rid} is here already")
        try:
            pool.waiting[call.rid] = SimCall.of(call, pool.code)
        except (OverflowError, TypeError) as e:
            raise BadRequestError(f"token ids: {e}") from e
        self._model_of[call.rid] = call.model
        if self._kept is not None:
            self._kept.came(call.model, pool.waiting[call.rid], self._clock.now())
        self._cut()

    def abort(self, rid: str) -> bool:
        """Drop a call; its rows are free at once."""
        model = self._model_of.pop(rid, None)
        if model is None:
            return False
        self._cut()
        pool = self._pools[model]
        call = pool.waiting.get(rid) or pool.running[rid]
        pool.drop(rid)
        if self._kept is not None:
            self._kept.left(model, call)
        return True

    # --- models and their weights

    def stage(self, model: str) -> None:
        """Begin to stage it, if the device does that."""
        now = self._clock.now()
        if self._kept is not None and self._active is not None and self._free_at - now < math.inf:
            self._kept.stage(self._active, model, now)

    @property
    def staging_slack_bytes(self) -> int:
        """The gap, and KV that nothing holds; 0 where nothing is staged."""
        return 0 if self._kept is None or self._active is None else self._kept.slack_bytes(self._active)

    @property
    def host_kv(self) -> HostKvFigures | None:
        """Totals of the registry; the bytes of copies are not counted."""
        host = None if self._kept is None else self._kept.host
        return None if host is None else figures_of(host.registry)

    @property
    def staged(self) -> Staged:
        """See the contract."""
        return Staged() if self._kept is None else self._kept.staged

    def open_model(self, model: str) -> bool:
        """Open it; False for `open_ms` from the first time it is asked for. Raises ModelNotFoundError."""
        return self._catalog.open(model, self._clock.now())

    def close_model(self, model: str) -> None:
        """Close it. Raises ModelNotFoundError or BadRequestError."""
        self._catalog.require(model)
        if self.has_unfinished(model):
            raise BadRequestError(f"{model} has unfinished calls")
        if self._active == model:
            if self._kept is not None:
                self._kept.leave(model, self._clock.now())
            self._pools[model].deactivate()
            self._active = None
        if self._kept is not None:
            self._kept.closed(model, self._clock.now())
        self._catalog.close(model)

    def interrupt(self) -> None:
        """Somebody wants to be heard: a macro-step under way ends at its next iteration."""
        self._cut()

    # --- the device

    def step(self, admit: frozenset[str] | None) -> StepResult:
        """Return the batch under way if it is done, else start one; see the module."""
        now = self._clock.now()
        if self._flight is None and self._active is not None and self._free_at <= now:
            self._admit = admit
            self._start(now)
        if self._flight is not None and self._flight.kind == "copy" and self._flight.due <= now:
            self._waited_ms += self._flight.wall_ms
            self._flight = None
            self._start(now)
        flight = self._flight
        if flight is None or flight.due > now:
            return StepResult(kind="idle")
        self._flight = None
        return self._land(flight, now)

    def switch(self, model: str) -> SwitchTiming:
        """Make `model` active; it can be stepped once `switch_ms` have passed."""
        self._catalog.require(model)
        if model == self._active:
            raise EngineError(f"{model} is active already")
        now, source = self._clock.now(), self._active
        self._flight, self._active, self._waited_ms = None, model, 0.0
        if self._kept is not None:
            timing = self._kept.switch(source, model, now)
        else:
            retracted = 0
            if source is not None:
                retracted = self._pools[source].deactivate()
                self._pools[source].epoch += 1
            phases = self._device.switch_ms(source, model)
            size = self._specs[model].weight_bytes
            timing = SwitchTiming(
                source=source or "",
                target=model,
                path="h2d",
                phases_ms=phases,
                total_ms=sum(phases),
                weight_bytes=size,
                h2d_bytes=size,
                missing_bytes=size,
                retracted=retracted,
            )
        self._free_at = now + timing.total_ms / 1000
        return timing

    def check_idle(self) -> None:
        """Raises EngineError naming what leaked."""
        if self._kept is not None:
            self._kept.settle()
        for name, pool in self._pools.items():
            problem = pool.check()
            if problem:
                raise EngineError(f"{name}: {problem}")
        if self._model_of:
            raise EngineError(f"{len(self._model_of)} calls are known but in no queue")
        problem = self._kept.check() if self._kept is not None else ""
        if problem:
            raise EngineError(f"host KV: {problem}")

    def close(self) -> None:
        """Forget everything."""
        self._flight = None
        self._pools.clear()
        self._model_of.clear()

    def _start(self, now: float) -> None:
        """Give the device its next batch, if there is one."""
        model = self._active or ""
        pool = self._pools[model]
        if self._kept is None:
            self._launch(pool, self._admit, now)
            return
        self._launch(pool, self._kept.ready(model, self._admit, now), now)
        if self._flight is None and self._kept.in_the_way(model, self._admit):
            due = self._kept.all_over()
            if due > now:
                self._flight = Flight("copy", now, due, (due - now) * 1000)
                self._free_at = due
                return
            pool.release()
            self._launch(pool, self._admit, now)
        self._kept.taken(model, now)

    def _launch(self, pool: SimPool, admit: frozenset[str] | None, now: float) -> None:
        model = self._active or ""
        shares = pool.admit(admit, now, self._specs[model].prefill_tokens) if pool.waiting else []
        if shares:
            if self._kept is not None:
                self._kept.admitted(model, shares)
            else:
                for call, part in shares:
                    call.source = "device" if part.cached and call.cached else call.source
            wall_ms = self._device.prefill_ms(model, [share.part for share in shares])
            self._flight = Flight("prefill", now, now + wall_ms / 1000, wall_ms, tuple(shares))
        elif pool.running:
            self._flight = self._decoding(pool, now)
            if self._macro:
                self._cut(min(self.horizon, self._catalog.next_opening(now)))
        if self._flight is not None:
            self._free_at = self._flight.due

    def _decoding(self, pool: SimPool, now: float) -> Flight:
        # Decode follows the batch before without a gap, as on a device: a caller that came a little late to fetch
        # that one must not make the stream slower than its pace. In virtual time nobody is late.
        calls = tuple(pool.grow())
        if not calls:
            due = self._kept.all_over() if self._kept is not None else now
            if due > now:
                return Flight("copy", now, due, (due - now) * 1000)
            pool.release()
            calls = tuple(pool.grow())
            if not calls:
                raise EngineError(f"{self._active}: nobody but its only call holds rows, and it finds none")
        context = sum(call.length for call in calls)
        late_ms = (now - self._free_at) * 1000
        step_ms = self._device.decode_ms(self._active or "", len(calls), context, 1)
        start = self._free_at if late_ms < max(step_ms, _CATCH_UP_MS) and not self._macro else now
        steps = self._most_steps(pool) if self._macro else 1
        return decode(self._device, self._active or "", start, calls, context, steps=steps)

    def _most_steps(self, pool: SimPool) -> int:
        """Iterations until the first call ends or KV runs short (the first one's rows are taken already)."""
        running = pool.running.values()
        if any(c.call.sampling.stop_token_ids or c.call.sampling.logprobs is not None for c in running):
            return 1
        left = min(c.call.sampling.max_new_tokens - len(c.out) for c in running)
        left = left if self.most_steps is None else min(left, self.most_steps)
        if self._kept is not None:
            left = min(left, self._kept.most_steps(self._active or "", self._admit, len(pool.running)))
        return max(1, min(left, 1 + pool.available // len(pool.running)))

    def _cut(self, at: float | None = None) -> None:
        """End the decode under way at its first iteration that is over at or after `at` (default: now)."""
        if self._flight is not None:
            self._flight = cut(self._flight, self._clock.now() if at is None else at, self._device, self._active or "")
            self._free_at = self._flight.due

    def _land(self, flight: Flight, now: float) -> StepResult:
        model = self._active or ""
        pool = self._pools[model]
        restored = self._kept.take_restored() if self._kept is not None else 0
        waited_ms, self._waited_ms = self._waited_ms, 0.0
        fresh = again = 0
        if flight.kind == "prefill":
            calls: Sequence[SimCall] = [share.call for share in flight.shares if share.call.alive]
            for share in flight.shares:
                first, repeated = share.call.computed(share.upto)
                fresh, again = fresh + first, again + repeated
                if share.call.alive:
                    node = pool.prefilled(share.call, share.upto, now)
                    if self._kept is not None:
                        self._kept.checkpoint(model, share.call, node, now)
            calls = [call for call in calls if call is not pool.half]
        else:
            calls = [call for call in flight.calls if call.alive]
            if flight.steps > 1:
                pool.extend(calls, flight.steps - 1)
        out = []
        for call in calls:
            tokens = call.emit() if flight.steps == 1 else call.emit_many(flight.steps)
            if tokens.finished:
                node = pool.finish(call, now)
                del self._model_of[call.call.rid]
                if self._kept is not None:
                    self._kept.checkpoint(model, call, node, now)
                    self._kept.left(model, call)
            out.append(tokens)
        if self._kept is not None:
            self._kept.taken(model, now)
        return StepResult(
            kind="decode" if flight.kind == "decode" else "prefill",
            tokens=out,
            prefilled_tokens=fresh,
            recomputed_tokens=again,
            batch=len(flight.shares) or len(flight.calls),
            wall_ms=flight.wall_ms + waited_ms,
            steps=flight.steps,
            restored_tokens=restored,
            restore_ms=waited_ms,
            half="" if pool.half is None else pool.half.call.rid,
        )
