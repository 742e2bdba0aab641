"""Heartbeats of a router whose bus loses an answer."""

from __future__ import annotations

import asyncio

import pytest

from talaria_common import subjects
from talaria_common.bus import MemoryHub
from talaria_common.bus.memory import _BucketHandle
from tests.router.mesh import config, router
from tests.support.waiting import until


async def test_a_heartbeat_without_an_answer_does_not_hold_up_the_next_ones(monkeypatch: pytest.MonkeyPatch):
    put = _BucketHandle.put
    lost, beats = asyncio.Event(), 0

    async def loses_the_third(kv: _BucketHandle, key: str, value: bytes) -> int:
        nonlocal beats
        beats += key == "r.r0"
        if key == "r.r0" and beats == 3:
            lost.set()
            await asyncio.sleep(3600)
        return await put(kv, key, value)

    monkeypatch.setattr(_BucketHandle, "put", loses_the_third)
    hub = MemoryHub()
    shell = await router(hub.connect(), config())
    try:
        await asyncio.wait_for(lost.wait(), 10)
        kv = await hub.connect().kv(subjects.KV_PARTITIONS)
        before = await kv.get("r.r0")
        assert before is not None
        await until(lambda: beats >= 6)
        after = await kv.get("r.r0")
        assert after is not None
        assert after.revision > before.revision
    finally:
        await shell.close()


async def test_a_router_whose_claims_have_died_ends(monkeypatch: pytest.MonkeyPatch):
    shell = await router(MemoryHub().connect(), config())
    try:
        await until(lambda: shell.core.state.owned)

        def broken(now: float) -> list[object]:
            raise RuntimeError("a bug")

        monkeypatch.setattr(shell.claims.ownership, "tick", broken)
        await asyncio.wait_for(shell.failed.wait(), 10)
    finally:
        await shell.close()
