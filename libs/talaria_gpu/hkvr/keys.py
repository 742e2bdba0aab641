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
            raw = array("q", ids[index * self._block : (index + 1) * self._block])
            if sys.byteorder == "big":
                raw.byteswap()
            self._last = blake2b(self._last + raw.tobytes(), digest_size=KEY_BYTES).digest()
            self._keys.append(self._last)
        return self._keys[:wanted]


def block_keys(identity: bytes, salt: str, ids: Sequence[int], block_tokens: int) -> list[bytes]:
    """Keys of all full blocks of `ids`."""
    return BlockKeys(identity, salt, block_tokens).upto(ids, len(ids))
