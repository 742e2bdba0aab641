"""Models over one device buffer, as an engine has them: weights below, KV right above, pages handed out low first."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from hashlib import blake2b

import torch

from talaria_gpu.hkvr.descriptor import KvDescriptor
from talaria_gpu.hkvr.keys import BlockKeys
from talaria_gpu.hkvr.transfer import DeviceKv
from talaria_gpu.staging.low_first import LowFirst
from talaria_gpu.staging.plan import Segment

GARBAGE = 0xFF


class Pages:
    """A free list, as SGLang's allocators keep one; page 0 is padding."""

    def __init__(self, pages: int, page_size: int) -> None:
        self.pages, self.page_size = pages, page_size
        self.clear()

    def clear(self) -> None:
        self.free_pages = torch.arange(1, self.pages + 1)

    def available_size(self) -> int:
        return len(self.free_pages) * self.page_size

    def get_all_free_pages(self) -> torch.Tensor:
        return self.free_pages


class LowFirstPages(LowFirst, Pages):
    """The production policy over it."""

    def alloc(self, pages: int) -> list[int] | None:
        self._ensure(pages)
        if pages > len(self.free_pages):
            return None
        taken, self.free_pages = self.free_pages[:pages].tolist(), self.free_pages[pages:]
        return taken

    def free(self, pages: list[int]) -> None:
        if pages:
            self._back(torch.tensor(pages))


@lru_cache(maxsize=1 << 16)
def _digest(model: str, ids: tuple[int, ...]) -> bytes:
    before = _digest(model, ids[:-1]) if ids else model.encode()
    return blake2b(before + (ids[-1].to_bytes(8, "little") if ids else b"")).digest()


@lru_cache(maxsize=1 << 16)
def _row(model: str, ids: tuple[int, ...], widths: tuple[int, ...]) -> bytes:
    """Of the last token of `ids`, all segments: never garbage, and different wherever anything before it is."""
    text = _digest(model, ids)
    return b"".join(blake2b(text, digest_size=width, salt=bytes([n])).digest() for n, width in enumerate(widths))


class FakeModel:
    """One model's place in the buffer, the rows it has given out, and what must be in them.

    Args:
        spec: of its KV.
        weight_bytes: of its image, which is random.
        pages: of its pool, the padding page left out.
        buffer: uint8; all models' regions overlap there.
    """

    def __init__(self, spec: KvDescriptor, weight_bytes: int, pages: int, buffer: torch.Tensor) -> None:
        self.spec, self.name, self.page = spec, spec.model, spec.page_tokens
        self.buffer = buffer
        random = torch.Generator().manual_seed(weight_bytes)
        self.image = torch.randint(0, 256, (weight_bytes,), dtype=torch.uint8, generator=random)
        rows = (pages + 1) * self.page
        base, views, segments = weight_bytes, [], []
        for width in spec.row_bytes:
            views.append(buffer[base : base + rows * width].view(rows, width))
            segments.append(Segment(base, width * self.page))
            base += rows * width
        assert base <= buffer.numel()
        self.kv, self.segments, self.gap = DeviceKv(spec, tuple(views)), segments, (base, buffer.numel())
        self.allocator = LowFirstPages(pages, self.page)
        self.held: Counter[int] = Counter()
        """Holders of each page that is not free: calls, cached prefixes, copies under way."""

    # --- pages

    def rows(self, pages: list[int], tokens: int | None = None) -> torch.Tensor:
        rows = (torch.tensor(pages, dtype=torch.int64).view(-1, 1) * self.page + torch.arange(self.page)).flatten()
        return rows[:tokens]

    def take(self, pages: int) -> list[int] | None:
        taken = self.allocator.alloc(pages)
        if taken is not None:
            assert 0 not in taken
            assert not self.held.keys() & set(taken), "a page was given to two"
            self.hold(taken)
        return taken

    def hold(self, pages: list[int]) -> None:
        self.held.update(pages)

    def drop(self, pages: list[int]) -> None:
        """One holder less; pages without any are free, and overwritten if the buffer is this model's (`on_free`)."""
        self.held.subtract(pages)
        free = [page for page in pages if not self.held[page]]
        for page in free:
            del self.held[page]
        self.allocator.free(free)

    def spoil(self, pages: torch.Tensor) -> None:
        rows = self.rows(pages.tolist())
        for segment in self.kv.segments:
            segment[rows] = GARBAGE

    # --- content

    def block_keys(self, salt: str) -> BlockKeys:
        return BlockKeys(self.spec.identity, salt, self.spec.block_tokens)

    def _truth(self, ids: tuple[int, ...], start: int) -> list[torch.Tensor]:
        """[tokens, row bytes] by segment, of tokens from `start` on, as a forward pass over all before leaves them."""
        widths = self.spec.row_bytes
        rows = b"".join(_row(self.name, ids[: at + 1], widths) for at in range(start, len(ids)))
        table = torch.frombuffer(bytearray(rows), dtype=torch.uint8).view(-1, sum(widths))
        return list(table.split(widths, dim=1))

    def compute(self, ids: list[int], pages: list[int], start: int) -> None:
        """A forward pass: it reads what is before `start`, which must be right, and writes the rest."""
        self.assert_holds(ids[:start], pages)
        rows = self.rows(pages, len(ids))[start:]
        for segment, truth in zip(self.kv.segments, self._truth(tuple(ids), start), strict=True):
            segment[rows] = truth

    def assert_holds(self, ids: list[int], pages: list[int]) -> None:
        if not ids:
            return
        rows = self.rows(pages, len(ids))
        for segment, truth in zip(self.kv.segments, self._truth(tuple(ids), 0), strict=True):
            assert torch.equal(segment[rows], truth), f"{self.name}: stale KV would be read"

    def block(self, ids: tuple[int, ...]) -> torch.Tensor:
        """The last block of `ids` as it must be in a host cell: segments one after another."""
        start = len(ids) - self.spec.block_tokens
        return torch.cat([truth.flatten() for truth in self._truth(ids, start)])
