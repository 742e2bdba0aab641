"""The OpenAPI document: FastAPI's, with the call endpoints, which are plain ASGI routes, described beside it."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from talaria_api.intake import PRIORITY_HEADER
from talaria_api.schemas import ChatCompletion, ChatRequest, CompletionRequest, ErrorBody, TextCompletion
from talaria_common.settings import PRIORITY_RANGE

_REF = "#/components/schemas/{model}"
_REFUSALS = {
    "400": "the body is wrong (invalid_request, context_length_exceeded), or asks for what we do not do "
    "(unsupported_parameter); `param` names the field",
    "401": "no valid API key",
    "404": "no such model (model_not_found)",
    "408": "the body did not arrive in time",
    "413": "the body is larger than the limit, which the message gives",
    "415": "the body is not JSON by its headers, or is compressed",
    "429": "no capacity now (overloaded); Retry-After says when to come back",
    "500": "the engine failed on this call (engine_error)",
    "502": "an instance died under this call (instance_lost)",
    "503": "nothing can serve this now (unavailable, bus_unavailable), with the reason",
    "504": "the call's deadline passed (deadline_exceeded)",
}
_DESCRIPTION = (
    "The header X-Talaria-Timeout-S (seconds, more than 0) shortens the call's deadline; past it the answer is 504. "
    "The session headers of several agents are understood beside those below."
)
_HEADERS = {
    "X-Talaria-Request": "id of the call",
    "X-Talaria-Session": "the session that the call was counted to",
    "X-Talaria-Session-Source": "which convention named the session",
    "X-Talaria-Instance": "the instance that answered",
    "X-Talaria-Route": "why it was chosen: lease, cost, retry or policy",
    "X-Talaria-Cache": "where the cached part of the prompt came from: none, device or host",
}


def install(app: FastAPI, *, keys: bool) -> None:
    """Make `app.openapi()` tell of everything. `keys`: API keys are configured."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _document(app, keys=keys)
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign] # FastAPI's documented way to extend the document


def _document(app: FastAPI, *, keys: bool) -> dict[str, Any]:
    doc = get_openapi(title=app.title, version=app.version, routes=app.routes)
    models: list[type[BaseModel]] = [ChatRequest, CompletionRequest, ChatCompletion, TextCompletion, ErrorBody]
    refs, definitions = models_json_schema([(m, "validation") for m in models], ref_template=_REF)
    components = doc.setdefault("components", {})
    components["schemas"] = components.get("schemas", {}) | definitions.get("$defs", {})
    schema = {model: refs[(model, "validation")] for model in models}
    doc["paths"]["/v1/chat/completions"] = _call("Chat completion", schema[ChatRequest], schema[ChatCompletion], schema)
    doc["paths"]["/v1/completions"] = _call(
        "Text completion", schema[CompletionRequest], schema[TextCompletion], schema
    )
    if keys:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        for path, item in doc["paths"].items():
            if path.startswith("/v1/"):
                for operation in item.values():
                    operation["security"] = [{"key": []}]
    return doc


def _call(summary: str, body: Any, answer: Any, schema: dict[type[BaseModel], Any]) -> dict[str, Any]:
    error = {"application/json": {"schema": schema[ErrorBody]}}
    stream: dict[str, Any] = {"text/event-stream": {}}
    ok = {
        "description": "The answer: whole, or with stream = true as server-sent events of chunks, ended by [DONE].",
        "content": {"application/json": {"schema": answer}} | stream,
        "headers": {name: {"description": text, "schema": {"type": "string"}} for name, text in _HEADERS.items()},
    }
    refusals = {status: {"description": text, "content": error} for status, text in _REFUSALS.items()}
    return {
        "post": {
            "summary": summary,
            "tags": ["calls"],
            "description": _DESCRIPTION,
            "operationId": summary.lower().replace(" ", "_"),
            "parameters": [
                _header("X-Talaria-Session-ID", "names the session; see also -Parent-Session-ID and -Session-Final"),
                _header("X-Talaria-Parent-Session-ID", "the session that this one was started from"),
                _header("X-Talaria-Session-Final", "true: the session's last call"),
                _header(
                    PRIORITY_HEADER,
                    "0 if absent: among calls that wait the highest goes first; below 0 lets the others go first, "
                    "above 0 needs router.tenant_max_priority",
                    {"type": "integer", "minimum": -PRIORITY_RANGE, "maximum": PRIORITY_RANGE},
                ),
            ],
            "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
            "responses": {"200": ok} | refusals,
        }
    }


def _header(name: str, text: str, schema: dict[str, Any] | None = None) -> dict[str, Any]:
    schema = schema or {"type": "string"}
    return {"name": name, "in": "header", "required": False, "description": text, "schema": schema}
