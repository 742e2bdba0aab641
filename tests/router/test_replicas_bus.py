"""On a bus, in memory and real: a model that nobody serves is opened on demand, and who waits hears of it."""

from __future__ import annotations

import asyncio
from typing import Any

from talaria_common import subjects
from talaria_common.bus import Bus, Message
from talaria_common.ids import partition_of
from talaria_common.wire import ControlReply, ControlRequest, ModelState, RouteReply, Snapshot, decode, encode
from talaria_common.wire.error import ErrorInfo
from tests.router.mesh import Api, Instance, M, Telemetry, config, router
from tests.support.waiting import until


class Cold(Instance):
    """Its model is cold until it is told to open it, unless it refuses; then it `opens` as host or is loading."""

    def __init__(self, bus: Bus, iid: str, *, refuses: bool = False, opens: str = "host") -> None:
        super().__init__(bus, iid)
        self.state: Any = "cold"
        self.told: list[str] = []
        self._refuses, self._opens = refuses, opens

    async def start(self) -> Cold:
        await super().start()
        await self.bus.subscribe(subjects.control(self.iid, "open"), self._open)
        return self

    def _open(self, message: Message) -> None:
        self.told.append(decode(message.data, ControlRequest).model or "")
        error = ErrorInfo(code="unavailable", message="no room") if self._refuses else None
        if not self._refuses:
            self.state = self._opens
        reply = ControlReply(ok=error is None, iid=self.iid, epoch=self.epoch, status="ready", error=error)
        self.answering = asyncio.ensure_future(self.bus.respond(message, encode(reply)))

    def snapshot(self) -> Snapshot:
        whole = super().snapshot()
        model = ModelState(name=M, state=self.state, max_running=8)
        return Snapshot(**{f: getattr(whole, f) for f in whole.__struct_fields__} | {"models": (model,)})


async def test_opened_on_demand_by_the_first_that_does_not_refuse(bus: Bus):
    shell = await router(bus, config())
    try:
        a, b = await Cold(bus, "a", refuses=True).start(), await Cold(bus, "b").start()
        await until(lambda: len(shell.core.state.owned) == 256)
        async with Telemetry(bus).viewing(a, b):
            assert (await Api(bus).place("s")).iid == "b"
        assert (a.told, b.told) == ([M], [M])
    finally:
        await shell.close()


async def test_who_waits_is_told_so(bus: Bus):
    shell = await router(bus, config())
    try:
        a = await Cold(bus, "a", opens="loading").start()
        await until(lambda: len(shell.core.state.owned) == 256)
        async with Telemetry(bus).viewing(a):
            request = Api(bus).request("s", may_wait=True)
            answer = await bus.request(subjects.route(partition_of("t", "s", M)), encode(request), timeout_s=5)
        reply = decode(answer.data, RouteReply)
        assert reply.queued is not None
        assert reply.queued.waiting == 1
    finally:
        await shell.close()
