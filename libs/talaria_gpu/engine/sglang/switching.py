"""Staging and the five phases of a switch (4.4, appendix D), over the layout, the weight store and the copy streams."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from talaria_common.errors import EngineError
from talaria_gpu.engine.contract import SwitchFailedError, SwitchTiming
from talaria_gpu.engine.sglang import canary, checks
from talaria_gpu.engine.sglang.opening import OpenModel
from talaria_gpu.engine.sglang.spec import MemoryOptions
from talaria_gpu.hkvr.agreement import Ranks
from talaria_gpu.staging.gather import GatherTimes, gather
from talaria_gpu.staging.plan import StagePlan, SwitchPlan, stage_plan, switch_plan
from talaria_gpu.staging.stager import Stager
from talaria_gpu.streams import computed, open_stream
from talaria_gpu.weights.store import WeightStore

LEAST_STRETCH_BYTES = 64 << 10
"""Shorter stretches of idle KV are not worth a copy."""
NO_ROOM_S = 0.2
"""Before it is looked again for room that was not there: looking waits for the device."""


@dataclass(frozen=True, slots=True)
class _Staging:
    """A staging under way: while it lives, the target's image is pinned and the source's pages are lent."""

    source: OpenModel
    target: OpenModel
    stager: Stager


class Switcher:
    """The device buffer's content: which model's weights are there, and which are on their way.

    Args:
        buffer: the device buffer, uint8.
        options: see `MemoryOptions`.
        poison: overwrite all but the weights with garbage at every switch, and KV pages when they are freed, so that
            reading stale bytes shows.
        ranks: that switch together.
    """

    def __init__(self, buffer: torch.Tensor, options: MemoryOptions, *, poison: bool, ranks: Ranks) -> None:
        self._buffer, self._options, self._poison, self._ranks = buffer, options, poison, ranks
        self._device = buffer.device
        self.store = WeightStore(options.host_weights_bytes, options.weights_dir, pin=self._device.type == "cuda")
        self._d2d = open_stream(self._device, "weights-d2d", options.d2d_bytes_per_s)
        self._h2d = open_stream(self._device, "weights-h2d", options.h2d_bytes_per_s)
        self._bounce = torch.empty(options.chunk_bytes, dtype=torch.uint8, device=self._device)
        self._staging: _Staging | None = None
        self._pinned: str | None = None
        """The model whose image is pinned because it is in the buffer: a failed switch must find the way back."""
        self._switches = 0
        self._no_room_until = 0.0

    # --- staging

    @property
    def stager(self) -> Stager | None:
        """The staging under way."""
        return self._staging.stager if self._staging else None

    def stage(self, source: OpenModel, target: OpenModel) -> None:
        """Begin to stage `target` while `source` is active, unless that is under way or its image is not there yet."""
        if not self._options.staging or source is target:
            return
        if self._staging is not None:
            if self._staging.target is target:
                return
            self.cancel()
        there = time.perf_counter() >= self._no_room_until and self.store.prefetch(target.info.name)
        if not self._ranks.least([int(there)])[0]:
            return
        allocator = source.scheduler.token_to_kv_pool_allocator
        plan = stage_plan(
            target.region.weight_bytes,
            source.region.segments,
            allocator.unleased_pages(),
            source.region.gap,
            chunk_bytes=self._options.chunk_bytes,
            least_bytes=LEAST_STRETCH_BYTES,
        )
        if not plan.chunks:
            self._no_room_until = time.perf_counter() + NO_ROOM_S
            return
        stager = Stager(
            target.info.name,
            plan,
            self._h2d,
            buffer=self._buffer,
            image=self.store.acquire(target.info.name),
            ready=computed(self._device),
        )
        allocator.lease(plan.pages, stager.reclaim)
        stager.start()
        self._staging = _Staging(source, target, stager)

    def slack_bytes(self, source: OpenModel) -> int:
        """Bytes that weights could be staged in now: the gap, and KV that nothing holds."""
        if not self._options.staging:
            return 0
        low, high = source.region.gap
        return int(
            high - low + source.scheduler.token_to_kv_pool_allocator.available_size() * source.info.kv_bytes_per_token
        )

    def cancel(self) -> None:
        """End the staging under way and forget what it staged."""
        if self._staging is not None:
            self._halt()
            self._close(self._staging)

    def _halt(self) -> None:
        """Begin no more chunks, and take the lent pages back: nobody allocates until the switch is over."""
        if self._staging is not None:
            self._staging.stager.stop()
            self._staging.source.scheduler.token_to_kv_pool_allocator.end_lease()

    def _close(self, staging: _Staging) -> None:
        staging.stager.join()
        self.store.release(staging.target.info.name)
        self._staging = None

    # --- the switch

    def switch(
        self,
        source: OpenModel | None,
        target: OpenModel,
        leave: Callable[[OpenModel], int],
        enter: Callable[[OpenModel], None],
    ) -> SwitchTiming:
        """The one door through which a model becomes active.

        Args:
            source: the active model.
            target: another one.
            leave: takes the source's calls and prefixes off the device; returns how many calls were decoding.
            enter: puts the target's calls back; last, when everything else has been checked.

        Raises:
            SwitchFailedError: the target's weights could not be brought in; the source is active again.
            EngineError: the engine must not be used any more.
        """
        clock = _Phases(self._device)
        self._halt()
        retracted = leave(source) if source is not None else 0
        self._poison_freed(source, False)
        clock.mark()
        opened = self._try_weights(target)
        if isinstance(opened, EngineError):
            self._roll_back(source, target, opened, enter)
            raise SwitchFailedError(target.info.name, source.info.name if source else None, str(opened)) from opened
        plan, times = opened
        clock.mark()
        if self._poison:
            target.region.poison()
        self._poison_freed(target, True)
        target.region.open_kv()
        clock.mark()
        target.unbound.enter()
        # Graphs and backends hold these addresses: equal, they stay valid.
        checks.check_at_home(target.info.name, target.region)
        self._switches += 1
        watched = bool(target.golden) and self._switches % self._options.canary_every == 0
        watched = watched and canary.has_room(target)
        if watched:
            canary.check(target)
        clock.mark()
        enter(target)
        clock.mark()
        phases = clock.phases()
        return SwitchTiming(
            rank=self._ranks.rank,
            source=source.info.name if source else "",
            target=target.info.name,
            path=plan.path,
            phases_ms=phases,
            total_ms=sum(phases),
            weight_bytes=target.region.weight_bytes,
            d2d_bytes=plan.d2d_bytes,
            h2d_bytes=plan.h2d_bytes,
            dirty_bytes=plan.dirty_bytes,
            missing_bytes=plan.missing_bytes,
            d2d_ms=times.d2d_ms,
            h2d_ms=times.h2d_ms,
            retracted=retracted,
            canary=watched,
        )

    def _try_weights(self, target: OpenModel) -> tuple[SwitchPlan, GatherTimes] | EngineError:
        """What was done, when all ranks have done it; else why not, and then all go back."""
        outcome: tuple[SwitchPlan, GatherTimes] | EngineError
        try:
            outcome = self._open_weights(target)
        except EngineError as e:
            outcome = e
        failed = isinstance(outcome, EngineError)
        if not self._ranks.least([int(not failed)])[0] and not failed:
            return EngineError(f"another rank could not bring the weights of {target.info.name} in")
        return outcome

    def _open_weights(self, target: OpenModel) -> tuple[SwitchPlan, GatherTimes]:
        """Bring the weights in, gathered as far as they are staged, the rest from host; pins the image."""
        staging, chunk_bytes = self._staging, self._options.chunk_bytes
        plan = switch_plan(StagePlan(target.region.weight_bytes, (), ()), (), (), chunk_bytes=chunk_bytes)
        if staging is not None:
            staging.stager.join()
            if staging.target is target:
                plan = staging.stager.switch_plan(chunk_bytes)
            else:
                self._close(staging)
        image = self.store.acquire(target.info.name)
        try:
            times = gather(plan, buffer=self._buffer, image=image, bounce=self._bounce, d2d=self._d2d, h2d=self._h2d)
        except EngineError:
            self.store.release(target.info.name)
            raise
        if self._staging is not None:
            self._close(self._staging)
        self.opened(target.info.name)
        return plan, times

    def _poison_freed(self, model: OpenModel | None, active: bool) -> None:
        """While a model is active, and no longer: a call that is dropped later frees rows in bytes of another's."""
        if self._poison and model is not None:
            on_free = model.region.poison_pages if active else None
            model.scheduler.token_to_kv_pool_allocator.on_free = on_free

    def opened(self, name: str | None) -> None:
        """The buffer holds the weights of `name`, whose image is pinned by the caller."""
        if self._pinned is not None:
            self.store.release(self._pinned)
        self._pinned = name

    def _roll_back(
        self, source: OpenModel | None, target: OpenModel, cause: EngineError, enter: Callable[[OpenModel], None]
    ) -> None:
        if self._staging is not None:
            self._close(self._staging)
        if source is None:
            return
        try:
            self._open_weights(source)
            self._poison_freed(source, True)
            source.region.open_kv()
            source.unbound.enter()
            checks.check_at_home(source.info.name, source.region)
            enter(source)
        except EngineError as e:
            raise EngineError(
                f"the switch to {target.info.name} failed ({cause}), and so did the way back to {source.info.name}: {e}"
            ) from e

    def close(self) -> None:
        """Stop staging, then release streams and images."""
        self.cancel()
        self._d2d.close()
        self._h2d.close()
        self.store.close()


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
