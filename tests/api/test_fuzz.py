"""Schemathesis over the OpenAPI document: no 5xx, and nothing that the document does not say."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from talaria_common.bus import MemoryHub
from talaria_common.bus.interface import Bus
from tests.api.doubles import answers, edge


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """The api and its scripted peers on a loop in another thread: schemathesis is synchronous."""
    came: list[str] = []
    started, stop = threading.Event(), threading.Event()

    async def serve() -> None:
        hub = MemoryHub()

        async def connect() -> Bus:
            return hub.connect()

        async with edge(connect, answers) as e:
            came.append(e.url)
            started.set()
            await asyncio.to_thread(stop.wait)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert started.wait(10)
    yield came[0]
    stop.set()
    thread.join(20)


CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


def likely(body: Any, model: str = "m") -> None:
    """Mend what the document's schema cannot say, or nearly all would be refused for the same few reasons."""
    if not isinstance(body, dict):
        return
    if isinstance(body.get("model"), str):
        body["model"] = model
    for field in ("max_tokens", "max_completion_tokens"):
        if isinstance(body.get(field), int) and body[field] > 1:
            body[field] = min(body[field], 50)
    for field, needs in (("stream_options", "stream"), ("top_logprobs", "logprobs")):
        if not body.get(needs) and isinstance(body.get(field), dict | int):
            del body[field]
    for message in body["messages"] if isinstance(body.get("messages"), list) else ():
        if isinstance(message, dict) and message.get("content") is None:
            message["content"] = "x"


PATHS = [
    "POST /v1/chat/completions",
    "POST /v1/completions",
    "GET /v1/models",
    "GET /v1/models/{model}",
    "GET /livez",
    "GET /readyz",
    "GET /metrics",
]


@pytest.mark.parametrize("path", PATHS)
def test_no_server_error_and_a_true_document(url: str, path: str) -> None:
    try_all(url, path)


def try_all(url: str, path: str, model: str = "m", examples: int = 30) -> None:
    """Call `path` with bodies, good and bad, that the document allows; every answer is one that it promises."""
    method, _, route = path.partition(" ")
    operation = schemathesis.openapi.from_url(f"{url}/openapi.json")[route][method]
    statuses = set()

    @given(operation.as_strategy() | operation.as_strategy(generation_mode=GenerationMode.NEGATIVE))
    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate])
    def run(case: Any) -> None:
        likely(case.body, model)
        statuses.add(case.call_and_validate(checks=CHECKS).status_code)

    run()
    assert (200 in statuses) or "{" in path
    if method == "POST":
        assert 400 in statuses
