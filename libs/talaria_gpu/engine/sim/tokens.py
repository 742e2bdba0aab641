"""The sim engine's answer: a pure function of the prompt, so that a test can tell a mixed-up or torn stream.

Tokens are letters, digits and blanks in the byte tokenizer's ids (byte + 3); EOS never comes by itself.
"""

from __future__ import annotations

import hashlib
import math
import sys
import zlib
from array import array
from collections.abc import Sequence
from functools import lru_cache

BYTE_OFFSET = 3
"""As in `talaria_gpu.text.byte_tokenizer`: ids 0..2 are special."""
EOS = 2
VOCAB_SIZE = BYTE_OFFSET + 256
_ALPHABET = b"abcdefghijklmnopqrstuvwxyz0123456789    "
_IDS = tuple(b + BYTE_OFFSET for b in _ALPHABET)
_NATIVE_UTF32 = "utf-32-le" if sys.byteorder == "little" else "utf-32-be"
"""Widens bytes to uint32 in C, a hundred times as fast as an array does it."""
_HASHED_BYTES = 4096
_LN2 = math.log(2)
_LETTERS = bytes(_IDS[b % len(_IDS)] for b in range(256))
"""Byte of a digest → token id."""
_BLOCK = 64


def pack_ids(input_ids: Sequence[int]) -> bytes:
    """4 bytes per id, in order.

    Raises:
        OverflowError: an id is negative or above 32 bits.
    """
    if isinstance(input_ids, array):
        if input_ids.typecode == "I":
            return input_ids.tobytes()
        if input_ids.typecode == "B":
            return input_ids.tobytes().decode("latin-1").encode(_NATIVE_UTF32)
    return array("I", input_ids).tobytes()


def seed_of(packed: bytes) -> int:
    """64 bits of the prompt: of its end exactly, of all of it through a checksum, which 1.7 MB cost less."""
    end = zlib.crc32(packed).to_bytes(4, "little") + packed[-_HASHED_BYTES:]
    return int.from_bytes(hashlib.blake2b(end, digest_size=8).digest(), "little")


def token_at(seed: int, position: int) -> int:
    """The token that follows `position` generated ones."""
    return _block(seed, position // _BLOCK)[position % _BLOCK]


def tokens_at(seed: int, position: int, count: int) -> list[int]:
    """The `count` tokens that follow `position` generated ones."""
    first, last = position // _BLOCK, (position + count - 1) // _BLOCK
    made = b"".join(_block(seed, n) for n in range(first, last + 1))
    return list(made[position - first * _BLOCK : position - first * _BLOCK + count])


@lru_cache(maxsize=4096)
def _block(seed: int, number: int) -> bytes:
    """64 tokens, a pure function of the prompt's seed: all are below 256."""
    key = seed.to_bytes(8, "little") + number.to_bytes(8, "little")
    return hashlib.blake2b(key, digest_size=_BLOCK).digest().translate(_LETTERS)


def logprob_at(seed: int, position: int, alternatives: int) -> tuple[float, list[tuple[int, float]]]:
    """A made-up log probability of the token there, and `alternatives` (id, logprob) pairs, best first."""
    chosen = token_at(seed, position)
    others = [token for token in dict.fromkeys(_IDS) if token != chosen]
    ranked = [chosen, *others][:alternatives]
    return -_LN2, [(token, -_LN2 * (rank + 1)) for rank, token in enumerate(ranked)]


def expected_tokens(input_ids: Sequence[int], count: int) -> list[int]:
    """The first `count` tokens that a sim engine answers to `input_ids` with."""
    return tokens_at(seed_of(pack_ids(input_ids)), 0, count)


def expected_text(input_ids: Sequence[int], count: int) -> str:
    """`expected_tokens` as the byte tokenizer reads them: one ASCII letter, digit or blank each."""
    return bytes(t - BYTE_OFFSET for t in expected_tokens(input_ids, count)).decode("ascii")
