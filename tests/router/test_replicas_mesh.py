"""Eq. 2 on real processes with sim engines: idle replicas are closed, what nobody serves any more is opened on demand."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from talaria_common import subjects
from talaria_common.bus import Message, NatsBus
from talaria_common.clock import SystemClock, to_ms
from talaria_common.wire import ClusterView, ControlReply, ControlRequest, decode, encode
from tests.mesh.settings import sim
from tests.support.load import session
from tests.support.mesh import mesh
from tests.support.waiting import until

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(120)]

IIDS, MODELS = ("cold-0", "cold-1"), ("model-a", "model-b")
HELD = {"active", "host", "loading"}


class Watch:
    """Who holds what, as telemetry says, and what instances were told."""

    def __init__(self, bus: NatsBus) -> None:
        self.bus = bus
        self.states: dict[tuple[str, str], str] = {}
        self.told: list[tuple[str, str, str]] = []

    async def start(self) -> Watch:
        await self.bus.subscribe(subjects.CLUSTER, self._view)
        for iid in IIDS:
            for verb in ("open", "close"):
                await self.bus.subscribe(subjects.control(iid, verb), self._command)
        return self

    def _view(self, message: Message) -> None:
        for view in decode(message.data, ClusterView).instances:
            for model in view.snapshot.models:
                self.states[view.snapshot.iid, model.name] = model.state

    def _command(self, message: Message) -> None:
        iid, verb = message.subject.split(".")[-2:]
        self.told.append((iid, verb, decode(message.data, ControlRequest).model or ""))

    def holders(self, model: str) -> list[str]:
        return [iid for iid in IIDS if self.states.get((iid, model)) in HELD]

    async def close(self, iid: str, model: str) -> ControlReply:
        request = ControlRequest(model=model, deadline_ms=to_ms(SystemClock().now() + 10))
        answer = await self.bus.request(subjects.control(iid, "close"), encode(request), timeout_s=10)
        return decode(answer.data, ControlReply)


async def test_closed_when_idle_and_opened_on_demand(tmp_path: Path):
    rows = [{"id": iid, "slot_ms": 200.0, "drain_ms": 50.0} for iid in IIDS]
    settings = sim(*rows, models=MODELS, router={"replica_idle_s": 1.0, "control_window_s": 1.0})
    async with mesh(tmp_path, settings) as it:
        bus = await it.bus()
        try:
            watch = await Watch(bus).start()
            await until(lambda: len(watch.states) == 4, 20)
            # An instance opens all its models when it starts.
            await until(lambda: all(len(watch.holders(m)) == 1 for m in MODELS), 40, "the idle ones of two are closed")
            told = len(watch.told)
            await asyncio.sleep(3)  # three control windows: nothing more is closed, and nothing opened again
            assert watch.told[told:] == []
            assert all(len(watch.holders(m)) == 1 for m in MODELS), "never the last one"

            calls = await session(
                it.http, "busy", "model-a", calls=3, first="a question " * 20, grow="result", max_tokens=4
            )
            assert [c.error for c in calls] == [""] * 3, "the one that stayed serves"
            (holder,) = watch.holders("model-b")
            assert (await watch.close(holder, "model-b")).ok, "as an operator might"
            await until(lambda: watch.holders("model-b") == [], 20)

            watch.told.clear()
            answers = await asyncio.gather(
                *(
                    it.chat("model-b", [{"role": "user", "content": f"hello {n}"}], session=f"s{n}", max_tokens=4)
                    for n in range(8)
                )
            )
            assert [a.status_code for a in answers] == [200] * 8, answers[0].text
            assert [(verb, model) for _, verb, model in watch.told] == [("open", "model-b")], "one demand, one opening"
            served = {a.headers["x-talaria-instance"] for a in answers}
            assert served == {watch.told[0][0]}
            await until(lambda: watch.holders("model-b") == list(served), 20)
        finally:
            await bus.close()
