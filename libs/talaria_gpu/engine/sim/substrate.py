"""What a simulated device keeps over a switch: KV on the host, staged weights, and the switch's five phases (3.5, 4.4).

The counterpart of `engine.sglang.hosted` and `.switching`: the same order of the same steps, on modelled links.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from talaria_gpu.engine.contract import Staged, SwitchTiming
from talaria_gpu.engine.sim.device import Device, ModelSpec, Substrate
from talaria_gpu.engine.sim.host import STREAM as KV
from talaria_gpu.engine.sim.host import SimHost
from talaria_gpu.engine.sim.links import Link
from talaria_gpu.engine.sim.pool import Share, SimCall, SimPool
from talaria_gpu.engine.sim.prefix import Node, depth
from talaria_gpu.engine.sim.staging import STREAM as WEIGHTS
from talaria_gpu.engine.sim.staging import Staging, unstaged


class SimSubstrate:
    """See the module. Args: as `of`."""

    def __init__(  # noqa: PLR0917 - one caller, and all of it is needed
        self,
        device: Device,
        figures: Substrate,
        specs: Mapping[str, ModelSpec],
        pools: Mapping[str, SimPool],
        page_tokens: int,
        now: float,
    ) -> None:
        self._device, self._figures, self._specs, self._pools = device, figures, specs, pools
        self._h2d = Link(figures.h2d_bytes_per_s, now, KV, WEIGHTS)
        own = figures.kv_bytes_per_s
        kv = self._h2d if own is None else Link(own, now, KV)
        self.host = SimHost(figures, specs, pools, page_tokens, kv, now) if figures.hkvr else None
        """None: a switch forgets all KV."""
        self.staging: Staging | None = None
        """The staging under way."""
        self.brought_bytes = 0
        """Of the weights of the latest switch, those whose copies had landed: by count, not by the bitmap."""

    @classmethod
    def of(
        cls,
        device: Device,
        specs: Mapping[str, ModelSpec],
        pools: Mapping[str, SimPool],
        page_tokens: int,
        now: float,
    ) -> SimSubstrate | None:
        """That of `device`, for its models; None where it has none."""
        figures = device.substrate
        return None if figures is None else cls(device, figures, specs, pools, page_tokens, now)

    @property
    def buffer_bytes(self) -> int:
        """Of the device buffer."""
        return self._figures.buffer_bytes

    def used_bytes(self, active: str) -> int:
        """Of the buffer: weights, recurrent state's reserve, KV in use, and what is staged."""
        spec = self._specs[active]
        staged = self.staging.staged_bytes if self.staging is not None else 0
        return spec.taken_bytes + self._pools[active].used * spec.kv_bytes_per_token + staged

    # --- calls

    def came(self, model: str, call: SimCall, now: float) -> None:
        """A call was queued."""
        if self.host is not None:
            self.host.poll(now)
            self.host.came(model, call)

    def left(self, model: str, call: SimCall) -> None:
        """A call is over; the pool has forgotten it."""
        if self.host is not None:
            self.host.left(model, call)

    def admitted(self, model: str, shares: Sequence[Share]) -> None:
        """A prefill of these begins, or goes on."""
        for call, part in shares:
            if part.cached and call.cached and call.source == "none":
                host = self.host is not None and self.host.from_host(model, call, part.cached)
                call.source = "host" if host else "device"

    def checkpoint(self, model: str, call: SimCall, node: Node, now: float) -> None:
        """The call's tokens up to `node` are in the device's cache."""
        if self.host is not None:
            self.host.checkpoint(model, call, node, depth(node), now)

    # --- steps

    def ready(self, model: str, admit: frozenset[str] | None, now: float) -> frozenset[str] | None:
        """`admit` without those whose prefix is on its way; as many restores are started as could be admitted."""
        host, pool = self.host, self._pools[model]
        self._h2d.advance(now)
        if host is None:
            return admit
        host.poll(now)
        if pool.running and pool.available < len(pool.running) + 1:
            pool.release()  # locks for calls to come must not make others be retracted
        if not pool.waiting or (admit is not None and not admit):
            return admit
        wanted = [call for rid, call in pool.waiting.items() if admit is None or rid in admit][: pool.places]
        coming = host.prepare(model, wanted, now)
        if not coming:
            return admit
        ready = {call.call.rid for call in wanted} - coming
        return frozenset(ready if pool.half is None else ready | {pool.half.call.rid})

    def in_the_way(self, model: str, admit: frozenset[str] | None) -> bool:
        """Whether calls wait and copies, or locks for calls to come, may be why."""
        pool = self._pools[model]
        if self.host is None or not any(admit is None or rid in admit for rid in pool.waiting):
            return False
        return self.host.busy(model)

    def all_over(self) -> float:
        """When all KV copies under way are over; -inf: none is."""
        return -math.inf if self.host is None else self.host.all_over()

    def most_steps(self, model: str, admit: frozenset[str] | None, batch: int) -> int:
        """Decode iterations until a prefix may arrive, one may be asked for, or staged chunks are lost."""
        host, waiting = self.host, self._pools[model].waiting
        if host is not None:
            # Calls that could start but for room: each row that others take may cost them their prefix.
            refused = any(admit is None or rid in admit for rid in waiting)
            if refused or host.is_restoring(model) or (host.saving and waiting):
                return 1
        if self.staging is None:
            return 1 << 62
        return 1 + self.staging.spared_tokens(self._pools[model].used) // batch

    def take_restored(self) -> int:
        """Tokens restored since last asked."""
        return 0 if self.host is None else self.host.take_restored()

    def taken(self, model: str, now: float) -> None:
        """Rows were taken: what is staged there is lost."""
        if self.staging is not None:
            self._h2d.advance(now)
            self.staging.taken(self._pools[model].used, now)

    # --- weights

    def stage(self, active: str, model: str, now: float) -> None:
        """Begin to stage `model`, unless that is under way."""
        if not self._figures.staging or model == active:
            return
        if self.staging is not None and self.staging.model == model:
            return
        self._h2d.advance(now)
        if self.staging is not None:
            self.staging.cancel()
        source, target = self._specs[active], self._specs[model]
        staging = Staging(model, self._figures, source, target, self._pools[active].used, self._h2d, now)
        self.staging = None if staging.empty else staging

    @property
    def staged(self) -> Staged:
        """What lies staged now."""
        return Staged() if self.staging is None else Staged(self.staging.model, self.staging.staged_bytes)

    def closed(self, model: str, now: float) -> None:
        """The model is closed: nobody will want its weights."""
        if self.staging is not None and self.staging.model == model:
            self._h2d.advance(now)
            self.staging.cancel()
            self.staging = None

    def slack_bytes(self, active: str) -> int:
        """Bytes that weights could be staged in now; 0 where nothing is staged."""
        if not self._figures.staging:
            return 0
        spec, pool = self._specs[active], self._pools[active]
        return self.buffer_bytes - spec.kv_end_bytes + pool.available * spec.kv_bytes_per_token

    # --- a switch

    def leave(self, model: str, now: float) -> tuple[int, int, float]:
        """The slot is over: (calls suspended, calls retracted, ms until the device rows are free)."""
        pool, took_ms, suspended = self._pools[model], 0.0, 0
        if self.host is not None:
            took_ms = max(0.0, self.settle() - now) * 1000
            if pool.holding and (park_ms := self.host.park(model)) is not None:
                suspended, took_ms = pool.holding, took_ms + park_ms
        retracted = 0 if suspended else pool.deactivate(keep_sessions=self.host is not None)
        if self.host is None or self.host.take_forgot(model):
            pool.epoch += 1
        return suspended, retracted, took_ms

    def switch(self, source: str | None, target: str, now: float) -> SwitchTiming:
        """The five phases of appendix D."""
        self._h2d.advance(now)
        staging, self.staging = self.staging, None
        suspended, retracted, leave_ms = 0, 0, 0.0
        landed = staging.stop() if staging is not None else -math.inf
        if source is not None:
            suspended, retracted, leave_ms = self.leave(source, now)
        spec = self._specs[target]
        if staging is None or staging.model != target:
            plan, self.brought_bytes = unstaged(spec), 0
        else:
            plan, self.brought_bytes = staging.switch_plan(), staging.staged_bytes
        p1, p2, p3, p4, p5 = self._device.switch_ms(source, target, plan.d2d_bytes)
        p1 += leave_ms
        wait_ms = max(0.0, (landed - now) * 1000 - p1)  # for the last chunk
        if self.host is not None:
            p5 += self.host.unpark(target)
        phases = (p1, p2 + wait_ms, p3, p4, p5)
        return SwitchTiming(
            source=source or "",
            target=target,
            path=plan.path,
            phases_ms=phases,
            total_ms=sum(phases),
            weight_bytes=spec.weight_bytes,
            d2d_bytes=plan.d2d_bytes,
            h2d_bytes=plan.h2d_bytes,
            dirty_bytes=plan.dirty_bytes,
            missing_bytes=plan.missing_bytes,
            suspended=suspended,
            retracted=retracted,
        )

    def settle(self) -> float:
        """Finish every KV copy, and let every lock go; returns when that is, or -inf."""
        if self.host is None:
            return -math.inf
        last = self.host.settle()
        for pool in self._pools.values():
            pool.release()
        return last

    def check(self) -> str:
        """What is wrong ("" if nothing) when no call is unfinished."""
        return "" if self.host is None else self.host.check()
