"""Collects the facts for `health`: polls /readyz and listens on the bus. Only reads; changes nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

import httpx

from talaria_cli.up.health import Facts, HttpAnswer
from talaria_cli.up.plan import Part
from talaria_common import subjects
from talaria_common.bus import Bus, Message
from talaria_common.errors import BusError
from talaria_common.wire import Snapshot, WireError, decode

POLL_S = 0.25


async def poll_http(facts: Facts, running: Callable[[], Sequence[Part]]) -> None:
    """Ask each running part that has a port for its /readyz, until cancelled."""

    async def ask(client: httpx.AsyncClient, part: Part) -> None:
        try:
            answer = await client.get(f"{part.http}/readyz")
        except httpx.HTTPError:
            facts.http.pop(part.name, None)
        else:
            facts.http[part.name] = HttpAnswer(answer.status_code, answer.text)

    async with httpx.AsyncClient(timeout=2.0, trust_env=False) as client:
        while True:
            await asyncio.gather(*(ask(client, part) for part in running() if part.http is not None))
            await asyncio.sleep(POLL_S)


async def listen(facts: Facts, connect: Callable[[], Awaitable[Bus]]) -> None:
    """Follow snapshots and the cluster view until cancelled; the connection is made when the server is there."""
    while True:
        try:
            bus = await connect()
            break
        except BusError:
            await asyncio.sleep(POLL_S)

    def on_snapshot(message: Message) -> None:
        try:
            snapshot = decode(message.data, Snapshot)
        except WireError:
            return
        facts.snapshots[snapshot.iid] = (snapshot, time.monotonic())

    def on_cluster(_: Message) -> None:
        facts.cluster_at = time.monotonic()

    try:
        bus.on_connection(lambda up: setattr(facts, "bus", up))
        await bus.subscribe(subjects.ALL_SNAPSHOTS, on_snapshot)
        await bus.subscribe(subjects.CLUSTER, on_cluster)
        facts.bus = True
        await asyncio.Event().wait()
    finally:
        facts.bus = False
        await bus.close()
