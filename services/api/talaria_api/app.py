"""The FastAPI application: small routes as usual, the call endpoints as plain ASGI routes in front of them."""

from __future__ import annotations

import time
from typing import Any

import structlog
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from talaria_api import errors, openapi
from talaria_api.endpoint import CallEndpoint, Parts
from talaria_api.errors import MethodNotAllowedError, RouteNotFoundError
from talaria_api.readiness import Readiness
from talaria_api.schemas import ErrorBody, ErrorShape, Live, Model, ModelList, Ready
from talaria_api.validate import parse_chat, parse_completion
from talaria_common import __version__
from talaria_common.errors import ModelNotFoundError, TalariaError
from talaria_common.ids import MODEL_CHARS
from talaria_common.metrics import CONTENT_TYPE

log = structlog.get_logger(__name__)

CHAT_PATH = "/v1/chat/completions"
COMPLETIONS_PATH = "/v1/completions"
CALLS = {CHAT_PATH: "chat", COMPLETIONS_PATH: "completions"}


def build(parts: Parts, readiness: Readiness) -> Front:
    """The application over `parts`. Whoever serves it also attaches the link to the bus."""
    app = FastAPI(title="Talaria", version=__version__, redirect_slashes=False, docs_url=None, redoc_url=None)
    calls: dict[str, ASGIApp] = {
        CHAT_PATH: CallEndpoint("chat", parse_chat, parts),
        COMPLETIONS_PATH: CallEndpoint("completions", parse_completion, parts),
    }
    app.router.routes[:0] = [Route(path, endpoint, methods=["POST"]) for path, endpoint in calls.items()]
    _models(app, parts)
    _health(app, parts, readiness)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(TalariaError, _talaria_error)
    app.add_exception_handler(Exception, _bug)
    openapi.install(app, keys=bool(parts.settings.auth.keys))
    return Front(app, parts, calls)


def _models(app: FastAPI, parts: Parts) -> None:
    created = int(time.time())
    denied: dict[int | str, dict[str, Any]] = {401: {"model": ErrorBody, "description": "no valid API key"}}

    def describe(name: str) -> Model:
        configured = parts.settings.models.get(name)
        facts = parts.cluster.model(name)
        context = (configured.context_tokens if configured else None) or facts.context_tokens or None
        fresh = parts.cluster.fresh(parts.clock.now())
        ready = facts.ready and fresh
        reason = None if ready else facts.reason or "the cluster view is stale"
        return Model(id=name, created=created, ready=ready, context_length=context, reason=reason)

    @app.get("/v1/models", responses=denied, tags=["models"])
    async def list_models(request: Request) -> ModelList:
        """The models of the catalog, and those that an instance serves without being in it."""
        parts.auth.tenant(_authorization(request))
        names = dict.fromkeys([*parts.settings.models, *sorted(parts.cluster.served())])
        return ModelList(data=[describe(name) for name in names])

    missing: dict[int | str, dict[str, Any]] = {404: {"model": ErrorBody, "description": "no such model"}}

    @app.get("/v1/models/{model:path}", responses=denied | missing, tags=["models"])
    async def get_model(model: str, request: Request) -> Model:
        """One model."""
        parts.auth.tenant(_authorization(request))
        if model not in parts.settings.models and model not in parts.cluster.served():
            raise ModelNotFoundError(f"the model {model[:MODEL_CHARS]!r} does not exist; see /v1/models", param="model")
        return describe(model)


def _health(app: FastAPI, parts: Parts, readiness: Readiness) -> None:
    @app.get("/livez", tags=["health"])
    async def livez() -> Live:
        """The process runs."""
        return Live()

    @app.get("/readyz", responses={503: {"model": Ready, "description": "not ready"}}, tags=["health"])
    async def readyz(response: Response) -> Ready:
        """Calls can be served; else the reasons why not."""
        reasons = await readiness.reasons()
        if not reasons:
            return Ready(ready=True)
        response.status_code = 503
        shape = ErrorShape(message="; ".join(reasons), type="server_error", param=None, code="unavailable")
        return Ready(ready=False, reasons=reasons, error=shape)

    @app.get("/metrics", response_class=Response, tags=["health"], responses={200: {"content": {"text/plain": {}}}})
    async def metrics() -> Response:
        """Prometheus metrics."""
        return Response(parts.metrics.text(), headers={"content-type": CONTENT_TYPE})


def _authorization(request: Request) -> bytes | None:
    value = request.headers.get("authorization")
    return None if value is None else value.encode("latin-1")


# --- errors that do not come from the call endpoints


def _answer(error: TalariaError, extra: dict[str, str] | None = None) -> Response:
    headers = {name.decode(): value.decode() for name, value in errors.headers(error)} | (extra or {})
    return Response(errors.body(error), error.status, headers, media_type="application/json")


async def _talaria_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, TalariaError)
    return _answer(error)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        method_error = MethodNotAllowedError(f"{request.method} is not allowed on {request.url.path}")
        return _answer(method_error, dict(error.headers or {}))
    if error.status_code == 404:
        return _answer(RouteNotFoundError(f"there is nothing at {request.url.path}"))
    return _answer(TalariaError(str(error.detail)))


async def _bug(_: Request, error: Exception) -> Response:
    log.error("unexpected error", error=repr(error), exc_info=error)
    return _answer(TalariaError("an unexpected error happened; it was logged"))


class Front:
    """Sends calls straight to their endpoints, which count themselves, and counts all other requests.

    It stands before the framework and all its layers, which would only cost time. The routes of the calls stay in the
    application for what is not a POST.
    """

    def __init__(self, app: ASGIApp, parts: Parts, calls: dict[str, ASGIApp]) -> None:
        self._app = app
        self._calls = calls
        self._metrics = parts.metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, and remember the status."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["method"] == "POST" and (call := self._calls.get(scope["path"])) is not None:
            await call(scope, receive, send)
            return

        async def counting(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._metrics.request(_label(scope["path"]), message["status"])
            await send(message)

        await self._app(scope, receive, counting)


def _label(path: str) -> str:
    """A bounded set of labels, whatever paths people try."""
    if path in ("/livez", "/readyz", "/metrics", "/openapi.json"):
        return path[1:]
    if path in CALLS:
        return CALLS[path]
    return "models" if path == "/v1/models" or path.startswith("/v1/models/") else "other"
