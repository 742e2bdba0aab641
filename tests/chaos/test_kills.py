"""kill -9, SIGSTOP and restarts under load, on real processes with paced sim engines (DESIGN 10)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from tests.mesh.settings import PATIENT, sim
from tests.support.load import Outcome, session, stream_chat
from tests.support.mesh import Mesh, mesh
from tests.support.waiting import until

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.mesh,
    pytest.mark.timeout(150),
    pytest.mark.asyncio(loop_scope="module"),
]

PACED = {"ttft_ms": 20.0, "decode_step_ms": 20.0, "switch_ms": 20.0}
CALLS, SESSIONS, TOKENS = 4, 12, 25


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Mesh]:
    settings = sim(
        {"id": "cold-0", "sim": PACED, "slot_ms": 300.0, "drain_ms": 50.0},
        {"id": "cold-1", "sim": PACED, "slot_ms": 300.0, "drain_ms": 50.0},
        api=PATIENT,
    )
    async with mesh(tmp_path_factory.mktemp("kills"), settings, apis=2) as it:
        yield it


@pytest_asyncio.fixture(loop_scope="module")
async def running(shared: Mesh) -> Mesh:
    """The whole mesh, well: what the last test killed is started again, as `talaria up` would."""
    for part in shared.parts.values():
        assert part.process is not None
        if part.process.poll() is not None:
            part.start()
        part.kill(signal.SIGCONT)
    for url in shared.urls:
        await shared.wait_ready(40, url)
    await shared.all_instances_ready(40)
    return shared


def load(http: httpx.AsyncClient, tag: str, **body: object) -> asyncio.Future[list[list[Outcome]]]:
    return asyncio.gather(
        *(
            session(
                http,
                f"{tag}-{n}",
                f"model-{'abc'[n % 3]}",
                calls=CALLS,
                first=f"task {n} " * 20,
                grow="tool says",
                max_tokens=TOKENS,
                gap_s=0.05,
                stream=n % 4 > 0,
                **body,
            )
            for n in range(SESSIONS)
        )
    )


async def under_way(it: Mesh, tag: str) -> None:
    """Returns when streams of the load are flowing."""
    bus = await it.bus()
    flowing = asyncio.Event()
    await bus.subscribe("talaria.v1.tokens.>", lambda m: flowing.set() if b'"delta"' in m.data else None)
    await asyncio.wait_for(flowing.wait(), 20)
    await bus.close()


async def serves(it: Mesh, url: str = "") -> None:
    """The system answers again by itself, every model."""
    await it.wait_ready(40, url)
    async with httpx.AsyncClient(base_url=url or it.url, timeout=60) as http:
        for model in ("model-a", "model-b", "model-c"):
            async with asyncio.timeout(40):
                while (
                    await stream_chat(http, model, [{"role": "user", "content": "again"}], session="x", max_tokens=3)
                ).error:
                    await asyncio.sleep(0.2)


def only_streams_broke(runs: list[list[Outcome]], victim: str) -> None:
    """What failed had a token already, and came from `victim`; its headers say so unless they went out before it did."""
    for c in (c for calls in runs for c in calls if c.error):
        assert c.started, f"{c.session}/{c.call} had no token yet and failed: {c.error}"
        assert c.headers.get("x-talaria-instance", victim) == victim, f"{c.session}/{c.call}: {c.error}"


def errors(runs: list[list[Outcome]]) -> list[str]:
    return [f"{c.session}/{c.call}: {c.error}" for calls in runs for c in calls if c.error]


async def test_killed_telemetry_loses_no_call(running: Mesh) -> None:
    work = load(running.http, "t")
    await under_way(running, "t")
    running.parts["telemetry-0"].kill()
    assert errors(await work) == []
    assert errors(await load(running.http, "t2")) == []  # also new sessions, with telemetry still away
    running.parts["telemetry-0"].start()
    await serves(running)


async def test_killed_router_loses_no_call(running: Mesh) -> None:
    work = load(running.http, "r")
    await under_way(running, "r")
    running.parts["router-0"].kill()
    await asyncio.sleep(0.5)
    running.parts["router-0"].start()
    assert errors(await work) == []
    await serves(running)


async def test_killed_api_takes_only_its_own_clients(running: Mesh) -> None:
    async with httpx.AsyncClient(base_url=running.urls[1], timeout=60) as other:
        mine, theirs = load(running.http, "a"), load(other, "b")
        await under_way(running, "a")
        running.parts["api-1"].kill()
        assert errors(await mine) == []
        broken = [c for calls in await theirs for c in calls if c.error]
        assert broken
    running.parts["api-1"].start()
    await serves(running, running.urls[1])


async def test_killed_instance_breaks_only_streams_past_their_first_token(running: Mesh) -> None:
    work = load(running.http, "i")
    await under_way(running, "i")
    running.parts["cold-1"].kill()
    runs = await work
    only_streams_broke(runs, "cold-1")
    running.parts["cold-1"].start()
    await serves(running)


def engine_pids(it: Mesh, iid: str) -> list[int]:
    import psutil

    found = []
    for process in psutil.Process(it.parts[iid].pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it ends in this moment
            if "talaria_gpu" in " ".join(process.cmdline()):
                found.append(process.pid)
    return found


async def test_killed_engine_breaks_only_streams_past_their_first_token(running: Mesh) -> None:
    work = load(running.http, "e")
    await under_way(running, "e")
    (before,) = engine_pids(running, "cold-0")
    os.kill(before, signal.SIGKILL)
    runs = await work
    only_streams_broke(runs, "cold-0")
    await serves(running)
    await until(lambda: engine_pids(running, "cold-0") not in ([], [before]), 20, "another engine")


async def test_the_only_instance_of_a_model_is_waited_for(tmp_path: Path) -> None:
    """Nobody else serves what the killed engine did: calls without a token wait for its restart."""
    settings = sim({"id": "cold-0", "sim": PACED, "slot_ms": 300.0, "drain_ms": 50.0}, api=PATIENT)
    async with mesh(tmp_path, settings) as it:
        work = load(it.http, "o")
        await under_way(it, "o")
        (before,) = engine_pids(it, "cold-0")
        os.kill(before, signal.SIGKILL)
        runs = await asyncio.wait_for(work, 90)
        only_streams_broke(runs, "cold-0")
        assert any(c.error for calls in runs for c in calls), "the engine was killed in vain"
        await serves(it)


async def test_stopped_instance_is_left_alone_and_comes_back(running: Mesh) -> None:
    work = load(running.http, "s")
    await under_way(running, "s")
    running.parts["cold-1"].kill(signal.SIGSTOP)
    runs = await asyncio.wait_for(work, 90)
    only_streams_broke(runs, "cold-1")
    running.parts["cold-1"].kill(signal.SIGCONT)
    await serves(running)


async def test_restarted_nats_is_found_again(running: Mesh) -> None:
    work = load(running.http, "n")
    await under_way(running, "n")
    running.parts["nats"].kill()
    await asyncio.sleep(0.3)
    running.parts["nats"].start()
    runs = await asyncio.wait_for(work, 90)  # nothing hangs; frames lost in the gap may break streams
    for c in (c for calls in runs for c in calls):
        assert c.done or c.error
    await serves(running)
    assert errors(await load(running.http, "n2")) == []


async def test_nats_that_stands_still_costs_time_only(running: Mesh) -> None:
    work = load(running.http, "h")
    await under_way(running, "h")
    running.parts["nats"].kill(signal.SIGSTOP)
    await asyncio.sleep(PATIENT["silence_s"] + 2)  # longer than any silence that is taken for death
    running.parts["nats"].kill(signal.SIGCONT)
    assert errors(await asyncio.wait_for(work, 90)) == []
    await serves(running)


async def test_client_that_leaves_frees_its_slot(running: Mesh) -> None:
    bus = await running.bus()
    ended: asyncio.Queue[bytes] = asyncio.Queue()
    await bus.subscribe("talaria.v1.completion.*", lambda m: ended.put_nowait(m.data))
    await bus.flush()
    body = {"model": "model-a", "messages": [{"role": "user", "content": "x"}], "stream": True, "max_tokens": 2000}
    async with running.http.stream("POST", "/v1/chat/completions", json=body) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                break
    data = await asyncio.wait_for(ended.get(), 20)  # 2000 tokens would take 40 s
    await bus.close()
    assert b'"ok":false' in data
