"""Schemathesis over the OpenAPI document of a whole mesh: real router, real instances, tokenisers and templates."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from tests.api.test_fuzz import PATHS, try_all
from tests.mesh.settings import sim
from tests.support.mesh import mesh

pytestmark = [pytest.mark.soak, pytest.mark.mesh, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The mesh, watched over by a loop in another thread: schemathesis is synchronous."""
    came: list[str] = []
    started, stop = threading.Event(), threading.Event()
    # A call that names no limit is answered up to the context: the sim engine never stops by itself.
    fast = {"ttft_ms": 1.0, "decode_step_ms": 0.1, "switch_ms": 1.0, "context_tokens": 2048}

    async def serve() -> None:
        async with mesh(tmp_path_factory.mktemp("fuzz"), sim({"id": "cold-0", "sim": fast})) as it:
            came.append(it.url)
            started.set()
            await asyncio.to_thread(stop.wait)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        assert started.wait(120)
        yield came[0]
    finally:
        stop.set()
        thread.join(60)


@pytest.mark.parametrize("path", PATHS)
def test_no_server_error_and_a_true_document(url: str, path: str) -> None:
    try_all(url, path, model="model-a", examples=300)
