"""Token ids to text, a step at a time, never half a character.

The concatenated deltas plus `flush` equal the decoding of all ids. Two ways:

- `ByteDetokenizer`, for vocabularies whose tokens are byte strings (byte-level BPE: SmolLM2, Qwen, Llama 3, DeepSeek,
  GLM; and the byte tokenizer): an incremental UTF-8 decoder, exact for any ids, constant work per token.
- `WindowDetokenizer`, for every other decoder (SentencePiece style, byte fallback, WordPiece): decode a short window
  of ids twice and take the difference (the prefix-offset method of TGI and vLLM). Exact for well-formed output.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

REPLACEMENT = "\ufffd"
_MAX_HELD_TOKENS = 16
"""A UTF-8 character has 4 bytes at most, so a tail that is still broken after this many tokens is broken for good."""


class Detokenizer(Protocol):
    """State of one output."""

    def feed(self, ids: Sequence[int]) -> str:
        """Text that is complete after `ids`; "" while a character is incomplete."""
        ...

    def flush(self) -> str:
        """What is left at the end: a broken tail as U+FFFD."""
        ...


class ByteDetokenizer:
    """Args: bytes_of: id -> the token's bytes, b"" for ids that are not shown (special tokens)."""

    def __init__(self, bytes_of: Callable[[int], bytes]) -> None:
        self._bytes_of = bytes_of
        # Python replaces maximal subparts, as Rust's from_utf8_lossy does in `tokenizers`: the texts agree.
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, ids: Sequence[int]) -> str:
        """Text that is complete after `ids`."""
        return self._decoder.decode(b"".join(map(self._bytes_of, ids)))

    def flush(self) -> str:
        """The broken tail, if any, as U+FFFD."""
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """Args: decode: ids -> text, as a whole."""

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._prefix = 0  # where the window begins: one emission back, so that joining spaces come out right
        self._read = 0  # ids up to here have been emitted

    def feed(self, ids: Sequence[int]) -> str:
        """Text that is complete after `ids`."""
        out = []
        for token in ids:  # one at a time, so that the text does not depend on how ids are grouped
            self._ids.append(token)
            out.append(self._advance(force=len(self._ids) - self._read >= _MAX_HELD_TOKENS))
        return "".join(out)

    def flush(self) -> str:
        """The broken tail, if any."""
        return self._advance(force=True)

    def _advance(self, *, force: bool) -> str:
        before = self._decode(self._ids[self._prefix : self._read])
        after = self._decode(self._ids[self._prefix :])
        if len(after) <= len(before) or (after.endswith(REPLACEMENT) and not force):
            return ""
        self._ids = self._ids[self._read :]  # the old window is done with: memory stays bounded
        self._prefix, self._read = 0, len(self._ids)
        return after[len(before) :]
