"""What one block of a model's KV is in host memory (appendix C)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Family = Literal["mha", "mla", "recurrent"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KvDescriptor:
    """The compact layout of one model on one rank. Blocks are page-first: a block's layers stand one after another.

    mha: segments are K and V of layer 0, K and V of layer 1, ...; mla: one latent segment per layer. Their blocks hold
    `block_tokens` rows. recurrent: a part of the state at one exact boundary, a segment per layer and state tensor;
    `block_tokens` is 1 and a "row" is a slot.
    """

    model: str
    """Its name, for people; blocks are told apart by `identity`."""
    identity: bytes
    """16 bytes; see `keys.identity_of`."""
    family: Family
    dtype: str
    page_tokens: int
    block_tokens: int
    """A multiple of the page."""
    row_bytes: tuple[int, ...]
    """Bytes of one token's row, by segment."""
    complete: bool = True
    """Whether a prefix that ends with such a block can be restored. A hybrid's KV cannot without the state behind it,
    nor can a state without its last part."""
    rank: int = 0

    def __post_init__(self) -> None:
        """Raises ValueError: the block is not made of whole pages, or MHA's segments do not come in pairs."""
        if self.block_tokens < 1 or self.block_tokens % self.page_tokens:
            raise ValueError(f"a block of {self.block_tokens} tokens is not made of pages of {self.page_tokens}")
        if not self.row_bytes or (self.family == "mha" and len(self.row_bytes) % 2):
            raise ValueError(f"{self.family} cannot have {len(self.row_bytes)} segments")

    @property
    def bytes_per_token(self) -> int:
        """Of all segments."""
        return sum(self.row_bytes)

    @property
    def block_bytes(self) -> int:
        """Bytes of a full block."""
        return self.block_tokens * self.bytes_per_token

    def fragments(self) -> list[tuple[int, int]]:
        """(first byte in the block, bytes per row) of each segment's fragment."""
        found, at = [], 0
        for width in self.row_bytes:
            found.append((at, width))
            at += self.block_tokens * width
        return found
