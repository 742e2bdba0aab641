"""An api as the instance sees it, and an instance service inside the test's own event loop."""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
import time
from collections import defaultdict
from pathlib import Path

import msgspec

from talaria_common import subjects
from talaria_common.clock import SystemClock
from talaria_common.ids import new_epoch
from talaria_common.settings import load
from talaria_common.wire import (
    FORWARD_HEADER,
    Cancel,
    Completion,
    ControlReply,
    ControlRequest,
    Event,
    Fence,
    ForwardHead,
    ForwardReply,
    Placement,
    Snapshot,
    TokenBatch,
    decode,
    encode,
)
from talaria_instance.main import engine_command
from talaria_instance.metrics import InstanceMetrics
from talaria_instance.service import InstanceService
from tests.support.waiting import until

IID = "cold-0"
CONFIG = """
[bus]
url = "{url}"
[mesh]
heartbeat_s = 0.1
[models.alpha]
source = "tiny-qwen3"
[models.beta]
source = "tiny-mla"
[[instances]]
id = "cold-0"
engine = "sim"
models = ["alpha", "beta"]
slot_ms = 20000
engine_hang_s = {hang_s}
shutdown_s = {shutdown_s}
[instances.sim]
ttft_ms = 2
decode_step_ms = {step_ms}
switch_ms = 5
"""


def write_config(directory, url="nats://127.0.0.1:1", *, step_ms=5.0, hang_s=30.0, shutdown_s=5.0):
    file = directory / "talaria.toml"
    file.write_text(CONFIG.format(url=url, step_ms=step_ms, hang_s=hang_s, shutdown_s=shutdown_s))
    return file


class Api:
    """Forwards calls and keeps what comes back, everything in order."""

    def __init__(self, bus, name="api-0"):
        self.bus = bus
        self.name = name
        self.frames = defaultdict(list)
        self.batches = []
        self.completions = []
        self.snapshots = []
        self.events = []
        self._seq = 0

    async def listen(self):
        await self.bus.subscribe(subjects.tokens(self.name), self._on_tokens)
        await self.bus.subscribe(
            subjects.ALL_COMPLETIONS, lambda m: self.completions.append(decode(m.data, Completion))
        )
        await self.bus.subscribe(subjects.ALL_SNAPSHOTS, lambda m: self.snapshots.append(decode(m.data, Snapshot)))
        await self.bus.subscribe(subjects.ALL_EVENTS, lambda m: self.events.append(decode(m.data, Event)))
        return self

    def _on_tokens(self, message):
        batch = decode(message.data, TokenBatch)
        self.batches.append(batch)
        for frame in batch.frames:
            self.frames[frame.rid].append(frame)

    async def ready(self, epoch=None, timeout_s=20.0):
        """Wait for an instance that takes calls (of this epoch, if one is given)."""
        have = len(self.snapshots)
        await until(
            lambda: any(s.status == "ready" and epoch in (None, s.epoch) for s in self.snapshots[have:]),
            timeout_s,
            "ready",
        )
        return self.snapshots[-1]

    def place(self, rid=None, attempt=0, model="alpha", *, deadline_s=60.0, rev=1):
        self._seq += 1
        now = time.time()
        placement = Placement(
            iid=IID,
            fence=Fence(partition=3, owner_rev=rev, rid=rid or secrets.token_hex(16), attempt=attempt),
            router="router-0",
            router_epoch="r0",
            seq=self._seq,
            accept_by_ms=round((now + min(5.0, deadline_s)) * 1000),
            deadline_ms=round((now + deadline_s) * 1000),
        )
        return ForwardHead(
            placement=placement,
            endpoint="chat",
            api=self.name,
            api_epoch="e0",
            tenant="local",
            session="s" * 32,
            model=model,
        )

    async def send(self, head, data):
        headers = {FORWARD_HEADER: encode(head).decode()}
        message = await self.bus.request(subjects.forward(IID), data, headers=headers, timeout_s=5)
        return decode(message.data, ForwardReply)

    async def call(self, content="hi", *, rid=None, attempt=0, model="alpha", **body):
        """Forward a chat call that must be accepted; returns its rid."""
        head = self.place(rid, attempt, model)
        data = msgspec.json.encode({"model": model, "messages": [{"role": "user", "content": content}]} | body)
        reply = await self.send(head, data)
        assert reply.accepted, reply
        return head.placement.fence.rid

    async def end_of(self, rid, timeout_s=20.0):
        """The call's frames, once the last has come."""
        frames = self.frames[rid]
        await until(lambda: frames and frames[-1].kind != "delta", timeout_s, f"the end of {rid}")
        assert [f.seq for f in frames] == list(range(len(frames)))
        await until(lambda: self.completion(rid), 5, "its completion")
        return frames

    async def first_token(self, rid):
        await until(lambda: self.frames[rid], 20, f"a token of {rid}")

    def text(self, rid):
        return "".join(f.text for f in self.frames[rid])

    def completion(self, rid):
        found = [c for c in self.completions if c.rid == rid]
        assert len(found) <= 1, "a second completion"
        return found[0] if found else None

    async def cancel(self, rid, attempt=0):
        await self.bus.publish(subjects.cancel(IID), encode(Cancel(rid=rid, attempt=attempt)))

    async def control(self, verb, **kw):
        answer = await self.bus.request(subjects.control(IID, verb), encode(ControlRequest(**kw)), timeout_s=5)
        return decode(answer.data, ControlReply)


class Running:
    """A service in this event loop, with its engine in a process of its own."""

    def __init__(self, bus, config):
        self.bus = bus
        metrics = InstanceMetrics()
        self.registry = metrics.registry
        self.service = InstanceService(
            load(config, env={}),
            IID,
            bus,
            SystemClock(),
            engine_command=engine_command(str(config), IID),
            metrics=metrics,
            epoch=new_epoch(),
        )
        self._stop = asyncio.Event()
        self._task = asyncio.create_task(self.service.run(self._stop))

    @property
    def engine_pid(self):
        return self.service.supervisor.pid

    async def stop(self):
        self._stop.set()
        await self.wait()

    async def wait(self):
        """Until it has ended, of itself or after `stop`. Raises what it died of."""
        await asyncio.wait_for(asyncio.shield(self._task), 30)


def alive(pid):
    """Whether the process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the second: it ended between open and read
        return False


def instance_command(config):
    return [sys.executable, "-m", "talaria_instance", "--config", str(config), "--id", IID]


def environment():
    return {**os.environ, "OMP_NUM_THREADS": "1", "TALARIA_CONFIG": ""}
