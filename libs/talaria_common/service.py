"""The process shell of every part: signals, logging, supervised tasks, the bus, and an exit code that tells the truth.

async def serve(process: Process) -> None:
    bus = await process.connect_bus()
    ...
    process.spawn(every(0.5, beat, clock=process.clock), "heartbeat")
    await process.stop.wait()
    # not ready -> unsubscribe -> finish what runs -> drain (NATS trap 9)
    await bus.close()

sys.exit(run(serve, "router-0", settings))
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from typing import Any

import structlog
from prometheus_client import CollectorRegistry

from talaria_common import logs
from talaria_common.bus.nats import NatsBus
from talaria_common.clock import SystemClock
from talaria_common.errors import BusError
from talaria_common.ids import new_epoch
from talaria_common.observability import ObservabilityServer
from talaria_common.settings import Settings
from talaria_common.tasks import end

log = structlog.get_logger(__name__)

GRACE_S = 30.0
"""From the stop signal to the end; what has not ended by then is cut off."""
BUS_RETRY_S = 1.0
GC_THRESHOLDS = (20_000, 20, 20)
EXIT_FAILED = 1
EXIT_SECOND_INTERRUPT = 130


class StoppedError(Exception):
    """The process was told to stop before it was up; no failure."""


class Process:
    """One life of one part.

    Args:
        name: the part's id, unique in the mesh.
        settings: the whole configuration.
    """

    def __init__(self, name: str, settings: Settings) -> None:
        self.name = name
        self.settings = settings
        self.epoch = new_epoch()
        self.clock = SystemClock()
        self.stop = asyncio.Event()
        """Set when the process shall end."""
        self.failed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._cleanup = contextlib.AsyncExitStack()

    def spawn(self, coro: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        """Run `coro` beside `main`. If it raises, the whole process ends with exit code 1: never half-alive."""
        task = asyncio.create_task(coro, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def connect_bus(self) -> NatsBus:
        """A connection to the bus, however long the server takes to appear.

        Raises:
            StoppedError: the process was told to stop first.
        """
        bus_settings = self.settings.bus
        said = ""
        while not self.stop.is_set():
            try:
                return await NatsBus.connect(
                    bus_settings.url, name=self.name, user=bus_settings.user, password=bus_settings.password
                )
            except BusError as e:
                if e.message != said:  # once, not every second
                    log.warning("waiting for the message bus (`talaria up` starts one)", error=e.message)
                    said = e.message
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.stop.wait(), BUS_RETRY_S)
        raise StoppedError

    async def until(self, *events: asyncio.Event) -> None:
        """Return when the process is told to stop, or one of `events` is set."""
        waits = [asyncio.ensure_future(event.wait()) for event in (self.stop, *events)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    async def observe(self, registry: CollectorRegistry, reasons: Callable[[], list[str]]) -> int:
        """Serve /metrics, /livez and /readyz where [mesh] says so; returns the port, 0 if it does not."""
        server = ObservabilityServer(registry, reasons)
        mesh = self.settings.mesh
        port = await server.start(mesh.metrics_host, mesh.metrics_ports.get(self.name))
        self._cleanup.push_async_callback(server.close)
        return port

    async def end(self) -> None:
        """Cancel what `spawn` started, and close what `observe` opened."""
        await end(list(self._tasks))
        await self._cleanup.aclose()
        self.failed.cancel()

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is not None:
            log.critical("a background task died", task=task.get_name(), exc_info=error)
            if not self.failed.done():
                self.failed.set_result(task.get_name())


Main = Callable[[Process], Coroutine[Any, Any, None]]


def run(main: Main, name: str, settings: Settings) -> int:
    """Run `main` until it returns; returns the process's exit code.

    SIGTERM and the first SIGINT set `process.stop`; the second SIGINT ends the process on the spot.

    Returns:
        0 after an orderly end; 1 if `main` or a supervised task failed, or the end took more than GRACE_S.
    """
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(_supervise(main, name, settings))


def spare_the_collector() -> None:
    """Let the cyclic collector leave alone what lives as long as the process, and look at the rest less often.

    Calls leave hardly any cycles, and most of what it would walk through again and again are modules and classes.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)


async def _supervise(main: Main, name: str, settings: Settings) -> int:
    process = Process(name, settings)
    spare_the_collector()
    logs.setup(name, settings.log, epoch=process.epoch)
    _catch_signals(process.stop)
    log.info("starting", pid=os.getpid())
    task = asyncio.create_task(main(process), name=name)
    stopping = asyncio.create_task(_overdue(process.stop))
    waited: set[asyncio.Future[Any]] = {task, process.failed, stopping}
    try:
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        if stopping.done():
            log.critical("did not stop in time", seconds=GRACE_S)
        elif task.done():
            await task
            log.info("stopped")
    except StoppedError:
        log.info("stopped before it was up")
        return 0
    except Exception:
        log.critical("failed", exc_info=True)
        return EXIT_FAILED
    else:
        return 0 if task.done() and not process.failed.done() else EXIT_FAILED
    finally:
        stopping.cancel()
        task.cancel()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(task, return_exceptions=True), 5)
        await process.end()


async def _overdue(stop: asyncio.Event) -> None:
    await stop.wait()
    await asyncio.sleep(GRACE_S)


def _catch_signals(stop: asyncio.Event) -> None:
    loop = asyncio.get_running_loop()

    def interrupt() -> None:
        if stop.is_set():
            os._exit(EXIT_SECOND_INTERRUPT)
        stop.set()

    loop.add_signal_handler(signal.SIGTERM, stop.set)
    loop.add_signal_handler(signal.SIGINT, interrupt)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """That of uvloop, where it is installed."""
    if sys.platform == "win32":
        return None
    try:
        import uvloop  # noqa: PLC0415 - optional
    except ImportError:
        return None
    return uvloop.new_event_loop  # type: ignore[no-any-return]
