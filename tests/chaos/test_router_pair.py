"""Two routers, one killed under load, on real processes: nothing lost, nothing answered twice, sessions stay (DESIGN 10)."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from pathlib import Path

import pytest

from talaria_common import subjects
from talaria_common.bus import Message, NatsBus
from talaria_common.wire import Cancel, Completion, Event, decode
from tests.mesh.settings import PATIENT, sim
from tests.support.load import Outcome, stream_chat
from tests.support.mesh import Mesh, mesh
from tests.support.waiting import until

pytestmark = [pytest.mark.chaos, pytest.mark.mesh, pytest.mark.timeout(90)]

PACED = {"ttft_ms": 10.0, "prefill_ms_per_ktoken": 50.0, "decode_step_ms": 10.0, "switch_ms": 10.0}
SESSIONS, PROMPT_TOKENS = 24, 4000
STAY = 0.95


class Watch:
    """What instances accepted, in the order of the bus: which attempt, by which router, fenced off since or not."""

    def __init__(self) -> None:
        self.accepted: dict[str, list[int]] = defaultdict(list)
        self.routers: dict[str, str] = {}
        self.ended_well: dict[str, list[int]] = defaultdict(list)
        self.unfenced: list[tuple[str, int]] = []
        """(rid, attempt) that was accepted while an earlier attempt of its call was accepted and not cancelled."""
        self._cancelled: set[tuple[str, int]] = set()

    async def listen(self, bus: NatsBus) -> None:
        await bus.subscribe(subjects.cancel("x").replace(".x.", ".*."), self._on_cancel)
        await bus.subscribe(subjects.event("forward", "x").removesuffix("x") + "*", self._on_forward)
        await bus.subscribe(subjects.ALL_COMPLETIONS, self._on_completion)
        await bus.flush()

    def _on_cancel(self, message: Message) -> None:
        cancel = decode(message.data, Cancel)
        self._cancelled.add((cancel.rid, cancel.attempt))

    def _on_forward(self, message: Message) -> None:
        data = decode(message.data, Event).data
        if not data["accepted"]:
            return
        rid, attempt = data["rid"], data["attempt"]
        if any((rid, earlier) not in self._cancelled for earlier in self.accepted[rid]):
            self.unfenced.append((rid, attempt))
        self.accepted[rid].append(attempt)
        self.routers[rid] = data["router"]

    def _on_completion(self, message: Message) -> None:
        completion = decode(message.data, Completion)
        if completion.ok:
            self.ended_well[completion.rid].append(completion.attempt)


class Agent:
    """A session that calls again and again until it is told to stop."""

    def __init__(self, it: Mesh, name: str, stop: asyncio.Event) -> None:
        self.begun = 0
        self.calls: list[Outcome] = []
        self._it, self._name, self._stop = it, name, stop

    async def run(self) -> None:
        messages = [{"role": "user", "content": f"{self._name} " + "x" * PROMPT_TOKENS}]
        while not self._stop.is_set():
            self.begun += 1
            call = await stream_chat(self._it.http, "model-a", messages, session=self._name, max_tokens=12)
            self.calls.append(call)
            messages += [{"role": "assistant", "content": call.text or "-"}, {"role": "user", "content": "go on"}]
            await asyncio.sleep(0.1)


def place(call: Outcome) -> str:
    return call.headers["x-talaria-instance"]


async def test_one_of_two_routers_is_killed_under_load(tmp_path: Path) -> None:
    rows = [{"id": f"cold-{n}", "sim": PACED} for n in range(2)]
    settings = sim(*rows, models=("model-a",), api=PATIENT)
    async with mesh(tmp_path / "mesh", settings, routers=2) as it:
        watch, stop = Watch(), asyncio.Event()
        bus = await it.bus()
        await watch.listen(bus)
        agents = [Agent(it, f"agent-{n}", stop) for n in range(SESSIONS)]
        work = asyncio.gather(*(agent.run() for agent in agents))
        await until(lambda: all(len(a.calls) >= 3 for a in agents), 20, "every session returns")

        it.parts["router-1"].kill()
        at_death = [(a.begun, len(a.calls)) for a in agents]
        served = [watch.routers[a.calls[-1].headers["x-talaria-request"]] for a in agents]
        assert set(served) == {"router-0", "router-1"}
        after = [begun for begun, _ in at_death]
        await until(lambda: all(len(a.calls) >= n + 3 for a, n in zip(agents, after, strict=True)), 25, "all go on")
        stop.set()
        await work

        calls = [call for a in agents for call in a.calls]
        assert [c.error for c in calls if c.error] == [], "no call is lost"
        rids = [c.headers["x-talaria-request"] for c in calls]
        await until(lambda: all(rid in watch.ended_well for rid in rids), 10, "every completion comes")
        assert watch.unfenced == [], "no call runs twice unless the first was fenced off"
        assert {rid: n for rid, n in watch.ended_well.items() if len(n) > 1} == {}, "none is answered twice"
        assert set(watch.ended_well) == set(rids)
        moved = {watch.routers[a.calls[-1].headers["x-talaria-request"]] for a in agents}
        assert moved == {"router-0"}, "its partitions have moved"
        stayed = sum(place(a.calls[n]) == place(a.calls[n - 1]) for a, n in zip(agents, after, strict=True))
        assert stayed >= STAY * SESSIONS, f"{stayed} of {SESSIONS} sessions returned to their instance"
        await bus.close()
