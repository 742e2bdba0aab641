"""Keeps a set of parts running: start, watch, start again, stop in order."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from talaria_cli.up.backoff import Backoff
from talaria_cli.up.child import Child, ending, fresh_log
from talaria_cli.up.console import Row
from talaria_cli.up.health import Facts, judge
from talaria_cli.up.plan import Part, Role


class PartFailedError(Exception):
    """A part died again and again without ever having been ready; the message carries its last words."""


@dataclass(slots=True)
class _Kept:
    """A part and its life."""

    part: Part
    log: Path
    backoff: Backoff = field(default_factory=Backoff)
    child: Child | None = None
    restarts: int = 0
    started_at: float = 0.0
    was_ready: bool = False
    says: str = ""
    loop: asyncio.Task[None] | None = None


class Supervisor:
    """All parts of one `talaria up`.

    Args:
        facts: kept current by the watchers; a part that dies is forgotten there.
        logs: directory of the parts' logs.
        say: prints one line for the person.
        changed: called when a process started or ended (to rewrite the run file).
        stale_after_s: silence of an instance after which it counts as not ready.
        stop_order: roles that are stopped together, and the seconds that they get before they are killed.
    """

    def __init__(
        self,
        facts: Facts,
        logs: Path,
        say: Callable[[str], None],
        changed: Callable[[], None],
        *,
        stale_after_s: float,
        stop_order: Sequence[tuple[tuple[Role, ...], float]],
    ) -> None:
        self._facts = facts
        self._logs = logs
        self._say = say
        self._changed = changed
        self._stale_after_s = stale_after_s
        self._stop_order = stop_order
        self._kept: dict[str, _Kept] = {}
        self._stopping = asyncio.Event()
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def add(self, part: Part) -> None:
        """Start `part` and keep it running."""
        log = fresh_log(self._logs / f"{part.name}.log")
        kept = self._kept[part.name] = _Kept(part, log)
        kept.loop = asyncio.create_task(self._keep(kept), name=f"keep {part.name}")

    def running(self) -> list[Part]:
        """Parts with a live process."""
        return [k.part for k in self._kept.values() if k.child is not None]

    def pids(self) -> dict[str, tuple[Part, int, Path, int]]:
        """(part, pid, log, restarts) of each live process, by name."""
        return {name: (k.part, k.child.pid, k.log, k.restarts) for name, k in self._kept.items() if k.child is not None}

    def rows(self, waiting: Iterable[Part] = ()) -> list[Row]:
        """All parts as people see them; `waiting` are those not added yet."""
        now = time.monotonic()
        rows = []
        for kept in self._kept.values():
            if kept.child is None:
                rows.append(Row(kept.part.name, kept.part.role, "down" if kept.says else "waiting", kept.says))
                continue
            verdict = judge(kept.part, self._facts, now, self._stale_after_s)
            kept.was_ready = kept.was_ready or verdict.ready
            state = "stopping" if self._stopping.is_set() else "ready" if verdict.ready else "starting"
            rows.append(Row(kept.part.name, kept.part.role, state, verdict.says))
        return rows + [Row(p.name, p.role, "waiting", "") for p in waiting if p.name not in self._kept]

    async def failure(self) -> None:
        """Wait until a part cannot be started. Raises PartFailedError."""
        await asyncio.shield(self._failed)

    async def stop(self) -> None:
        """Stop everything in order; a role that takes too long is killed."""
        self._stopping.set()
        for roles, grace_s in self._stop_order:
            group = [k for k in self._kept.values() if k.part.role in roles]
            for kept in group:
                if kept.child is not None:
                    kept.child.terminate()
                elif kept.loop is not None:
                    kept.loop.cancel()  # it waits to be started again
            loops = [k.loop for k in group if k.loop is not None]
            if not loops:
                continue
            _, late = await asyncio.wait(loops, timeout=grace_s)
            if late:
                names = [k.part.name for k in group if k.loop in late]
                self._say(f"{', '.join(names)}: still there after {grace_s:.0f} s, killed")
                for kept in group:
                    if kept.child is not None:
                        kept.child.kill()
                await asyncio.wait(loops, timeout=2.0)

    def kill(self) -> None:
        """End all processes at once."""
        self._stopping.set()
        for kept in self._kept.values():
            if kept.child is not None:
                kept.child.kill()

    async def _keep(self, kept: _Kept) -> None:
        while not self._stopping.is_set():
            try:
                kept.child = await Child.start(kept.part, kept.log)
            except OSError as e:
                self._give_up(kept, str(e))
                return
            kept.started_at, kept.was_ready = time.monotonic(), False
            self._changed()
            if self._stopping.is_set():  # stop came while the process was being started
                kept.child.terminate()
            try:
                code = await kept.child.wait()
            finally:
                last_words = kept.child.last_words()
                kept.child = None
                self._facts.forget(kept.part.name)
            self._changed()
            if self._stopping.is_set():
                return
            pause_s = kept.backoff.died(time.monotonic() - kept.started_at, kept.was_ready)
            how = ending(code)
            if pause_s is None:
                self._give_up(kept, f"{how}, {kept.backoff.deaths} times in a row", last_words)
                return
            kept.restarts += 1
            kept.says = f"{how}; starting it again in {pause_s:.1f} s"
            said = f": {last_words[-1][:200]}" if last_words else ""
            self._say(f"{kept.part.name} died ({how}){said}; starting it again in {pause_s:.1f} s; log: {kept.log}")
            await asyncio.sleep(pause_s)

    def _give_up(self, kept: _Kept, why: str, last_words: Iterable[str] = ()) -> None:
        kept.says = why
        shown = "".join(f"\n    {line}" for line in last_words)
        if not self._failed.done():
            self._failed.set_exception(PartFailedError(f"{kept.part.name} cannot be started: {why}{shown}"))
