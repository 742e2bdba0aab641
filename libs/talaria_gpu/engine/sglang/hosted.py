"""Where a model's KV lives: on the device alone, or with a second home on the host. Around a step and a slot's ends."""

from __future__ import annotations

import time
from typing import Any

from talaria_gpu.engine.contract import PrefixState
from talaria_gpu.engine.sglang.identity import Pools, device_pools
from talaria_gpu.engine.sglang.restore import Restorer
from talaria_gpu.engine.sglang.runtime import SPARE_STATES
from talaria_gpu.engine.sglang.saving import Saver
from talaria_gpu.engine.sglang.scheduler import Ran, SlotScheduler
from talaria_gpu.engine.sglang.spec import ModelSpec
from talaria_gpu.engine.sglang.suspend import Suspension
from talaria_gpu.hkvr.agreement import Ranks
from talaria_gpu.hkvr.store import HostKv


class PlainModel:
    """KV on the device only: a switch forgets it. Every method is called inside the model's runtime context."""

    restore_ms_per_token = 0.0
    """Measured, EWMA; 0 while nothing was."""
    keeps_prefixes = False
    """Whether prefixes outlive a switch."""

    def __init__(self, scheduler: SlotScheduler) -> None:
        self._scheduler = scheduler

    @property
    def host_tokens(self) -> int:
        """Tokens of prefixes on the host."""
        return 0

    def came(self, request: Any) -> None:
        """A request was queued."""

    def left(self, request: Any) -> None:
        """A request is over: finished, or dropped from the scheduler."""

    def from_host(self, rid: str, start: int) -> bool:  # noqa: ARG002 - others do
        """Whether a prefill that begins at `start` skips tokens that came from the host."""
        return False

    def prefix_state(self, request: Any, *, active: bool) -> PrefixState:
        """See the engine contract."""
        return PrefixState(self._scheduler.cached_tokens(request) if active else 0)

    def step(self, admit: frozenset[str] | None) -> Ran:
        """One batch."""
        return self._scheduler.step(admit)

    def take_restored(self) -> tuple[int, float]:
        """Tokens restored since last asked, and the time of the steps that went into it, ms."""
        return 0, 0.0

    def settle(self) -> None:
        """Nothing of ours is under way, and we hold nothing, when this returns."""

    def leave(self) -> tuple[int, int]:
        """The slot is over. How many requests were suspended, and how many had to be retracted."""
        return 0, self._scheduler.retract_all()

    def enter(self) -> int:
        """The model's weights are in the buffer. How many suspended requests had to be retracted after all."""
        return 0

    def take_forgot(self) -> bool:
        """Whether prefixes were lost since last asked, by a switch or for want of room."""
        return True


class HostedModel(PlainModel):
    """KV with a second home on the host: prefixes and running calls outlive a switch.

    Args:
        store: the host's, shared by all models.
        pools: this model's.
        scheduler: its scheduler, with a `tree.CheckpointTree`.
        suspends: whether running calls keep their rows over a switch; else they are retracted.
        ranks: all that run this model.
    """

    keeps_prefixes = True

    def __init__(self, store: HostKv, pools: Pools, scheduler: SlotScheduler, *, suspends: bool, ranks: Ranks) -> None:
        super().__init__(scheduler)
        tree, allocator = scheduler.tree_cache, scheduler.token_to_kv_pool_allocator
        self._store, self._pools, self._suspends = store, pools, suspends
        self._saver = Saver(store, pools, tree, SPARE_STATES)
        self._restorer = Restorer(store, pools, self._saver, scheduler, ranks)
        self._suspension = Suspension(store, pools, tree, allocator, slots=scheduler.state_slots, ranks=ranks)
        self._restored_tokens, self._restore_ms = 0, 0.0
        tree.on_checkpoint = self._saver.checkpoint

    @property
    def host_tokens(self) -> int:
        """Tokens of its complete blocks on the host."""
        return self._store.registry.tokens(self._pools.kv.descriptor.model)

    @property
    def restore_ms_per_token(self) -> float:  # type: ignore[override]  # measured here
        """Measured, EWMA; 0 while nothing was."""
        return self._store.restore_ms_per_token(self._pools.kv.descriptor.model)

    # --- calls

    def came(self, request: Any) -> None:
        """A request was queued."""
        self._saver.watch(request.rid, request.cache_salt or "")
        self._restorer.refer(request)

    def left(self, request: Any) -> None:
        """A request is over; when it was the last one that a suspension was kept for, that is over, too."""
        self._saver.forget(request.rid)
        self._restorer.left(request.rid)
        if self._suspension.active and not self._scheduler.inflight():
            self._suspension.forget()

    def prefix_state(self, request: Any, *, active: bool) -> PrefixState:
        """See the engine contract."""
        device = self._scheduler.cached_tokens(request) if active else 0
        return PrefixState(device, max(0, self._restorer.on_host(request) - device))

    def from_host(self, rid: str, start: int) -> bool:
        """See `Restorer.from_host`."""
        return self._restorer.from_host(rid, start)

    # --- a slot

    def step(self, admit: frozenset[str] | None) -> Ran:
        """A step of the scheduler; calls whose prefix is on its way are admitted once it is there.

        Others run meanwhile. With nothing else to run the step waits for what is coming; if that does not help, what we
        hold may be in the way, and goes.
        """
        self._store.poll()
        # Rows that come for nobody would be a leak to SGLang, which looks for them when it has nothing to do.
        self._publish(wait=not self._scheduler.queued() and not self._scheduler.inflight())
        self._make_room()
        ran = self._ran(self._ready(admit))
        if ran.kind == "idle" and self._in_the_way(admit):
            self._finish_copies()
            ran = self._ran(self._ready(admit))
            if ran.kind == "idle" and self._in_the_way(admit):
                self.settle()
                ran = self._ran(admit)
        return ran

    def _ran(self, admit: frozenset[str] | None) -> Ran:
        ran = self._scheduler.step(admit)
        for request in ran.requests:
            self._restorer.admitted(request.rid)
        return ran

    def _ready(self, admit: frozenset[str] | None) -> frozenset[str] | None:
        """`admit` without those who must wait; as many restores are started as could be admitted."""
        queue = self._scheduler.waiting_queue
        if not queue or (admit is not None and not admit):
            return admit
        places = max(self._scheduler.max_running_requests - len(self._scheduler.inflight()), 0)
        wanted = [request for request in queue if admit is None or request.rid in admit][:places]
        taken = self._states_taken(wanted)
        wanted = wanted[: max(places - taken, 0)]
        started = time.perf_counter()
        coming = self._restorer.prepare(wanted)
        self._restore_ms += (time.perf_counter() - started) * 1e3
        if not coming and not taken:
            return admit
        half = self._scheduler.chunked_req
        ready = {request.rid for request in wanted} - coming
        return frozenset(ready if half is None else ready | {half.rid})

    def _states_taken(self, wanted: list[Any]) -> int:
        """For how many calls a hybrid lacks states because prefixes are on their way for others than `wanted`.

        SGLang has states for as many calls as may run, and does not ask before it takes one. A prefix on its way has
        one, and locks another; one that is merely held for a call that is not wanted now goes.
        """
        if not self._scheduler.states:
            return 0
        rids = {request.rid for request in wanted}
        self._restorer.release(keep=rids)
        return self._restorer.coming_for_others(rids)

    def _in_the_way(self, admit: frozenset[str] | None) -> bool:
        waits = any(admit is None or request.rid in admit for request in self._scheduler.queued())
        return waits and (self._restorer.busy or self._store.saving > 0)

    def _make_room(self) -> None:
        """Locks of ours must not take what calls under way need next: without room for it, they go."""
        if self._scheduler.spare_tokens < 0 or self._scheduler.spare_states < 0:
            self.settle()

    def _finish_copies(self) -> None:
        self._store.drain()
        self._publish(wait=True)

    def _publish(self, *, wait: bool = False) -> None:
        started = time.perf_counter()
        self._restored_tokens += self._restorer.publish(wait=wait)
        self._restore_ms += (time.perf_counter() - started) * 1e3

    def take_restored(self) -> tuple[int, float]:
        """See `PlainModel`. What was copied while others ran costs no time of a step."""
        taken = self._restored_tokens, self._restore_ms
        self._restored_tokens, self._restore_ms = 0, 0.0
        return taken

    def settle(self) -> None:
        """Wait for every copy, and let every lock go; restored prefixes stay in the tree."""
        self._finish_copies()
        self._restorer.release()

    # --- the ends of a slot

    def leave(self) -> tuple[int, int]:
        """The barrier: every copy to the host ends before the device rows go. Then what runs is suspended."""
        self.settle()
        holding = sum(bool(request.kv.holds_kv) for request in self._scheduler.inflight())
        if holding and self._suspends and self._suspension.suspend():
            return holding, 0
        return 0, self._scheduler.retract_all()

    def enter(self) -> int:
        """Bring the suspended rows back. Damaged ones are computed again."""
        return 0 if self._suspension.resume() else self._scheduler.retract_all()

    def take_forgot(self) -> bool:
        """Whether blocks found no room on the host since last asked."""
        forgot, self._saver.forgot = self._saver.forgot, False
        return forgot


def residence(
    store: HostKv | None, name: str, spec: ModelSpec, scheduler: SlotScheduler, *, suspends: bool, ranks: Ranks
) -> PlainModel:
    """The model's, with `store` if there is one. Reads the model's files once for its identity."""
    if store is None:
        return PlainModel(scheduler)
    pool = scheduler.model_runner.token_to_kv_pool
    pools = device_pools(name, spec, pool, page_tokens=scheduler.page_size, slab_bytes=store.slab_bytes, ranks=ranks)
    return HostedModel(store, pools, scheduler, suspends=suspends, ranks=ranks)
