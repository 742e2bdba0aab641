"""What has become of each chunk: missing, being written, clean or dirty. Pure; whoever shares it holds a lock."""

from __future__ import annotations

from enum import IntEnum

from talaria_gpu.staging.plan import StagePlan, SwitchPlan, switch_plan


class State(IntEnum):
    """Of one chunk."""

    MISSING = 0
    WRITING = 1
    CLEAN = 2
    DIRTY = 3


class ChunkMap:
    """The bitmap of one staging. Chunks are written from the highest page down: low pages are wanted back first."""

    def __init__(self, plan: StagePlan) -> None:
        self.plan = plan
        self.states = [State.MISSING] * len(plan.chunks)
        self._order = sorted(range(len(plan.chunks)), key=lambda i: (-plan.chunks[i].page, plan.chunks[i].source))
        self._next = 0
        self._low = len(self._order)
        """Chunks from here on in the order lie in pages that calls have taken."""
        self._writing: set[int] = set()
        self._floor = 0
        self._stopped = False

    def begin(self) -> int | None:
        """The next chunk to write, which is WRITING from now on; None: there is none left to write."""
        while self._next < len(self._order) and not self._stopped:
            index = self._order[self._next]
            self._next += 1
            if self.plan.chunks[index].page >= self._floor:
                self.states[index] = State.WRITING
                self._writing.add(index)
                return index
        return None

    def written(self, index: int) -> None:
        """The chunk's copy has completed."""
        if self.states[index] is not State.WRITING:
            raise RuntimeError(f"chunk {index} was not being written")
        self._writing.discard(index)
        self.states[index] = State.CLEAN

    def failed(self, index: int) -> None:
        """The chunk's copy did not complete: as if it had never been begun."""
        self._writing.discard(index)
        self.states[index] = State.MISSING

    @property
    def is_writing(self) -> bool:
        """Whether any chunk is being written."""
        return bool(self._writing)

    @property
    def is_complete(self) -> bool:
        """Whether there is nothing left to write, and nothing being written."""
        return not self._writing and (self._stopped or self._next >= min(self._low, len(self._order)))

    def is_writing_below(self, page: int) -> bool:
        """Whether a chunk that touches a page below `page` is being written: its pages must not be taken yet."""
        return any(self.plan.chunks[index].page < page for index in self._writing)

    def bar(self, page: int) -> None:
        """Begin no chunk that touches a page below `page`."""
        self._floor = max(self._floor, page)

    def reclaim(self, page: int) -> int:
        """Calls take pages below `page`: what is staged there is dirty and nothing more is written. Bytes dirtied."""
        if self.is_writing_below(page):
            raise RuntimeError("pages were taken while a chunk is being written there")
        self.bar(page)
        lost = 0
        while self._low and self.plan.chunks[self._order[self._low - 1]].page < page:
            self._low -= 1
            index = self._order[self._low]
            if self.states[index] is State.CLEAN:
                self.states[index] = State.DIRTY
                lost += self.plan.chunks[index].size
        return lost

    def stop(self) -> None:
        """Begin no more chunks."""
        self._stopped = True

    def bytes_in(self, state: State) -> int:
        """Bytes of the chunks in `state`; bytes without a chunk are counted as missing."""
        found = sum(c.size for c, s in zip(self.plan.chunks, self.states, strict=True) if s is state)
        return found + (self.plan.weight_bytes - self.plan.covered_bytes if state is State.MISSING else 0)

    def switch_plan(self, chunk_bytes: int) -> SwitchPlan:
        """The copies of a switch to what is staged here. Nothing may be in flight."""
        if self._writing:
            raise RuntimeError("a chunk is still being written")
        return switch_plan(
            self.plan,
            [state is State.CLEAN for state in self.states],
            [state is State.DIRTY for state in self.states],
            chunk_bytes=chunk_bytes,
        )
