"""Checks request bodies on the fast path: msgspec, texts left as raw JSON where nobody here reads them (GATEWAY 2).

A body that passes is forwarded byte for byte. A body that does not is read again by the Pydantic schemas, which say
exactly what is wrong (`explain`); what those would accept but the fast path does not, is still refused.
"""

from __future__ import annotations

import hashlib
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta, Raw

from talaria_api.explain import explain_chat, explain_completion
from talaria_api.sessions import OPENING_CHARS, PREFIX_BYTES, BodyHints
from talaria_common.errors import BadRequestError
from talaria_common.ids import MODEL_CHARS
from talaria_common.wire.call import Endpoint

_Temperature = Annotated[float, Meta(ge=0, le=2)]
_TopP = Annotated[float, Meta(gt=0, le=1)]
_Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
_Penalty = Annotated[float, Meta(ge=-2, le=2)]
_Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
_Stop = Annotated[str, Meta(min_length=1)]
_Empty = Annotated[list[Raw], Meta(max_length=0)]
_EmptyMap = Annotated[dict[str, Raw], Meta(max_length=0)]
_Zero = Annotated[float, Meta(ge=0, le=0)]
_One = Annotated[float, Meta(ge=1, le=1)]


class _TextFormat(msgspec.Struct):
    type: Literal["text"]


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _Common(msgspec.Struct):
    model: Annotated[str, Meta(min_length=1, max_length=MODEL_CHARS)]
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    temperature: _Temperature | None = None
    top_p: _TopP | None = None
    max_tokens: _Count | None = None
    stop: _Stop | Annotated[list[_Stop], Meta(max_length=4)] | None = None
    seed: _Seed | None = None
    n: _One | None = None
    frequency_penalty: _Penalty | None = None
    presence_penalty: _Penalty | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    prompt_cache_key: str | None = None
    ignore_eos: bool | None = None
    return_token_ids: bool | None = None
    logit_bias: _EmptyMap | None = None
    guided_json: None = None
    guided_regex: None = None
    guided_choice: None = None
    guided_grammar: None = None
    structured_outputs: None = None
    regex: None = None
    ebnf: None = None
    json_schema: None = None
    structural_tag: None = None
    top_k: Literal[-1, 0] | None = None
    min_p: _Zero | None = None
    repetition_penalty: _One | None = None
    min_tokens: _Zero | None = None
    stop_token_ids: _Empty | None = None
    bad_words: _Empty | None = None
    allowed_token_ids: None = None
    include_stop_str_in_output: bool | None = None
    continue_final_message: bool | None = None
    chat_template: None = None
    chat_template_kwargs: _EmptyMap | None = None
    reasoning_effort: None = None
    verbosity: None = None
    lora_path: None = None


class _Message(msgspec.Struct):
    role: Literal["system", "developer", "user", "assistant"]
    content: Raw = Raw(b"null")
    name: str | None = None
    tool_calls: _Empty | None = None
    function_call: None = None
    audio: None = None
    refusal: None = None


class _Part(msgspec.Struct):
    type: Literal["text"]
    text: str


class _Chat(_Common):
    messages: Annotated[list[_Message], Meta(min_length=1)] = msgspec.field(default_factory=list)
    max_completion_tokens: _Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    tools: _Empty | None = None
    tool_choice: Literal["none", "auto"] | None = None
    functions: _Empty | None = None
    function_call: Literal["none", "auto"] | None = None
    response_format: _TextFormat | None = None
    modalities: Annotated[list[Literal["text"]], Meta(max_length=1)] | None = None
    audio: None = None
    prediction: None = None
    web_search_options: None = None


class _Completion(_Common):
    prompt: (
        Annotated[str, Meta(min_length=1)]
        | Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(min_length=1, max_length=1)]
        | None
    ) = None
    logprobs: Annotated[int, Meta(ge=0, le=5)] | None = None
    best_of: Literal[1] | None = None
    suffix: Literal[""] | None = None
    echo: bool | None = None


class Request(NamedTuple):
    """What the api needs to know of a valid body."""

    endpoint: Endpoint
    model: str
    stream: bool
    include_usage: bool
    max_tokens: int | None
    logprobs: bool
    """Whether the answer carries log probabilities."""
    return_token_ids: bool
    prompt_bytes: int
    """UTF-8 bytes of prompt text, JSON escapes included: from these the router learns bytes per token."""
    hints: BodyHints
    prefix_id: str = ""
    """Fingerprint of the leading system messages: sessions that share it may share their KV. "": none, or too short."""
    prefix_bytes: int = 0


SHARED_BYTES = 256
"""A shorter common prefix is not worth a thought."""
_chat = msgspec.json.Decoder(_Chat)
_completion = msgspec.json.Decoder(_Completion)
_content = msgspec.json.Decoder(str | list[_Part])
_QUOTE, _BRACKET = ord('"'), ord("[")


def parse_chat(body: bytes) -> Request:
    """The facts of a chat completion's body.

    Raises:
        BadRequestError: it is not valid JSON, or a field is wrong; `param` names it.
        UnsupportedError: a field asks for what we do not do; `param` names it.
    """
    try:
        _check_utf8(body)
        chat = _chat.decode(body)
        _check_options(chat)
        _check_chat(chat)
        prompt_bytes = sum(_content_bytes(message) for message in chat.messages)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, _RefusedError) as e:
        explain_chat(body)
        raise BadRequestError(f"the body is not a valid request: {e}") from e
    return Request(
        "chat",
        chat.model,
        bool(chat.stream),
        bool(chat.stream_options and chat.stream_options.include_usage),
        chat.max_completion_tokens if chat.max_completion_tokens is not None else chat.max_tokens,
        bool(chat.logprobs),
        bool(chat.return_token_ids),
        prompt_bytes,
        BodyHints(chat.metadata, chat.prompt_cache_key, partial(_opening, chat.messages)),
        *_prefix(chat.messages),
    )


def parse_completion(body: bytes) -> Request:
    """The facts of a text completion's body. Raises as `parse_chat`."""
    try:
        _check_utf8(body)
        it = _completion.decode(body)
        _check_options(it)
        prompt = _prompt(it)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, _RefusedError) as e:
        explain_completion(body)
        raise BadRequestError(f"the body is not a valid request: {e}") from e
    return Request(
        "completions",
        it.model,
        bool(it.stream),
        bool(it.stream_options and it.stream_options.include_usage),
        it.max_tokens,
        it.logprobs is not None,
        bool(it.return_token_ids),
        len(prompt) if prompt.isascii() else len(prompt.encode()),
        BodyHints(it.metadata, it.prompt_cache_key, lambda: (_first_bytes(prompt, PREFIX_BYTES),)),
    )


class _RefusedError(Exception):
    """The fast path's own checks, beyond types and ranges."""


def _check_utf8(body: bytes) -> None:
    # msgspec checks everything in what it skips except the encoding, and the instance will read what is skipped here.
    if not body.isascii():
        body.decode()


def _check_options(it: _Common) -> None:
    if it.stream_options is not None and not it.stream:
        raise _RefusedError("stream_options needs stream = true")
    if it.include_stop_str_in_output or it.continue_final_message:
        raise _RefusedError("this parameter is not supported")


def _check_chat(chat: _Chat) -> None:
    if not chat.messages:
        raise _RefusedError("messages is missing")
    if chat.top_logprobs is not None and not chat.logprobs:
        raise _RefusedError("top_logprobs needs logprobs = true")


def _prompt(it: _Completion) -> str:
    if it.prompt is None:
        raise _RefusedError("prompt is missing")
    if it.echo:
        raise _RefusedError("echo is not supported")
    return it.prompt if isinstance(it.prompt, str) else it.prompt[0]


def _content_bytes(message: _Message) -> int:
    """Bytes of the message's text. A list of parts is decoded: it may hold what we refuse."""
    raw = memoryview(message.content)
    if raw[0] == _QUOTE:
        return len(raw) - 2
    if raw[0] == _BRACKET:
        parts = _content.decode(message.content)
        return sum(len(part.text.encode()) for part in parts if isinstance(part, _Part))
    if message.role == "assistant" and bytes(raw) == b"null":
        return 0
    raise _RefusedError("content is neither a string nor a list of parts")


def _prefix(messages: list[_Message]) -> tuple[str, int]:
    """(fingerprint, bytes) of the leading system messages, from their raw content: nothing is decoded for it."""
    h = hashlib.blake2b(digest_size=8)
    size = 0
    for message in messages:
        if message.role not in {"system", "developer"}:
            break
        raw = memoryview(message.content)
        h.update(raw)
        size += len(raw)
    return (h.hexdigest(), size) if size >= SHARED_BYTES else ("", 0)


def _opening(messages: list[_Message]) -> tuple[str, ...]:
    """Role and text of the leading system messages and the first user message: how the conversation begins."""
    out: list[str] = []
    for message in messages:
        out += (message.role, _text(message.content)[:OPENING_CHARS])
        if message.role == "user":
            break
    return tuple(out)


def _first_bytes(text: str, count: int) -> str:
    return text[:count].encode()[:count].decode(errors="replace")


def _text(content: Raw) -> str:
    if bytes(memoryview(content)[:4]) == b"null":
        return ""
    decoded = _content.decode(content)
    return decoded if isinstance(decoded, str) else "".join(part.text for part in decoded)
