"""Says exactly what is wrong with a body, by reading it again with the Pydantic schemas. Only for refused bodies."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ValidationError

from talaria_api.schemas import UNSUPPORTED, ChatMessage, ChatRequest, CompletionRequest, StreamOptions, TextPart
from talaria_common.errors import BadRequestError, UnsupportedError

_FIELDS = {
    name
    for schema in (ChatRequest, CompletionRequest, ChatMessage, TextPart, StreamOptions)
    for name in schema.model_fields
}
_FIELD_ERROR = "field:"
"""A model validator names the field at fault in its error's type: `field:NAME`."""


def explain_chat(body: bytes) -> None:
    """Raise the exact error of a chat completion's body; return if the schema finds none."""
    _explain(ChatRequest, body)


def explain_completion(body: bytes) -> None:
    """Raise the exact error of a text completion's body; return if the schema finds none."""
    _explain(CompletionRequest, body)


def _explain(schema: type[BaseModel], body: bytes) -> None:
    try:
        schema.model_validate_json(body)
    except ValidationError as e:
        raise _error(e.errors(include_url=False, include_context=False)) from None


def _error(found: list[Any]) -> BadRequestError:
    first = found[0]
    # A union reports each of its branches: the deepest of the first field's errors is the branch that nearly fitted.
    same_field = [e for e in found if e["loc"][:1] == first["loc"][:1]]
    worst = max(same_field, key=lambda e: (len(_path(e["loc"])), not e["type"].endswith("_type")))
    if worst["type"] == "json_invalid":
        return BadRequestError(f"the body is not valid JSON: {worst['msg'].removeprefix('Invalid JSON: ')}")
    if not worst["loc"] and worst["type"] == "model_type":
        return BadRequestError("the body should be a JSON object")
    param = _param(worst)
    message = worst["msg"][:1].lower() + worst["msg"][1:]
    text = f"{param}: {message}" if param else message
    if worst["type"] == UNSUPPORTED:
        return UnsupportedError(text, param=param)
    return BadRequestError(text, param=param)


def _path(loc: tuple[int | str, ...]) -> list[int | str]:
    """The location without the union branches' names."""
    return [part for part in loc if isinstance(part, int) or part in _FIELDS]


def _param(error: Any) -> str | None:
    if error["type"].startswith(_FIELD_ERROR):
        return str(error["type"].removeprefix(_FIELD_ERROR))
    path = _path(error["loc"])
    if error["type"] == "content":
        path.append("content")
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".") or None
