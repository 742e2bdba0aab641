"""The engine process from outside: started, spoken to over a socket pair, killed, and reported when it is gone."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import structlog

from talaria_gpu.engine.ipc import Command, Report, ReportUnpacker, Stop, pack

log = structlog.get_logger(__name__)

_UTIME, _STIME = 11, 12  # in /proc/PID/stat, counted from the state (proc(5))
GRACE_S = 5.0
"""Between the end of the connection, or `Stop`, and SIGKILL."""


class _Pipe(asyncio.Protocol):
    """Our end of the socket pair."""

    def __init__(self, on_reports: Callable[[list[Report]], None]) -> None:
        self._on_reports = on_reports
        self._unpacker = ReportUnpacker()
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        """Pass on whole reports. What does not parse ends the connection: nothing after it can be trusted."""
        try:
            reports = self._unpacker.feed(data)
        except msgspec.DecodeError as e:
            self._end(f"it sent what is no report: {e}")
            return
        if reports:
            self._on_reports(reports)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the exit status says more
        """The other end is closed."""
        self._end("")

    def _end(self, why: str) -> None:
        if not self.lost.done():
            self.lost.set_result(why)


class EngineProcess:
    """One life of the engine; made by `start`, ended by its own death, `kill` or `stop`.

    `on_exit` is called exactly once, with the reason, when the process is gone, and no report comes after it.
    """

    def __init__(self, process: asyncio.subprocess.Process, transport: asyncio.Transport, pipe: _Pipe) -> None:
        self._process = process
        self._transport = transport
        self._pipe = pipe
        self._watch: asyncio.Task[None] | None = None

    @classmethod
    async def start(
        cls, command: Sequence[str], on_reports: Callable[[list[Report]], None], on_exit: Callable[[str], None]
    ) -> EngineProcess:
        """Run `command` with `--fd N` appended, N being its end of the socket pair.

        It gets a session of its own: a Ctrl-C at the terminal is for us, who let calls finish first.

        Raises:
            OSError: it cannot be started.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            theirs.set_inheritable(True)
            try:
                process = await asyncio.create_subprocess_exec(
                    *command, "--fd", str(theirs.fileno()), pass_fds=(theirs.fileno(),), start_new_session=True
                )
            except BaseException:
                ours.close()
                raise
        ours.setblocking(False)
        transport, pipe = await asyncio.get_running_loop().create_unix_connection(lambda: _Pipe(on_reports), sock=ours)
        self = cls(process, transport, pipe)
        self._watch = asyncio.create_task(self._until_exit(on_exit))
        return self

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def cpu_s(self) -> float | None:
        """CPU time that all its threads have used, seconds; None where there is no /proc."""
        try:
            fields = Path(f"/proc/{self.pid}/stat").read_bytes().rpartition(b")")[2].split()
        except OSError:
            return None
        return (int(fields[_UTIME]) + int(fields[_STIME])) / os.sysconf("SC_CLK_TCK")

    def tell(self, command: Command) -> None:
        """Send a command; lost if the process is gone."""
        if not self._transport.is_closing():
            self._transport.write(pack(command))

    def kill(self) -> None:
        """SIGKILL; a stopped process dies of it too."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def stop(self) -> None:
        """Ask it to end, wait, and kill it when it does not."""
        self.tell(Stop())
        try:
            await asyncio.wait_for(self._process.wait(), GRACE_S)
        except TimeoutError:
            log.warning("the engine does not stop: killed", pid=self.pid)
            self.kill()
        if self._watch is not None:
            await self._watch

    async def _until_exit(self, on_exit: Callable[[str], None]) -> None:
        waiter = asyncio.ensure_future(self._process.wait())
        signs: set[asyncio.Future[Any]] = {waiter, self._pipe.lost}
        await asyncio.wait(signs, return_when=asyncio.FIRST_COMPLETED)
        if not waiter.done():
            await asyncio.wait({waiter}, timeout=GRACE_S)  # the connection ends a little before the process
        if not waiter.done():
            self.kill()
        code = await waiter
        # The kernel keeps what it wrote before its death; the reader gets all of it, then the end of the stream.
        await asyncio.wait({self._pipe.lost}, timeout=GRACE_S)
        self._transport.close()
        on_exit(self._reason(code))

    def _reason(self, code: int) -> str:
        why = self._pipe.lost.result() if self._pipe.lost.done() else ""
        if why:
            return why
        if code < 0:
            return f"killed by {signal.Signals(-code).name}"
        return f"exited with status {code}"
