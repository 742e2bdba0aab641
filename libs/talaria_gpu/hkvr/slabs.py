"""One pool of bytes for blocks of any size: cut into slabs, and a slab into equal cells (4.3).

A slab belongs to one cell size while any of its cells is taken and returns to the pool when none is, so no model and no
family owns a share. What would be lost to half-empty slabs of another size is won back by compaction: the few cells of
the emptiest slab move into gaps of their size.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from typing import NamedTuple


class Cell(NamedTuple):
    """A place in the pool, in bytes."""

    offset: int
    size: int


class Move(NamedTuple):
    """The bytes of one cell are to be copied to another."""

    source: Cell
    target: Cell


class _Slab:
    __slots__ = ("free", "index", "size", "taken")

    def __init__(self, index: int, size: int, cells: int) -> None:
        self.index, self.size = index, size
        self.free = list(range(cells))  # a heap: low cells first, so that blocks taken together lie together
        self.taken: set[int] = set()


class SlabPool:
    """Bookkeeping only; whoever has the bytes copies them.

    Args:
        capacity_bytes: of the pool; what is left over after whole slabs is not used.
        slab_bytes: the largest cell there can be.
    """

    def __init__(self, capacity_bytes: int, slab_bytes: int) -> None:
        if not 0 < slab_bytes <= capacity_bytes:
            raise ValueError(f"slabs of {slab_bytes} B do not fit a pool of {capacity_bytes} B")
        self.slab_bytes = slab_bytes
        self.slabs = capacity_bytes // slab_bytes
        self._unused = list(range(self.slabs))
        self._used: dict[int, _Slab] = {}
        self._gaps: dict[int, dict[int, _Slab]] = {}
        """Slabs with free cells, by cell size and index."""
        self._free_cells: dict[int, int] = {}
        self.taken_bytes = 0

    @property
    def free_slabs(self) -> int:
        """Slabs that belong to no size."""
        return len(self._unused)

    def cells_per_slab(self, size: int) -> int:
        """How many cells of `size` a slab holds; 0: it is too large."""
        return self.slab_bytes // size

    def take(self, size: int) -> Cell | None:
        """A cell of `size` bytes; None: none is free and no slab is."""
        gaps = self._gaps.setdefault(size, {})
        if not gaps:
            if not self._unused or not self.cells_per_slab(size):
                return None
            slab = _Slab(heapq.heappop(self._unused), size, self.cells_per_slab(size))
            self._used[slab.index] = gaps[slab.index] = slab
            self._free_cells[size] = self._free_cells.get(size, 0) + len(slab.free)
        slab = next(iter(gaps.values()))
        return self._take_from(slab)

    def give(self, cell: Cell) -> None:
        """Return a cell. Raises ValueError: it is not taken."""
        slab = self._used.get(cell.offset // self.slab_bytes)
        inside, rest = divmod(cell.offset % self.slab_bytes, cell.size)
        if slab is None or slab.size != cell.size or rest or inside not in slab.taken:
            raise ValueError(f"{cell} is not taken")
        slab.taken.remove(inside)
        heapq.heappush(slab.free, inside)
        self._gaps[cell.size][slab.index] = slab
        self._free_cells[cell.size] += 1
        self.taken_bytes -= cell.size
        if not slab.taken:
            self._retire(slab)

    def compact(self, fixed: Callable[[Cell], bool]) -> list[Move]:
        """Empty one slab by moving its cells into other slabs' gaps; [] where no slab can be freed so.

        The slab is free when this returns: carry the moves out, in order, before using it.

        Args:
            fixed: whether a cell must stay where it is.
        """
        for size, free in self._free_cells.items():
            if free < self.cells_per_slab(size):
                continue
            for slab in self._emptiest_first(size):
                if len(slab.taken) > free - len(slab.free):
                    break
                cells = [Cell(slab.index * self.slab_bytes + inside * size, size) for inside in sorted(slab.taken)]
                if not any(fixed(cell) for cell in cells):
                    return self._empty(slab, cells)
        return []

    def _emptiest_first(self, size: int) -> Iterator[_Slab]:
        """The slabs of a size. Full ones last, and looked for only then: there may be many."""
        yield from sorted(self._gaps[size].values(), key=lambda s: len(s.taken))
        yield from [slab for slab in self._used.values() if slab.size == size and not slab.free]

    def _empty(self, slab: _Slab, cells: list[Cell]) -> list[Move]:
        gaps = self._gaps[slab.size]
        gaps.pop(slab.index, None)
        moves = [Move(cell, self._take_from(next(iter(gaps.values())))) for cell in cells]
        for cell in cells:
            self.give(cell)
        return moves

    def _take_from(self, slab: _Slab) -> Cell:
        inside = heapq.heappop(slab.free)
        slab.taken.add(inside)
        self._free_cells[slab.size] -= 1
        self.taken_bytes += slab.size
        if not slab.free:
            del self._gaps[slab.size][slab.index]
        return Cell(slab.index * self.slab_bytes + inside * slab.size, slab.size)

    def _retire(self, slab: _Slab) -> None:
        del self._used[slab.index]
        del self._gaps[slab.size][slab.index]
        self._free_cells[slab.size] -= len(slab.free)
        heapq.heappush(self._unused, slab.index)

    def check(self) -> str:
        """What is wrong with the books; "" if nothing."""
        if len(self._unused) + len(self._used) != self.slabs or set(self._unused) & set(self._used):
            return f"{len(self._unused)} unused + {len(self._used)} used slabs, of {self.slabs}"
        for slab in self._used.values():
            cells = self.cells_per_slab(slab.size)
            if len(slab.free) + len(slab.taken) != cells or set(slab.free) & slab.taken or not slab.taken:
                return f"slab {slab.index}: {len(slab.free)} free + {len(slab.taken)} taken of {cells} cells"
            if bool(slab.free) != (slab.index in self._gaps[slab.size]):
                return f"slab {slab.index}: its gaps are not listed as they are"
        for size, free in self._free_cells.items():
            if free != sum(len(s.free) for s in self._gaps[size].values()):
                return f"{free} free cells of {size} B were counted wrongly"
        taken = sum(len(s.taken) * s.size for s in self._used.values())
        return "" if taken == self.taken_bytes else f"{taken} B are taken, {self.taken_bytes} B counted"
