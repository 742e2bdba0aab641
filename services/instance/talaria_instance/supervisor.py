"""Keeps an engine process running: starts it when the core says so, and turns its life into the core's messages."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import structlog

from talaria_common.tasks import end
from talaria_gpu.engine.ipc import Command, Ready, Report
from talaria_instance.engine_process import EngineProcess
from talaria_instance.messages import EngineExited, EngineSaid, EngineStarting, Message
from talaria_instance.preparer import Preparer

log = structlog.get_logger(__name__)


class Supervisor:
    """One engine at a time.

    Args:
        command: starts an engine process.
        models: whose tokenizers are loaded before an engine's `Ready` is passed on.
        preparer: holds the tokenizers.
        feed: takes the messages.
    """

    def __init__(
        self, command: Sequence[str], models: tuple[str, ...], preparer: Preparer, feed: Callable[[Message], None]
    ) -> None:
        self._command = command
        self._models = models
        self._preparer = preparer
        self._feed = feed
        self._engine: EngineProcess | None = None
        self._generation = -1
        self._condemned = -1  # generations up to this one are to die, also those that are only being started
        self._gone = asyncio.Event()
        self._gone.set()
        self._held: list[Report] | None = None  # reports that wait for the tokenizers
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = False

    @property
    def pid(self) -> int | None:
        """Of the engine process, if one runs."""
        return self._engine.pid if self._engine is not None else None

    def cpu_s(self) -> float | None:
        """CPU time that the engine process has used; None if there is none, or the system does not say."""
        return self._engine.cpu_s() if self._engine is not None else None

    def start(self, generation: int, delay_s: float) -> None:
        """Start an engine after `delay_s`, and not before the last one is gone (it may hold the device's memory)."""
        self._spawn(self._start(generation, delay_s))

    def tell(self, command: Command) -> None:
        """Send a command to the engine; lost if none runs."""
        if self._engine is not None:
            self._engine.tell(command)

    def kill(self, generation: int) -> None:
        """SIGKILL the engine if it is of this generation, also one that is still being started."""
        self._condemned = max(self._condemned, generation)
        if self._engine is not None and self._generation == generation:
            self._engine.kill()

    async def stop(self) -> None:
        """End the engine, for good."""
        self._stopping = True
        await end(list(self._tasks))
        if self._engine is not None:
            await self._engine.stop()

    async def _start(self, generation: int, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        await self._gone.wait()
        self._generation, self._held = generation, None
        self._gone.clear()
        try:
            self._engine = await EngineProcess.start(
                self._command,
                lambda reports: self._said(generation, reports),
                lambda why: self._exited(generation, why),
            )
        except OSError as e:
            self._exited(generation, f"cannot be started: {e}")
            return
        if generation <= self._condemned:
            self._engine.kill()
            return
        log.info("engine started", pid=self._engine.pid, generation=generation)
        self._feed(EngineStarting(generation))

    def _said(self, generation: int, reports: list[Report]) -> None:
        if self._held is not None:
            self._held += reports
            return
        ready = next((n for n, report in enumerate(reports) if isinstance(report, Ready)), None)
        if ready is not None:
            report = reports[ready]
            assert isinstance(report, Ready)
            self._held = reports[ready:]
            self._spawn(self._load(generation, report))
            reports = reports[:ready]
        if reports:
            self._feed(EngineSaid(generation, reports))

    async def _load(self, generation: int, ready: Ready) -> None:
        try:
            await self._preparer.load(self._models, ready.paths)
        except ValueError as e:
            log.warning("a tokenizer does not load", error=str(e))
            self._feed(EngineExited(generation, str(e)))
            self.kill(generation)
            return
        if generation != self._generation or self._held is None:
            return
        held, self._held = self._held, None
        self._feed(EngineSaid(generation, held))

    def _exited(self, generation: int, reason: str) -> None:
        self._engine, self._held = None, None
        self._gone.set()
        if not self._stopping:
            log.warning("the engine is gone", reason=reason, generation=generation)
            self._feed(EngineExited(generation, reason))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
