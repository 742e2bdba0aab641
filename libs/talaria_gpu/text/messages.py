"""OpenAI chat messages, brought to what chat templates read: role and plain-text content."""

from __future__ import annotations

from typing import Any, NotRequired, TypedDict

from talaria_common.errors import BadRequestError, UnsupportedError

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
"""Role in the body -> role in the template. "developer" is OpenAI's newer name of the system role."""


class ChatMessage(TypedDict):
    """A message as the template sees it."""

    role: str
    content: str
    name: NotRequired[str]


def normalise(messages: list[dict[str, Any]]) -> list[ChatMessage]:
    """Messages with string content, in the same order.

    Content may be a string, null (read as "") or a list of text parts, whose texts are joined.

    Raises:
        BadRequestError: no message, or a shape that OpenAI's API does not have; `param` names it.
        UnsupportedError: a role, part type or tool call that we cannot honour yet.
    """
    if not messages:
        raise BadRequestError("messages is empty: at least one is needed", param="messages")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _message(message: dict[str, Any], where: str) -> ChatMessage:
    if not isinstance(message, dict):
        raise BadRequestError(f"{where} is not an object", param=where)
    role = message.get("role")
    if not isinstance(role, str):
        raise BadRequestError(f"{where}.role is missing or not a string", param=f"{where}.role")
    if role not in _ROLES:
        raise UnsupportedError(f"role {role!r} is not supported", param=f"{where}.role")
    for field in ("tool_calls", "function_call", "audio"):
        if message.get(field):
            raise UnsupportedError(f"{field} is not supported", param=f"{where}.{field}")
    out = ChatMessage(role=_ROLES[role], content=_text(message.get("content"), f"{where}.content"))
    if isinstance(message.get("name"), str):
        out["name"] = message["name"]
    return out


def _text(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRequestError(f"{where} is neither a string nor a list of parts", param=where)
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise UnsupportedError(f"content part of type {kind!r} is not supported", param=f"{where}[{i}].type")
        text = part.get("text")
        if not isinstance(text, str):
            raise BadRequestError(f"{where}[{i}].text is not a string", param=f"{where}[{i}].text")
        texts.append(text)
    return "".join(texts)
