"""A worker as a real process, and a synchronous client for it."""

from __future__ import annotations

import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from talaria_gpu.engine.contract import EngineCall, StepTokens
from talaria_gpu.engine.ipc import Command, Ready, Refused, Report, ReportUnpacker, Stepped, Submit, pack

CONFIG = """
[mesh]
heartbeat_s = {heartbeat_s}
[models.a]
source = "path"
path = "nowhere"
[models.b]
source = "path"
path = "nowhere"
[[instances]]
id = "i-0"
engine = "sim"
models = ["a", "b"]
slot_ms = {slot_ms}
drain_ms = 50.0
[instances.sim]
ttft_ms = {ttft_ms}
decode_step_ms = {decode_step_ms}
switch_ms = {switch_ms}
"""


def write_config(
    directory: Path, *, heartbeat_s=0.5, slot_ms=200.0, ttft_ms=0.0, decode_step_ms=0.0, switch_ms=0.0
) -> Path:
    path = directory / "talaria.toml"
    path.write_text(
        CONFIG.format(
            heartbeat_s=heartbeat_s,
            slot_ms=slot_ms,
            ttft_ms=ttft_ms,
            decode_step_ms=decode_step_ms,
            switch_ms=switch_ms,
        )
    )
    return path


class WorkerClient:
    """Sends commands, keeps every report in order."""

    def __init__(self, sock: socket.socket, process: subprocess.Popen[bytes]) -> None:
        self.sock = sock
        self.process = process
        self.reports: list[Report] = []
        self._unpacker = ReportUnpacker()

    def send(self, *commands: Command) -> None:
        data = memoryview(b"".join(pack(c) for c in commands))
        self.sock.setblocking(False)
        while data:
            readable, writable, _ = select.select([self.sock], [self.sock], [], 10)
            if readable:
                self.read(0)
            if writable:
                data = data[self.sock.send(data) :]

    def submit(self, *calls: EngineCall) -> None:
        self.send(*(Submit(call=c) for c in calls))

    def read(self, timeout_s: float) -> bool:
        """Take what comes within `timeout_s`; False at the end of the stream."""
        readable, _, _ = select.select([self.sock], [], [], timeout_s)
        if not readable:
            return True
        try:
            data = self.sock.recv(1 << 20)
        except ConnectionResetError:
            return False
        self.reports += self._unpacker.feed(data)
        return bool(data)

    def until(self, done: Callable[[], bool], timeout_s: float = 30.0) -> None:
        end = time.monotonic() + timeout_s
        while not done():
            left = end - time.monotonic()
            assert left > 0, f"nothing came of it; last reports: {self.reports[-3:]}"
            assert self.read(left) or done(), f"the worker closed its end; last reports: {self.reports[-3:]}"

    def of(self, kind: type) -> list:
        return [r for r in self.reports if isinstance(r, kind)]

    def until_ready(self) -> Ready:
        self.until(lambda: bool(self.of(Ready)))
        return self.of(Ready)[0]

    def steps(self, rid: str) -> list[StepTokens]:
        return [t for r in self.of(Stepped) for t in r.result.tokens if t.rid == rid]

    def tokens(self, rid: str) -> list[int]:
        return [token for t in self.steps(rid) for token in t.token_ids]

    def finished(self) -> dict[str, str]:
        """Reason by rid, refusals included."""
        out = {t.rid: t.finished for r in self.of(Stepped) for t in r.result.tokens if t.finished}
        return out | {r.rid: r.error.code for r in self.of(Refused)}


@contextmanager
def worker(config: Path, iid: str = "i-0") -> Iterator[WorkerClient]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "talaria_gpu.engine.worker"),
                *("--config", str(config), "--id", iid, "--fd", str(theirs.fileno())),
            ],
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        try:
            yield WorkerClient(ours, process)
        finally:
            process.kill()
            process.wait()
