"""Fixtures that every test folder shares.

nats_url     a NATS server shared by the session; its streams and buckets are removed after each test
nats_server  a NATS server of this test's own, to stop, start and starve
bus          a connected bus, in memory and on NATS; `bus_pair` gives two connections to the same one
"""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import nats
import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling

# importlib import mode adds nothing to sys.path; `tests.support` is imported by name.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from talaria_common.bus import Bus, MemoryHub, NatsBus
from tests.support.nats_server import NatsServer

# The same examples in every run, so that a change fails for what it changed; `make explore` looks for new ones.
settings.register_profile(
    "default", max_examples=60, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("explore", parent=settings.get_profile("default"), max_examples=1000, derandomize=False)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

Connect = Callable[[], Awaitable[Bus]]

LONG = (
    "mesh/test_real",
    "gpu/engine/sglang",
    "gpu/text",
    "gpu/models",
    "cli/test_up_real",
    "chaos",
    "replay",
    "cli",
    "gpu/engine",
    "mesh",
)
"""Folders and files that take minutes, the longest first: with several workers (`make test`), nobody waits at the end
for one that was begun last."""


SGLANG = ("gpu/engine/sglang", "gpu/text", "gpu/models", "gpu/weights")
"""Folders whose tests one worker runs: importing SGLang and transformers takes half a minute of CPU."""


class Scopes(LoadScopeScheduling):
    """With several workers, each runs whole files (whole meshes and engines with them)."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return "sglang" if file.removeprefix("tests/").startswith(SGLANG) else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Scopes:
    """How xdist hands out tests (`--dist load`)."""
    return Scopes(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The long ones first; within a file, the order stays."""
    here = Path(__file__).parent

    def rank(item: pytest.Item) -> int:
        path = item.path.relative_to(here).as_posix()
        return next((n for n, prefix in enumerate(LONG) if path.startswith(prefix)), len(LONG))

    items.sort(key=rank)


@pytest.fixture(scope="session")
def _shared_nats(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    server = NatsServer(tmp_path_factory.mktemp("nats")).start()
    yield server
    server.stop()


@pytest.fixture
async def nats_url(_shared_nats: NatsServer) -> AsyncIterator[str]:
    yield _shared_nats.url
    await _forget(_shared_nats.url)


async def _forget(url: str) -> None:
    client = await nats.connect(url)
    js = client.jetstream()
    for stream in await js.streams_info():
        # A stream made anew right after its deletion may find the old messages (nats-server 2.15): purge first.
        await js.purge_stream(stream.config.name)
        await js.delete_stream(stream.config.name)
    await client.close()


@pytest.fixture
def nats_server(tmp_path: Path) -> Iterator[NatsServer]:
    directory = tmp_path / "nats"
    directory.mkdir()
    server = NatsServer(directory).start()
    yield server
    server.stop()


@pytest.fixture(params=["memory", "nats"])
async def connect(request: pytest.FixtureRequest) -> AsyncIterator[Connect]:
    """Makes connections to one bus, all closed after the test."""
    async with AsyncExitStack() as stack:
        if request.param == "memory":
            hub = MemoryHub()

            async def one() -> Bus:
                bus = hub.connect()
                stack.push_async_callback(bus.close)
                return bus
        else:
            url = request.getfixturevalue("_shared_nats").url
            stack.push_async_callback(_forget, url)

            async def one() -> Bus:
                bus = await NatsBus.connect(url, name="test")
                stack.push_async_callback(bus.close)
                return bus

        yield one


@pytest.fixture
async def bus(connect: Connect) -> Bus:
    return await connect()


@pytest.fixture
async def bus_pair(connect: Connect) -> tuple[Bus, Bus]:
    return await connect(), await connect()
