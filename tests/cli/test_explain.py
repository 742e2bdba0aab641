"""`talaria explain` and `talaria sessions` over a real router's events and bucket, on real NATS."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from talaria_cli import explain_text
from talaria_cli.main import app
from talaria_cli.sessions import statuses
from talaria_common import subjects
from talaria_common.bus import NatsBus
from talaria_common.wire import Event, ModelState, SessionRecord, Snapshot
from tests.router.mesh import Api, Instance, Telemetry, config, router


class Mesh:
    """A router on NATS that has served: one session went to `a` and came back on its lease, one call was refused."""

    def __init__(self, url: str, state: Path) -> None:
        self.url, self.state = url, state

    async def talaria(self, *args: str) -> Result:
        return await asyncio.to_thread(
            CliRunner().invoke, app, [*args, "--bus", self.url, "--state-dir", str(self.state)]
        )


@pytest.fixture
async def mesh(nats_url: str, tmp_path: Path) -> AsyncIterator[Mesh]:
    bus = await NatsBus.connect(nats_url, name="test")
    await bus.ensure_stream(subjects.EVENTS_STREAM, [subjects.ALL_EVENTS], max_age_s=60, max_bytes=1 << 20)
    shell = await router(bus, config(tau_s=30.0))
    yield Mesh(nats_url, tmp_path)
    await shell.close()
    await bus.close()


async def test_a_call_is_explained_and_its_session_listed(mesh: Mesh):
    bus = await NatsBus.connect(mesh.url, name="more")
    a, b = await Instance(bus, "a").start(), await Instance(bus, "b").start()
    async with Telemetry(bus).viewing(a, b):
        api = Api(bus)
        first = await api.place("s1")
        here = a if first.iid == "a" else b
        await here.complete(first, "s1")
        bucket = await bus.kv(subjects.KV_SESSIONS)
        async with asyncio.timeout(10):
            while not await bucket.keys():
                await asyncio.sleep(0.02)
        speaking = asyncio.ensure_future(_speak(here))
        try:
            listed = await mesh.talaria("sessions", "--json")
        finally:
            speaking.cancel()
        (session,) = json.loads(listed.stdout)
        assert session["iid"] == first.iid
        assert (session["kv"], session["kv_tokens"], session["calls"]) == ("device", 2000, 1)
        assert 0 < session["lease_ms"] <= 30_000

        second = await api.place("s1")
        assert second.via == "lease"
        await bus.flush()
        cold = await mesh.talaria("explain", first.fence.rid[:10])
        assert cold.exit_code == 0, cold.output
        assert f"call {first.fence.rid}: model m, tenant t, session s1" in cold.stdout
        assert f"placed on {first.iid} by cost" in cold.stdout
        assert "the session held no lease" in cold.stdout
        assert "lease on" in cold.stdout
        assert "2000 tokens kept" in cold.stdout
        rows = [line.split() for line in cold.stdout.splitlines()]
        assert any(row[:2] == ["*", first.iid] for row in rows)
        warm = await mesh.talaria("explain", second.fence.rid)
        assert "honoured" in warm.stdout
        told = json.loads((await mesh.talaria("explain", second.fence.rid, "--json")).stdout)
        assert {e["kind"] for e in told} == {"route"}
    await bus.close()


async def _speak(instance: Instance) -> None:
    while True:
        await instance.speak()
        await asyncio.sleep(0.05)


async def test_unknown_ids_and_those_that_are_none(mesh: Mesh):
    unknown = await mesh.talaria("explain", "0123456789")
    assert unknown.exit_code == 1
    assert "no event of 0123456789" in unknown.output
    bad = await mesh.talaria("explain", "hello!")
    assert bad.exit_code == 2


async def test_no_bus_is_said(tmp_path: Path):
    gone = Mesh("nats://127.0.0.1:9", tmp_path)
    for command in (["explain", "0123456789"], ["sessions"]):
        result = await gone.talaria(*command)
        assert result.exit_code == 2
        assert "cannot connect" in result.output


def test_a_refusal_says_what_ruled_the_instances_out():
    data = {
        "rid": "ab", "attempt": 1, "lease": "prefix", "verdict": "overloaded", "message": "full", "retry_after_s": 2.5,
        "rejected": {"round": 2, "draining": 1}, "candidates": [{"iid": "a", "total_ms": 12.0, "rejected": "round"}],
    }  # fmt: skip
    event = Event(kind="route", source="router-0", at_ms=0, data=data)
    assert "attempt 1 refused: overloaded: full; come back in 2.5 s" in explain_text.line(event)
    facts = explain_text.facts(data)
    assert any("KV that it was for is no longer there" in f for f in facts)
    assert any("2 x round" in f for f in facts)
    assert any("1 x draining: it says itself" in f for f in facts)
    assert explain_text.rows(data)[0][-1] == "ruled out: round"


def test_kv_state_of_sessions():
    def record(session: str, **more: object) -> SessionRecord:
        fields = {"iid": "a", "iid_epoch": "e", "kv_tokens": 9, "kv_epoch": 3, "last_use_ms": 500} | more
        return SessionRecord(tenant="t", session=session, model="m", **fields)  # type: ignore[arg-type]

    def heard(state: str, kv_epoch: int = 3) -> dict[str, Snapshot]:
        model = ModelState(name="m", state=state, kv_epoch=kv_epoch)  # type: ignore[arg-type]
        return {"a": Snapshot(iid="a", epoch="e", version=1, at_ms=0, pool="hot", status="ready", models=(model,))}

    def kv(record: SessionRecord, snapshots: dict[str, Snapshot]) -> str:
        return statuses([record], snapshots, 1000)[0].kv

    assert kv(record("s"), heard("active")) == "device"
    assert kv(record("s"), heard("host")) == "host"
    assert kv(record("s"), heard("active", 4)) == "missing"
    assert kv(record("s", iid_epoch="old"), heard("active")) == "missing"
    assert kv(record("s", iid="b"), heard("active")) == "unknown"
    listed = statuses([record("s1"), record("s2", last_use_ms=900, lease_until_ms=1250)], heard("active"), 1000)
    assert [(s.session, s.idle_ms, s.lease_ms) for s in listed] == [("s2", 100, 250), ("s1", 500, 0)]
