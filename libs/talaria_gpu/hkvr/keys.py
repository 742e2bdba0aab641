"""Names of KV blocks: the same in every process and on every rank, different for other weights.

A key is blake2b-128 over the model's identity, the tenant's salt and all token ids up to the block's end, chained block
by block: equal keys mean equal prefixes.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Mapping, Sequence
from hashlib import blake2b

KEY_BYTES = 16


def identity_of(parts: Mapping[str, str]) -> bytes:
    """Digest of all that KV depends on but the tokens: weights, tokenizer, dtype, layout, tensor parallelism."""
    digest = blake2b(digest_size=KEY_BYTES)
    for name in sorted(parts):
        for text in (name, parts[name]):
            raw = text.encode()
            digest.update(len(raw).to_bytes(8, "little") + raw)
    return digest.digest()


class BlockKeys:
    """Keys of one sequence, made once as it grows.

    Args:
        identity: of the model.
        salt: of the tenant.
        block_tokens: tokens per block.
    """

    def __init__(self, identity: bytes, salt: str, block_tokens: int) -> None:
        self._block = block_tokens
        self._last = blake2b(salt.encode(), key=identity, digest_size=KEY_BYTES).digest()
        self._keys: list[bytes] = []

    def upto(self, ids: Sequence[int], tokens: int) -> list[bytes]:
        """Keys of the full blocks in `ids[:tokens]`. `ids` must begin with what it was the last time."""
        wanted = tokens // self._block
        for index in range(len(self._keys), wanted):
            self._last = self._next(self._last, ids[index * self._block : (index + 1) * self._block])
            self._keys.append(self._last)
        return self._keys[:wanted]

    def exact(self, ids: Sequence[int], tokens: int) -> bytes:
        """Key of exactly `ids[:tokens]`: of its last block, or of the shorter rest behind that.

        Raises ValueError: it is shorter than a block.
        """
        keys = self.upto(ids, tokens)
        if not keys:
            raise ValueError(f"{tokens} tokens are less than a block of {self._block}")
        rest = ids[len(keys) * self._block : tokens]
        return self._next(keys[-1], rest) if len(rest) else keys[-1]

    @staticmethod
    def _next(before: bytes, ids: Sequence[int]) -> bytes:
        raw = array("q", ids)
        if sys.byteorder == "big":
            raw.byteswap()
        return blake2b(before + raw.tobytes(), digest_size=KEY_BYTES).digest()


def block_keys(identity: bytes, salt: str, ids: Sequence[int], block_tokens: int) -> list[bytes]:
    """Keys of all full blocks of `ids`."""
    return BlockKeys(identity, salt, block_tokens).upto(ids, len(ids))
