"""Staging in the sim engine: the production plan and bitmap, on a modelled link (4.4).

Rows are counted here, not placed: calls are taken to hold the lowest pages, as a low-first allocator keeps them, and
staging has the rest. One segment stands for all KV tensors of all ranks; a chunk of it stands for one chunk in each, so
that calls dirty as large a share of the weights as they would on a device.
"""

from __future__ import annotations

from functools import lru_cache

from talaria_gpu.engine.sim.device import ModelSpec, Substrate
from talaria_gpu.engine.sim.links import Link, Transfer
from talaria_gpu.staging.chunks import ChunkMap, State
from talaria_gpu.staging.plan import Segment, StagePlan, SwitchPlan, stage_plan, switch_plan

PAGE_TOKENS = 1024
"""Rows are lent and taken back by so many: finer pages cost time and change little."""
MOST_CHUNKS = 128
"""Nor is a staging cut into more chunks than about this."""
STREAM = "weights"


class Staging:
    """One staging of one model, from its start to the switch.

    Args:
        source: the active model.
        target: the next one, and its name.
        used_tokens: rows that calls and prefixes hold now.
        link: host to device.
        now: seconds.
    """

    def __init__(  # noqa: PLR0917 - one caller, and all of it is needed
        self,
        name: str,
        substrate: Substrate,
        source: ModelSpec,
        target: ModelSpec,
        used_tokens: int,
        link: Link,
        now: float,
    ) -> None:
        self.model = name
        self.chunk_bytes = _chunk_bytes(substrate, source, target.weight_bytes)
        self.chunks = ChunkMap(_plan(substrate, source, target.weight_bytes, -(-used_tokens // PAGE_TOKENS)))
        self._link = link
        self._flying: tuple[int, Transfer] | None = None
        self._low = 0
        self.staged_bytes = 0
        """Of clean chunks."""
        self._left = float(self.chunks.plan.covered_bytes)
        link.backlog[STREAM] = lambda: self._left
        self._begin(now)

    @property
    def empty(self) -> bool:
        """Whether there was no room at all."""
        return not self.chunks.plan.chunks

    def spared_tokens(self, used_tokens: int) -> int:
        """Rows that calls may take before `taken` matters."""
        return max(self._low, -(-used_tokens // PAGE_TOKENS)) * PAGE_TOKENS - used_tokens

    def taken(self, used_tokens: int, now: float) -> None:
        """Calls hold so many rows now: what is staged among them is dirty, for good."""
        page = -(-used_tokens // PAGE_TOKENS)
        if page <= self._low:
            return
        self._low = page
        self.chunks.bar(page)
        if self.chunks.is_writing_below(page):
            self._break_off()
            self._begin(now)
        self.staged_bytes -= self.chunks.reclaim(page)
        pairs = zip(self.chunks.plan.chunks, self.chunks.states, strict=True)
        self._left = float(sum(c.size for c, state in pairs if state is State.MISSING and c.page >= page))

    def cancel(self) -> None:
        """Give it up."""
        self.chunks.stop()
        self._left = 0.0
        self._break_off()

    def stop(self) -> float:
        """Begin no more chunks, and let the one in flight land; returns when that is, or -inf."""
        self.chunks.stop()
        self._left = 0.0
        return self._link.finish(STREAM)

    def switch_plan(self) -> SwitchPlan:
        """The copies of a switch to this model; after `stop`."""
        return self.chunks.switch_plan(self.chunk_bytes)

    def _begin(self, now: float) -> None:
        index = self.chunks.begin()
        if index is None:
            self._left = 0.0
            return
        size = self.chunks.plan.chunks[index].size
        self._left -= size
        self._flying = (index, self._link.put(STREAM, size, now, self._written))

    def _break_off(self) -> None:
        if self._flying is not None:
            index, transfer = self._flying
            self._link.cancel(STREAM, transfer)
            self.chunks.failed(index)
            self._flying = None

    def _written(self, now: float) -> None:
        assert self._flying is not None
        self.chunks.written(self._flying[0])
        self.staged_bytes += self._flying[1].size
        self._flying = None
        self._begin(now)


def unstaged(target: ModelSpec) -> SwitchPlan:
    """A switch of which nothing was staged."""
    return switch_plan(StagePlan(target.weight_bytes, (), ()), (), (), chunk_bytes=target.weight_bytes)


@lru_cache(maxsize=4096)
def _plan(substrate: Substrate, source: ModelSpec, weight_bytes: int, first_free: int) -> StagePlan:
    page_bytes = source.kv_bytes_per_token * PAGE_TOKENS
    return stage_plan(
        weight_bytes,
        [Segment(source.taken_bytes, page_bytes)],
        range(first_free, source.kv_capacity_tokens // PAGE_TOKENS),  # rows of a last page that is not whole stay KV
        (source.kv_end_bytes, substrate.buffer_bytes),
        chunk_bytes=_chunk_bytes(substrate, source, weight_bytes),
    )


def _chunk_bytes(substrate: Substrate, source: ModelSpec, weight_bytes: int) -> int:
    return max(substrate.chunk_bytes * source.kv_segments, weight_bytes // MOST_CHUNKS)
