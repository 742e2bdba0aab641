"""From an HTTP body to token ids and parameters.

The api has validated the body; what matters here is read again, because an instance must not fall over a body that a
newer or broken api lets through. What cannot be honoured is refused with its field's name, never dropped.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, TypeVar

import msgspec

from talaria_common.errors import BadRequestError, UnsupportedError
from talaria_common.wire.call import Endpoint
from talaria_gpu.text import ChatMessage, Tokenizer, normalise
from talaria_instance.messages import Params, Prompt

MAX_STOPS = 4
MAX_LOGPROBS = 20


class _Body(msgspec.Struct, frozen=True):
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    n: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    ignore_eos: bool | None = None
    return_token_ids: bool | None = None


class _ChatBody(_Body, frozen=True):
    messages: list[dict[str, Any]] = []
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Any] | None = None


class _Message(msgspec.Struct, frozen=True):
    """A message as nearly all are: with text, and nothing that `normalise` would have to refuse."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str
    name: str | None = None
    tool_calls: None = None
    function_call: None = None
    audio: None = None


class _PlainChatBody(_ChatBody, frozen=True):
    messages: list[_Message] = []  # type: ignore[assignment] # the same list, read more strictly


class _CompletionBody(_Body, frozen=True):
    prompt: str | list[Any] = ""
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None


class Content(NamedTuple):
    """A body read: exactly one of `messages`, `text` and `ids` is the prompt."""

    params: Params
    messages: list[ChatMessage] | None = None
    text: str | None = None
    ids: list[int] | None = None


N = TypeVar("N", int, float)

_plain_chat = msgspec.json.Decoder(_PlainChatBody)
_chat = msgspec.json.Decoder(_ChatBody)
_completion = msgspec.json.Decoder(_CompletionBody)


def read(body: bytes, endpoint: Endpoint) -> Content:
    """The prompt and parameters in `body`.

    Raises:
        BadRequestError: not JSON, a field of a wrong type or out of range.
        UnsupportedError: a field that cannot be honoured.
    """
    try:
        return _read_any_chat(body) if endpoint == "chat" else _read_completion(_completion.decode(body))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise BadRequestError(f"the body is not a valid request: {e}") from e


def tokenise(body: bytes, endpoint: Endpoint, tokenizer: Tokenizer) -> Prompt:
    """Ids and parameters of `body`. Pure CPU work, safe in a thread. Raises as `read`, and for an empty prompt."""
    content = read(body, endpoint)
    if content.messages is not None:
        size = sum(_utf8_bytes(m["content"]) for m in content.messages)
        ids = tokenizer.encode_chat(content.messages)
    elif content.text is not None:
        size = _utf8_bytes(content.text)
        ids = tokenizer.encode(content.text)
    else:
        ids = content.ids or []
        size = sum(len(tokenizer.token_bytes(i)) for i in ids)
        if any(not 0 <= i < tokenizer.vocab_size for i in ids):
            raise BadRequestError(f"a token id is not in 0..{tokenizer.vocab_size - 1}", param="prompt")
    if not ids:
        raise BadRequestError("the prompt has no tokens", param="messages" if endpoint == "chat" else "prompt")
    return Prompt(ids, content.params, size)


def _utf8_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "replace"))


def _read_any_chat(body: bytes) -> Content:
    try:
        plain = _plain_chat.decode(body)
    except msgspec.DecodeError:
        chat = _chat.decode(body)
        return _read_chat(chat, normalise(chat.messages))
    if not plain.messages:
        return _read_chat(plain, normalise([]))
    return _read_chat(plain, [_as_template_sees(m) for m in plain.messages])


def _as_template_sees(message: _Message) -> ChatMessage:
    role = "system" if message.role == "developer" else message.role
    if message.name is None:
        return ChatMessage(role=role, content=message.content)
    return ChatMessage(role=role, content=message.content, name=message.name)


def _read_chat(body: _ChatBody, messages: list[ChatMessage]) -> Content:
    if body.tools:
        raise UnsupportedError("tools is not supported", param="tools")
    logprobs = None
    if body.logprobs:
        logprobs = _within(body.top_logprobs, 0, MAX_LOGPROBS, "top_logprobs") or 0
    elif body.top_logprobs:
        raise BadRequestError("top_logprobs needs logprobs = true", param="top_logprobs")
    return Content(_params(body, logprobs), messages=messages)


def _read_completion(body: _CompletionBody) -> Content:
    for field, wanted in (("echo", bool(body.echo)), ("suffix", bool(body.suffix)), ("best_of", body.best_of)):
        if wanted and (field != "best_of" or wanted != 1):
            raise UnsupportedError(f"{field} is not supported", param=field)
    params = _params(body, _within(body.logprobs, 0, MAX_LOGPROBS, "logprobs"))
    prompt = body.prompt
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return Content(params, text=prompt)
    if all(isinstance(i, int) and not isinstance(i, bool) for i in prompt):
        return Content(params, ids=list(prompt))
    if all(isinstance(p, str | list) for p in prompt):
        raise UnsupportedError("several prompts in one request are not supported", param="prompt")
    raise BadRequestError("prompt is neither a string nor a list of token ids", param="prompt")


def _params(body: _Body, logprobs: int | None) -> Params:
    if body.n not in (None, 1):
        raise UnsupportedError("n other than 1 is not supported", param="n")
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    if len(stop) > MAX_STOPS or "" in stop:
        raise BadRequestError(f"stop takes 1 to {MAX_STOPS} strings, none of them empty", param="stop")
    field = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    return Params(
        max_tokens=_within(limit, 1, 2**31 - 1, field),
        temperature=_or(_within(body.temperature, 0.0, 2.0, "temperature"), 1.0),
        top_p=_or(_within(body.top_p, 0.0, 1.0, "top_p", above=True), 1.0),
        seed=_within(body.seed, -(2**63), 2**63 - 1, "seed"),
        stop=stop,
        logprobs=logprobs,
        frequency_penalty=_or(_within(body.frequency_penalty, -2.0, 2.0, "frequency_penalty"), 0.0),
        presence_penalty=_or(_within(body.presence_penalty, -2.0, 2.0, "presence_penalty"), 0.0),
        ignore_eos=bool(body.ignore_eos),
        return_token_ids=bool(body.return_token_ids),
        max_tokens_field=field,
    )


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _within(value: N | None, low: N, high: N, field: str, *, above: bool = False) -> N | None:
    """`value` if it is in range (`above`: greater than `low`). Raises BadRequestError."""
    if value is None or (low <= value <= high and not (above and value == low)):
        return value
    raise BadRequestError(f"{field} = {value} is not in {'(' if above else '['}{low}, {high}]", param=field)
