"""A Hugging Face model directory's tokenizer, through the `tokenizers` library alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from talaria_common.errors import BadRequestError
from talaria_gpu.text.detokenize import ByteDetokenizer, Detokenizer, WindowDetokenizer
from talaria_gpu.text.messages import ChatMessage
from talaria_gpu.text.template import ChatTemplate

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_BYTE_TOKEN_LENGTH = len("<0xFF>")
_WORD_START = "▁"
"""SentencePiece's mark for a space before a token."""


class HfTokenizer:
    """Args: path: a directory with tokenizer.json and, usually, tokenizer_config.json and the model's configs.

    Raises:
        ValueError: no tokenizer.json, or one of the files does not load; the message names it.
    """

    inline_bytes = 8 << 10
    """About 5 ms at 1.5 MB/s; longer prompts are encoded in a thread, where that runs without the interpreter lock."""

    def __init__(self, path: Path) -> None:
        file = path / "tokenizer.json"
        try:
            self._tokenizer = Tokenizer.from_file(str(file))
        except Exception as e:  # the library raises bare Exception for everything
            raise ValueError(f"{file}: {e}") from e
        # Truncation and padding are training-time settings that some publishers leave in the file.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        config = _read(path / "tokenizer_config.json")
        special = _special_tokens(config, _read(path / "special_tokens_map.json"))
        source = _template_source(path, config)
        self._template = ChatTemplate(source, special) if source is not None else None
        added: dict[int, AddedToken] = self._tokenizer.get_added_tokens_decoder()
        self._hidden = frozenset(i for i, token in added.items() if token.special)
        self._names = {i: token.content.encode() for i, token in added.items()}
        self._byte_level = _is_byte_level(self._tokenizer)
        self._bytes: dict[int, bytes] = {}
        self.vocab_size: int = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.eos_token_ids = self._find_eos(path, special)

    def encode(self, text: str) -> list[int]:
        """Ids of a plain prompt with the post-processor's special tokens (a BOS, where the model has one)."""
        return self._ids(text, special=True)

    def render_chat(self, messages: Sequence[ChatMessage]) -> str:
        """The prompt text of a conversation. Raises BadRequestError, also when the model has no chat template."""
        if self._template is None:
            raise BadRequestError("the model has no chat template: use /v1/completions", param="messages")
        return self._template.render(messages)

    def encode_chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        """Ids of `render_chat`; the template writes its own special tokens, so none are added."""
        return self._ids(self.render_chat(messages), special=False)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens left out."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return text

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token stands for; a special token's name; b"" for an unknown id."""
        known = self._bytes.get(token)
        if known is None:
            known = self._bytes[token] = self._find_bytes(token)
        return known

    def detokenizer(self) -> Detokenizer:
        """A fresh incremental decoder, special tokens left out."""
        return ByteDetokenizer(self._shown) if self._byte_level else WindowDetokenizer(self.decode)

    def _ids(self, text: str, *, special: bool) -> list[int]:
        # The batch call, because it alone lets go of the interpreter lock (tokenizers 0.23).
        ids: list[int] = self._tokenizer.encode_batch_fast([text], add_special_tokens=special)[0].ids
        return ids

    def _shown(self, token: int) -> bytes:
        return b"" if token in self._hidden else self.token_bytes(token)

    def _find_bytes(self, token: int) -> bytes:
        name = self._names.get(token)
        piece: str | None = self._tokenizer.id_to_token(token)
        if piece is None:
            return b""
        if self._byte_level:
            # The decoder maps added tokens like any other where it can, and takes them as they are where it cannot.
            mapped = [_BYTE_OF.get(c) for c in piece]
            return piece.encode() if None in mapped else bytes(b for b in mapped if b is not None)
        if name is not None:
            return name
        if len(piece) == _BYTE_TOKEN_LENGTH and piece.startswith("<0x") and piece.endswith(">"):
            return bytes.fromhex(piece[3:5])
        return piece.replace(_WORD_START, " ").encode()

    def _find_eos(self, path: Path, special: dict[str, Any]) -> tuple[int, ...]:
        """All that the generation config, the model config and the tokenizer call end of sequence."""
        found: list[int] = []
        for file in ("generation_config.json", "config.json"):
            value = _read(path / file).get("eos_token_id")
            found += value if isinstance(value, list) else [] if value is None else [value]
        eos = special.get("eos_token")
        token: int | None = self._tokenizer.token_to_id(eos) if eos is not None else None
        return tuple(dict.fromkeys([*found, *([] if token is None else [token])]))


def _read(file: Path) -> dict[str, Any]:
    """A JSON object; empty if there is no such file."""
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as e:
        raise ValueError(f"{file}: {e}") from e
    if not isinstance(data, dict):
        raise ValueError(f"{file}: not a JSON object")  # noqa: TRY004 - a file's content is a value, whatever its type
    return data


def _special_tokens(*configs: dict[str, Any]) -> dict[str, Any]:
    """Special tokens by name, the first config's word first; a value may be a string or a serialised AddedToken."""
    out: dict[str, Any] = {}
    for name in _SPECIAL_NAMES:
        for config in configs:
            value = config.get(name)
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                out[name] = text
                break
    return out


def _template_source(path: Path, config: dict[str, Any]) -> str | None:
    """chat_template.jinja, else tokenizer_config's chat_template: a string, or named ones of which `default` counts."""
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        template = next((t.get("template") for t in template if t.get("name") == "default"), None)
    return template if isinstance(template, str) else None


def _is_byte_level(tokenizer: Tokenizer) -> bool:
    """Whether the decoder is byte-level and nothing else, so that text is the concatenation of token bytes."""
    decoder = json.loads(tokenizer.to_str())["decoder"] or {}
    if decoder.get("type") == "Sequence" and len(decoder["decoders"]) == 1:
        decoder = decoder["decoders"][0]
    return bool(decoder.get("type") == "ByteLevel")


def _byte_map() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes, from character to byte."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(rest)}


_BYTE_OF = _byte_map()
