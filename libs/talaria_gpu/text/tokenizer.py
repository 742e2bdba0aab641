"""The tokenizer contract and how one is chosen for a model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from talaria_gpu.text.byte_tokenizer import ByteTokenizer
from talaria_gpu.text.detokenize import Detokenizer
from talaria_gpu.text.hf_tokenizer import HfTokenizer
from talaria_gpu.text.messages import ChatMessage


class Tokenizer(Protocol):
    """Text and ids of one model. Thread-safe: no method changes state."""

    @property
    def inline_bytes(self) -> int:
        """Bodies up to this many bytes are not worth a thread."""
        ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end an answer."""
        ...

    @property
    def vocab_size(self) -> int:
        """Ids are 0..vocab_size-1."""
        ...

    def encode(self, text: str) -> list[int]:
        """Ids of a plain prompt, with the special tokens that the model wants in front of one."""
        ...

    def render_chat(self, messages: Sequence[ChatMessage]) -> str:
        """The prompt text of a conversation, ready for the assistant's turn. Raises BadRequestError."""
        ...

    def encode_chat(self, messages: Sequence[ChatMessage]) -> Sequence[int]:
        """Ids of `render_chat`, nothing added. Raises BadRequestError."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens left out."""
        ...

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token stands for (also of special tokens: their names); b"" for an unknown id."""
        ...

    def detokenizer(self) -> Detokenizer:
        """A fresh incremental decoder, special tokens left out."""
        ...


def load_tokenizer(path: Path | None) -> Tokenizer:
    """The tokenizer in the model directory `path`; a ByteTokenizer when there is no model (sim engine).

    Raises:
        ValueError: the directory has no tokenizer, or one that does not load.
    """
    return ByteTokenizer() if path is None else HfTokenizer(path)
