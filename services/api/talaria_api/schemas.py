"""Pydantic models of the HTTP bodies: they make the OpenAPI document and the exact error messages.

The fast path (`validate`) decides in most cases without them. Fields that we cannot honour are declared, so that they
are refused by name instead of being dropped; unknown fields are ignored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from talaria_common.ids import MODEL_CHARS

UNSUPPORTED = "unsupported"
"""Type of the Pydantic errors that become `UnsupportedError`."""


class _Only:
    """Metadata of a field of which only values that change nothing are accepted; `schema` describes them."""

    def __init__(self, harmless: Callable[[Any], bool], schema: dict[str, Any]) -> None:
        self._harmless = harmless
        self._schema = schema

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        del schema, handler
        return dict(self._schema)

    def _check(self, value: Any) -> Any:
        if value is None or self._harmless(value):
            return value
        raise PydanticCustomError(UNSUPPORTED, "this parameter is not supported")


def _is(*values: Any) -> Callable[[Any], bool]:
    return lambda value: any(type(value) is type(v) and value == v for v in values)


_NULL = {"type": "null"}
_Null = Annotated[Any, _Only(lambda _: False, _NULL)]
_EmptyList = Annotated[Any, _Only(_is([]), {"anyOf": [{"type": "array", "maxItems": 0}, _NULL]})]
_EmptyMap = Annotated[Any, _Only(_is({}), {"anyOf": [{"type": "object", "maxProperties": 0}, _NULL]})]
_One = Annotated[Any, _Only(_is(1, 1.0), {"anyOf": [{"enum": [1]}, _NULL]})]
_Zero = Annotated[Any, _Only(_is(0, 0.0), {"anyOf": [{"enum": [0]}, _NULL]})]
_NoTopK = Annotated[Any, _Only(_is(-1, 0), {"anyOf": [{"enum": [-1, 0]}, _NULL]})]
_NoTool = Annotated[Any, _Only(_is("none", "auto"), {"anyOf": [{"enum": ["none", "auto"]}, _NULL]})]
_TextOnly = Annotated[
    Any, _Only(_is([], ["text"]), {"anyOf": [{"type": "array", "items": {"enum": ["text"]}, "maxItems": 1}, _NULL]})
]
_NoSuffix = Annotated[Any, _Only(_is(""), {"anyOf": [{"enum": [""]}, _NULL]})]
_NoEcho = Annotated[Any, _Only(_is(False), {"anyOf": [{"enum": [False]}, _NULL]})]
_TextFormat = Annotated[
    Any,
    _Only(
        lambda v: isinstance(v, dict) and v.get("type") == "text",
        {"anyOf": [{"type": "object", "properties": {"type": {"enum": ["text"]}}, "required": ["type"]}, _NULL]},
    ),
]


def _supported_role(role: str) -> str:
    if role in {"system", "developer", "user", "assistant"}:
        return role
    if role in {"tool", "function"}:
        raise PydanticCustomError(UNSUPPORTED, "messages of tools are not supported")
    raise PydanticCustomError("role", "the role is none of system, developer, user and assistant")


def _text_part(kind: str) -> str:
    if kind == "text":
        return kind
    raise PydanticCustomError(UNSUPPORTED, "only content parts of type 'text' are supported")


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", defer_build=True)


class TextPart(_Body):
    """A part of a message's content."""

    type: Annotated[str, AfterValidator(_text_part), WithJsonSchema({"type": "string", "enum": ["text"]})]
    text: str


class ChatMessage(_Body):
    """A message of the conversation. `content` may be null in an assistant's message."""

    role: Annotated[
        str,
        AfterValidator(_supported_role),
        WithJsonSchema({"type": "string", "enum": ["system", "developer", "user", "assistant"]}),
    ]
    content: str | list[TextPart] | None = Field(None, description="null is understood in an assistant's message only")
    name: str | None = None
    tool_calls: _EmptyList = None
    function_call: _Null = None
    audio: _Null = None
    refusal: _Null = None

    @model_validator(mode="after")
    def _has_content(self) -> ChatMessage:
        if self.content is None and self.role != "assistant":
            raise PydanticCustomError("content", "content is missing")
        return self


class StreamOptions(_Body):
    """Options of a stream."""

    include_usage: bool | None = Field(None, description="a last chunk with usage and no choices")


Stop = Annotated[str, Field(min_length=1)]


class _CommonRequest(_Body):
    model: str = Field(min_length=1, max_length=MODEL_CHARS, description="a model's id, see /v1/models")
    stream: bool | None = None
    stream_options: StreamOptions | None = Field(None, description="only with stream = true")
    temperature: float | None = Field(None, ge=0, le=2, description="0: greedy; default 1")
    top_p: float | None = Field(None, gt=0, le=1)
    max_tokens: int | None = Field(None, ge=1, le=2**31 - 1)
    stop: Stop | Annotated[list[Stop], Field(max_length=4)] | None = None
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    n: _One = None
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    user: str | None = Field(None, description="accepted; not a session")
    metadata: dict[str, Any] | None = Field(None, description="session_id or user_id in it may name the session")
    prompt_cache_key: str | None = Field(None, description="names the session if nothing else does")
    ignore_eos: bool | None = Field(None, description="extension: go on past the end-of-sequence token")
    return_token_ids: bool | None = Field(None, description="extension: token_ids and prompt_token_ids in the answer")
    logit_bias: _EmptyMap = None
    guided_json: _Null = None
    guided_regex: _Null = None
    guided_choice: _Null = None
    guided_grammar: _Null = None
    structured_outputs: _Null = None
    regex: _Null = None
    ebnf: _Null = None
    json_schema: _Null = None
    structural_tag: _Null = None
    top_k: _NoTopK = None
    min_p: _Zero = None
    repetition_penalty: _One = None
    min_tokens: _Zero = None
    stop_token_ids: _EmptyList = None
    bad_words: _EmptyList = None
    allowed_token_ids: _Null = None
    include_stop_str_in_output: _NoEcho = None
    continue_final_message: _NoEcho = None
    chat_template: _Null = None
    chat_template_kwargs: _EmptyMap = None
    reasoning_effort: _Null = None
    verbosity: _Null = None
    lora_path: _Null = None

    @model_validator(mode="after")
    def _options_need_stream(self) -> _CommonRequest:
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError("field:stream_options", "stream_options needs stream = true")
        return self


class ChatRequest(_CommonRequest):
    """Body of POST /v1/chat/completions."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1, le=2**31 - 1, description="goes before max_tokens")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20, description="only with logprobs = true")
    tools: _EmptyList = None
    tool_choice: _NoTool = None
    functions: _EmptyList = None
    function_call: _NoTool = None
    response_format: _TextFormat = None
    modalities: _TextOnly = None
    audio: _Null = None
    prediction: _Null = None
    web_search_options: _Null = None

    @model_validator(mode="after")
    def _top_needs_logprobs(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise PydanticCustomError("field:top_logprobs", "top_logprobs needs logprobs = true")
        return self


def _one_text(prompt: Any) -> Any:
    if isinstance(prompt, list) and not (len(prompt) == 1 and isinstance(prompt[0], str)):
        raise PydanticCustomError(UNSUPPORTED, "only one prompt, and only as text, is supported")
    text = prompt[0] if isinstance(prompt, list) else prompt
    if not isinstance(text, str):
        raise PydanticCustomError("prompt", "the prompt should be a string or a list of one string")
    if not text:
        raise PydanticCustomError("prompt", "the prompt is empty")
    return prompt


class CompletionRequest(_CommonRequest):
    """Body of POST /v1/completions."""

    prompt: Annotated[
        Any,
        AfterValidator(_one_text),
        WithJsonSchema(
            {
                "anyOf": [
                    {"type": "string", "minLength": 1},
                    {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1, "maxItems": 1},
                ]
            }
        ),
    ]
    logprobs: int | None = Field(None, ge=0, le=5)
    best_of: _One = None
    suffix: _NoSuffix = None
    echo: _NoEcho = None


# --- answers: for the document only; what is sent is written by `render`


class PromptDetails(BaseModel):
    """Where the prompt's tokens came from."""

    cached_tokens: int
    cache_source: Literal["none", "device", "host"]


class Usage(BaseModel):
    """Token counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class AnswerMessage(BaseModel):
    """The assistant's message."""

    role: Literal["assistant"]
    content: str
    refusal: None = None


class ChatChoice(BaseModel):
    """The one choice."""

    index: Literal[0]
    message: AnswerMessage
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length"]
    token_ids: list[int] | None = None


class ChatCompletion(BaseModel):
    """Answer of POST /v1/chat/completions without stream; with it, `chat.completion.chunk` events."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | None = None


class TextChoice(BaseModel):
    """The one choice."""

    index: Literal[0]
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length"]
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class TextCompletion(BaseModel):
    """Answer of POST /v1/completions without stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[TextChoice]
    usage: Usage
    prompt_token_ids: list[int] | None = None


class Model(BaseModel):
    """A model of the catalog. `ready`, `context_length` and `reason` are extensions."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "talaria"
    ready: bool = Field(description="an instance can serve it now")
    context_length: int | None = Field(description="longest prompt + completion, tokens; null while unknown")
    reason: str | None = Field(None, description="why it is not ready")


class ModelList(BaseModel):
    """Answer of GET /v1/models."""

    object: Literal["list"] = "list"
    data: list[Model]


class ErrorShape(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(BaseModel):
    """Every error has this body."""

    error: ErrorShape


class Live(BaseModel):
    """Answer of GET /livez."""

    live: Literal[True] = True


class Ready(BaseModel):
    """Answer of GET /readyz: 200 when ready, else 503 with the reasons (and the error's usual shape beside them)."""

    ready: bool
    reasons: list[str] = []
    error: ErrorShape | None = None
