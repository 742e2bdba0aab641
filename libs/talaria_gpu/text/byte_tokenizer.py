"""A tokenizer without a model, for the sim engine: one token per byte."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from talaria_gpu.text.detokenize import ByteDetokenizer, Detokenizer
from talaria_gpu.text.messages import ChatMessage

OFFSET = 3
"""Ids 0 (pad), 1 (begin), 2 (end) are special; byte b is id b + 3."""

_NAMES = (b"<pad>", b"<s>", b"</s>")
_SHIFTED = bytes((b + OFFSET) % 256 for b in range(256))
"""For `bytes.translate`, five times as fast as adding: no UTF-8 byte is above 0xF4, so none wraps around."""
_PLAIN = tuple(bytes([b]) for b in range(256))


class ByteTokenizer:
    """Ids are bytes plus OFFSET; the chat template is `role: content` lines."""

    inline_bytes = 1 << 20
    """A prompt of 400 KB costs a millisecond: less than a thread would."""
    eos_token_ids: tuple[int, ...] = (2,)
    vocab_size = OFFSET + 256

    def encode(self, text: str) -> list[int]:
        """Ids of the UTF-8 bytes."""
        return list(text.encode("utf-8", "replace").translate(_SHIFTED))

    def render_chat(self, messages: Sequence[ChatMessage]) -> str:
        """`role: content`, a line each, and the assistant's turn opened."""
        return "".join(f"{m['role']}: {m['content']}\n" for m in messages) + "assistant: "

    def encode_chat(self, messages: Sequence[ChatMessage]) -> array[int]:
        """Ids of `render_chat`, as an array of bytes: a text has no byte whose id is larger."""
        return array("B", self.render_chat(messages).encode("utf-8", "replace").translate(_SHIFTED))

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids; special and unknown ids are left out."""
        return b"".join(map(_shown, ids)).decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        """The byte, or a special token's name."""
        return _NAMES[token] if 0 <= token < OFFSET else _shown(token)

    def detokenizer(self) -> Detokenizer:
        """A fresh incremental decoder."""
        return ByteDetokenizer(_shown)


def _shown(token: int) -> bytes:
    return _PLAIN[token - OFFSET] if OFFSET <= token < OFFSET + 256 else b""
