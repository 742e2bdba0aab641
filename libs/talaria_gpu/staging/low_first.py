"""Low addresses first, and the high ones on loan: the order of an allocator's free pages (4.4).

Leased pages count as available: admission and retraction do not notice. When the low pages run short, the lowest
leased ones come back, after the stager has been told. The lease is mirrored on the host, and what an allocation needs
is counted from host tensors: nothing here waits for the device, except the start of a lease. Knows no SGLang: the
allocators that this is mixed into do.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

BATCH_TOKENS = 64
"""Leased pages come back in batches of so many tokens: one wait for many allocations."""


class LowFirst:
    """Mixed into an allocator with a free list: keeps that ascending, and lends some of its pages.

    Invariant: free and leased pages are disjoint, each ascending; together they are what the allocator takes for free.
    """

    free_pages: torch.Tensor
    page_size: int

    _leased: torch.Tensor | None = None
    _mirror: list[int] = []
    _on_reclaim: Callable[[int], None] | None = None

    on_free: Callable[[torch.Tensor], None] | None = None
    """Told which pages are free again, before anybody can get them. For tests, which overwrite them."""

    def unleased_pages(self) -> list[int]:
        """Free pages, ascending. Waits for the device."""
        pages: list[int] = self.free_pages.tolist()
        return pages

    def lease(self, pages: tuple[int, ...], on_reclaim: Callable[[int], None]) -> None:
        """Lend free `pages` (ascending). `on_reclaim(p)` is called before calls get leased pages below p."""
        self.end_lease()
        if not pages:
            return
        wanted = torch.tensor(pages, dtype=self.free_pages.dtype, device=self.free_pages.device)
        mask = torch.isin(self.free_pages, wanted)
        if int(mask.sum()) != len(pages):
            raise ValueError("only free pages can be lent")
        self._leased, self.free_pages = self.free_pages[mask], self.free_pages[~mask]
        self._mirror, self._on_reclaim = list(pages), on_reclaim

    def end_lease(self) -> None:
        """Take all pages back without asking: whoever leased them has stopped writing."""
        if self._leased is not None:
            self.free_pages = merged(self.free_pages, self._leased)
        self._leased, self._mirror, self._on_reclaim = None, [], None

    @property
    def leased_pages(self) -> int:
        """How many pages are lent."""
        return len(self._mirror)

    def _ensure(self, pages: int) -> None:
        short = pages - len(self.free_pages)
        if not 0 < short <= len(self._mirror) or self._leased is None or self._on_reclaim is None:
            return  # enough, or there is not enough whatever comes back
        batch = max(1, BATCH_TOKENS // self.page_size)
        take = min(len(self._mirror), -(-short // batch) * batch)
        self._on_reclaim(self._mirror[take - 1] + 1)
        # Not simply behind the others: pages freed since the lease may lie above.
        self.free_pages = merged(self.free_pages, self._leased[:take])
        self._leased, self._mirror = self._leased[take:], self._mirror[take:]
        if not self._mirror:
            self._leased = self._on_reclaim = None

    def _back(self, pages: torch.Tensor) -> None:
        """Pages are free again: to their place in the order."""
        if self.on_free is not None:
            self.on_free(pages)
        self.free_pages = merged(self.free_pages, pages)

    # --- what an allocator's callers call

    def clear(self) -> None:
        """Everything is free, nothing is lent."""
        if self._on_reclaim is not None:
            self._on_reclaim(self._mirror[-1] + 1)
        super().clear()  # type: ignore[misc]  # the allocator is the other base
        self._leased, self._mirror, self._on_reclaim = None, [], None

    def available_size(self) -> int:
        """Tokens that can be allocated, the lent ones included."""
        return int(super().available_size()) + len(self._mirror) * self.page_size  # type: ignore[misc]  # as above

    def get_all_free_pages(self) -> torch.Tensor:
        """All free pages, the lent ones included."""
        free: torch.Tensor = super().get_all_free_pages()  # type: ignore[misc]  # as above
        return free if self._leased is None else torch.cat((free, self._leased))


def merged(ascending: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Both, ascending. Reads the long list once, as any free list of one piece must; sorting it costs 10 times that."""
    others = torch.sort(others.to(ascending.dtype)).values
    count = len(ascending) + len(others)
    places = torch.searchsorted(ascending, others) + torch.arange(len(others), device=others.device)
    rest = torch.ones(count, dtype=torch.bool, device=others.device)
    rest[places] = False
    out = ascending.new_empty(count)
    out[places] = others
    return out.masked_scatter_(rest, ascending)
