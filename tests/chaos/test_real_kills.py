"""kill -9 under thirty agent sessions on real SGLang (CPU): the whole load of tests/mesh/test_real.py, part by part."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from tests.chaos.test_kills import engine_pids, errors, only_streams_broke, under_way
from tests.mesh.settings import REAL_MODELS, real
from tests.support.load import Outcome, session, stream_chat
from tests.support.mesh import Mesh, mesh

pytestmark = [pytest.mark.soak, pytest.mark.chaos, pytest.mark.mesh, pytest.mark.engine, pytest.mark.timeout(1800)]


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[Mesh]:
    async with mesh(tmp_path, real("cold-0", "cold-1"), apis=2, ready_timeout_s=300) as it:
        yield it


def load(http: httpx.AsyncClient, tag: str, sessions: int = 30, calls: int = 10) -> asyncio.Future[list[list[Outcome]]]:
    models = list(REAL_MODELS)
    return asyncio.gather(
        *(
            session(
                http, f"{tag}-{n}", models[n % 3], calls=calls, max_tokens=24, ignore_eos=True,
                first=f"Task {n}: look at module {n * 7} and say what it does.", grow="The tool printed line",
                stream=n % 4 > 0,
            )
            for n in range(sessions)
        )
    )  # fmt: skip


async def serves(it: Mesh) -> None:
    await it.wait_ready(300)
    for model in REAL_MODELS:
        async with asyncio.timeout(300):
            ask = [{"role": "user", "content": "again"}]
            while (await stream_chat(it.http, model, ask, session="again", max_tokens=3)).error:
                await asyncio.sleep(1.0)


@pytest.mark.parametrize("part", ["telemetry-0", "router-0"])
async def test_killed_control_part_loses_no_call(running: Mesh, part: str) -> None:
    work = load(running.http, part)
    await under_way(running, part)
    running.parts[part].kill()
    await asyncio.sleep(0.5)
    running.parts[part].start()
    assert errors(await work) == []
    await serves(running)


async def test_killed_api_takes_only_its_own_clients(running: Mesh) -> None:
    async with httpx.AsyncClient(base_url=running.urls[1], timeout=600) as other:
        mine, theirs = load(running.http, "mine", 15), load(other, "theirs", 15)
        await under_way(running, "api")
        running.parts["api-1"].kill()
        assert errors(await mine) == []
        assert errors(await theirs)
    await serves(running)


@pytest.mark.parametrize("what", ["instance", "engine"])
async def test_killed_instance_breaks_only_streams_past_their_first_token(running: Mesh, what: str) -> None:
    await killed_under_load(running, what, "cold-1")


@pytest.mark.parametrize("what", ["instance", "engine"])
async def test_the_only_instance_is_waited_for(tmp_path: Path, what: str) -> None:
    """The default cold instance alone: nobody else serves its models while it starts again."""
    async with mesh(tmp_path, real("cold-0"), ready_timeout_s=300) as it:
        await killed_under_load(it, what, "cold-0")


async def killed_under_load(it: Mesh, what: str, victim: str) -> None:
    work = load(it.http, what)
    await under_way(it, what)
    if what == "instance":
        it.parts[victim].kill()
        it.parts[victim].start()
    else:
        (engine,) = engine_pids(it, victim)
        os.kill(engine, signal.SIGKILL)
    only_streams_broke(await work, victim)
    await serves(it)
