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
_MASK = (1 << 64) - 1


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
    """The token that follows `position` generated ones (splitmix64 of seed and position)."""
    return _IDS[_mix(seed, position) % len(_IDS)]


def logprob_at(seed: int, position: int, alternatives: int) -> tuple[float, list[tuple[int, float]]]:
    """A made-up log probability of the token there, and `alternatives` (id, logprob) pairs, best first."""
    chosen = token_at(seed, position)
    others = [token for token in dict.fromkeys(_IDS) if token != chosen]
    ranked = [chosen, *others][:alternatives]
    return -_LN2, [(token, -_LN2 * (rank + 1)) for rank, token in enumerate(ranked)]


def expected_tokens(input_ids: Sequence[int], count: int) -> list[int]:
    """The first `count` tokens that a sim engine answers to `input_ids` with."""
    seed = seed_of(pack_ids(input_ids))
    return [token_at(seed, i) for i in range(count)]


def expected_text(input_ids: Sequence[int], count: int) -> str:
    """`expected_tokens` as the byte tokenizer reads them: one ASCII letter, digit or blank each."""
    return bytes(t - BYTE_OFFSET for t in expected_tokens(input_ids, count)).decode("ascii")


def _mix(seed: int, position: int) -> int:
    z = (seed + (position + 1) * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)
