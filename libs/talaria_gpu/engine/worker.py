"""The engine process: commands in, slot driver, reports out.

    python -m talaria_gpu.engine.worker --config FILE --id INSTANCE --fd N

One thread. Commands are read between steps; the process sleeps in select while there is nothing to do. It ends with 0
on `Stop`, on SIGTERM or when the I/O process closes its end, and with 1 after `Fatal`. It ignores SIGINT: a Ctrl-C
reaches the whole process group, and the I/O process decides what becomes of running calls. It dies with the thread that
started it (PR_SET_PDEATHSIG), so that no long step outlives a killed parent: start it from the main thread.
"""

from __future__ import annotations

import argparse
import gc
import os
import select
import signal
import socket
import sys
import traceback
from pathlib import Path
from types import FrameType

from talaria_common.clock import Clock, SystemClock
from talaria_common.settings import InstanceSettings, Settings, load
from talaria_gpu.engine.contract import Engine
from talaria_gpu.engine.driver import SlotDriver
from talaria_gpu.engine.holding import Holding
from talaria_gpu.engine.ipc import Abort, Close, Command, Fatal, Open, Progress, Ready, Report, Stop, Submit
from talaria_gpu.engine.link import Link, LinkClosedError
from talaria_gpu.engine.processes import die_with_parent
from talaria_gpu.sched.ablation import Ablation
from talaria_gpu.sched.config import SlotConfig

CONGESTED_BYTES = 8 << 20
"""With more than this unread by the I/O process, nothing is stepped and no command is read."""
CONGESTED_S = 30.0
"""An I/O process that has read nothing for this long meanwhile is taken for hung: `Fatal`."""


class _TerminatedError(BaseException):
    """SIGTERM while the engine starts, wherever it is then."""


class _CongestedError(Exception):
    """The I/O process does not read."""


class _Signals:
    """SIGTERM as an exception while starting, as a readable descriptor while serving."""

    def __init__(self) -> None:
        self._read, self._write = socket.socketpair()
        self._read.setblocking(False)
        self._write.setblocking(False)
        self._serving = False
        self.terminated = False
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, self._on_term)
        signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)

    def serve(self) -> None:
        """From now on SIGTERM only sets `terminated` and makes `fileno` readable."""
        self._serving = True

    def fileno(self) -> int:
        """For select."""
        return self._read.fileno()

    def _on_term(self, _number: int, _frame: FrameType | None) -> None:
        self.terminated = True
        if not self._serving:
            raise _TerminatedError


class Worker:
    """The loop between one link and one driver."""

    def __init__(self, driver: SlotDriver, link: Link, clock: Clock, signals: _Signals, heartbeat_s: float) -> None:
        self._driver = driver
        self._link = link
        self._clock = clock
        self._signals = signals
        self._heartbeat_s = heartbeat_s
        self._holding = Holding()
        self._beat_at = clock.now()
        self._moved_at = clock.now()

    def run(self) -> None:
        """Serve until `Stop` or SIGTERM. Raises LinkClosedError when the I/O process has gone."""
        link, driver, clock = self._link, self._driver, self._clock
        while not self._signals.terminated:
            now = clock.now()
            congested = self._congested(now)
            if now >= self._beat_at:
                self._beat_at = now + self._heartbeat_s
                if not congested:
                    link.send([*self._holding.flush(now), driver.status()])
            wait = None if congested else driver.next_wakeup()
            until_beat = max(0.0, self._beat_at - now)
            sources: list[_Signals | Link] = [self._signals]
            if not congested:
                sources.append(link)
            readable, writable, _ = select.select(
                sources,
                [link] if link.pending_bytes else [],
                [],
                until_beat if wait is None else min(wait, until_beat),
            )
            if writable and link.flush():
                self._moved_at = clock.now()
            if link in readable and not self._obey(link.receive()):
                return
            wait = driver.next_wakeup()
            if not congested and wait is not None and wait <= 0:
                self._tell(driver.turn(clock.now()))

    def _obey(self, commands: list[Command]) -> bool:
        """Returns False on `Stop`."""
        reports: list[Report] = []
        for command in commands:
            match command:
                case Submit(call=call):
                    if call.whole:
                        self._holding.expect(call.rid)
                    reports += self._driver.submit(call)
                case Abort(rid=rid):
                    reports += self._driver.abort(rid)
                case Open(model=model):
                    reports += self._driver.open(model)
                case Close(model=model):
                    reports += self._driver.close_model(model)
                case Stop():
                    return False
        self._tell(reports)
        return True

    def _tell(self, reports: list[Report]) -> None:
        told = self._holding.take(self._clock.now(), reports) if reports else reports
        if told:
            self._link.send(told)

    def _congested(self, now: float) -> bool:
        if self._link.pending_bytes <= CONGESTED_BYTES:
            self._moved_at = now
            return False
        if now - self._moved_at > CONGESTED_S:
            raise _CongestedError(f"the I/O process has read nothing for {CONGESTED_S} s")
        return True


def build(settings: Settings, instance: InstanceSettings, clock: Clock, link: Link) -> tuple[Engine, dict[str, str]]:
    """The engine that the settings name, and its models' directories."""
    if instance.engine == "sim":
        from talaria_gpu.engine.sim import SimEngine  # noqa: PLC0415 - only the engine that runs is imported

        return SimEngine(instance, clock), {}

    from talaria_gpu.engine.sglang import build as build_sglang  # noqa: PLC0415 - SGLang takes seconds and torch
    from talaria_gpu.models.prepare import prepare  # noqa: PLC0415 - as above

    def progress(message: str) -> None:
        link.send([Progress(message=message)])

    paths: dict[str, Path] = {}
    for name in instance.models:
        paths[name] = prepare(name, settings.models[name], progress=progress)
    engine = build_sglang(instance, paths, settings, progress=progress)
    return engine, {name: str(path) for name, path in paths.items()}


def slot_config(settings: Settings, instance: InstanceSettings) -> SlotConfig:
    """The slot scheduler's targets and budgets: the instance's own, and those that it shares with the router."""
    return SlotConfig(
        instance.slot_ms,
        instance.drain_ms,
        t_ttft_ms=settings.router.t_ttft_s * 1000,
        gamma=settings.router.gamma,
        t_tpot_ms=settings.router.t_tpot_ms,
        ablation=Ablation.named(instance.scheduler),
        suspends=instance.engine == "sglang" and instance.host_kv_mib > 0,
    )


def pin(engine: Engine) -> None:
    """Bring a model that is alone (a hot instance's) onto the device, so that its first call does not wait for it."""
    models = list(engine.models())
    if len(models) == 1 and engine.active is None:
        engine.switch(models[0])


def serve(settings: Settings, iid: str, link: Link, signals: _Signals) -> None:
    """Build, announce, run, release. Raises whatever ends it other than `Stop` and SIGTERM."""
    clock = SystemClock()
    instance = settings.instance(iid)
    link.send([Progress(message=f"{iid}: starting the {instance.engine} engine")])
    engine, paths = build(settings, instance, clock, link)
    pin(engine)
    signals.serve()
    driver = SlotDriver(engine, slot_config(settings, instance), clock, models=instance.models)
    try:
        gc.collect()
        gc.freeze()  # what was built stays; the collector need not look at it while tokens wait
        models = list(engine.models().values())
        link.send([Ready(models=models, buffer_bytes=engine.buffer_bytes, pid=os.getpid(), paths=paths)])
        Worker(driver, link, clock, signals, settings.mesh.heartbeat_s).run()
    finally:
        driver.close()


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(prog="talaria_gpu.engine.worker", description="One instance's engine process.")
    parser.add_argument("--config", required=True, help="talaria.toml")
    parser.add_argument("--id", required=True, help="instance id")
    parser.add_argument("--fd", required=True, type=int, help="inherited end of a stream socket pair")
    args = parser.parse_args(argv)
    die_with_parent()
    link = Link(socket.socket(fileno=args.fd))
    try:
        signals = _Signals()
        serve(load(args.config), args.id, link, signals)
        link.drain(1.0)
    except (_TerminatedError, LinkClosedError):
        return 0
    except Exception as e:  # noqa: BLE001 - whatever it is, a half-alive engine must not linger
        traceback.print_exc(file=sys.stderr)
        return _report_fatal(link, f"{type(e).__name__}: {e}")
    finally:
        link.close()
    return 0


def _report_fatal(link: Link, message: str) -> int:
    try:
        link.send([Fatal(message=message)])
        link.drain(2.0)
    except LinkClosedError:
        pass  # nobody is left to be told; the traceback stands in the log
    return 1


if __name__ == "__main__":
    sys.exit(main())
