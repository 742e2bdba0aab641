"""Carries out partition ownership: heartbeats, the bucket's watch, compare-and-set writes, a bounded number at once."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, NamedTuple

import structlog

from talaria_common.bus import KvBucket
from talaria_common.clock import Clock, to_ms
from talaria_common.errors import BusError
from talaria_common.settings import Settings
from talaria_common.tasks import end
from talaria_common.ticker import every
from talaria_common.wire import encode
from talaria_router.messages import Gained, Lost
from talaria_router.ownership import (
    Effect,
    Ownership,
    RouterPresence,
    Superseded,
    TryClaim,
    TryRelease,
    partition_key,
    router_key,
)

log = structlog.get_logger(__name__)

WRITES_AT_ONCE = 16
BEAT_WITHIN_HEARTBEATS = 2
"""A beat whose answer was lost with a server must not hold up the next ones: others would take us for dead."""


OpenBucket = Callable[[], Awaitable[KvBucket]]


class Hooks(NamedTuple):
    """What the router does about its partitions."""

    owns: Callable[[Gained | Lost], None]
    """A partition came or went."""
    hand_over: Callable[[int], Awaitable[None]]
    """Write out what a partition's sessions still owe: it is ours no more, and about to be released."""
    ended: Callable[[asyncio.Task[Any]], None]
    """A task of the claims has ended; with an exception, the router must not live on by half."""


class Claims:
    """The shell around `Ownership`.

    Args:
        open_bucket: opens `talaria_partitions`, making it if it is missing.
        settings: heartbeat and name.
        clock: time.
        epoch: this life of the router.
        hooks: told of what comes and goes.
    """

    def __init__(self, open_bucket: OpenBucket, settings: Settings, clock: Clock, epoch: str, hooks: Hooks) -> None:
        self._open = open_bucket
        self._bucket: KvBucket
        self._clock = clock
        self._hooks = hooks
        self._heartbeat_s = settings.mesh.heartbeat_s
        presence = RouterPresence(router=settings.router.id, epoch=epoch, started_ms=to_ms(clock.now()))
        self.ownership = Ownership(presence, self._heartbeat_s, settings.mesh.missed)
        self.superseded: asyncio.Event = asyncio.Event()
        """Set when a younger process took our name: the process must end."""
        self._writes = asyncio.Semaphore(WRITES_AT_ONCE)
        self._tasks: set[asyncio.Task[Any]] = set()

    async def start(self) -> None:
        """Begin; partitions come as they are claimed. Raises BusError."""
        self._bucket = await self._open()
        for work in (every(self._heartbeat_s, self._beat), self._watch(), every(self._heartbeat_s / 5, self._tick)):
            self._spawn(work)

    async def stop(self) -> None:
        """Change nothing any more; what is ours stays ours until `leave`, or until we are missed."""
        await end(list(self._tasks))

    async def leave(self) -> None:
        """Give everything back, so that others need not wait for us to be missed. Errors do not matter."""
        effects = self.ownership.release_all()
        await asyncio.gather(*(self._release(e) for e in effects))
        with contextlib.suppress(BusError):
            await self._bucket.delete(router_key(self.ownership.me.router))

    def connected(self) -> None:
        """The bus is there again: what we believe to be ours may have been lost with the server's store."""
        self.ownership.forgive(self._clock.now())
        self._spawn(self._verify())

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(self._hooks.ended)

    async def _verify(self) -> None:
        try:
            self._bucket = await self._open()
            for partition in list(self.ownership.mine):
                key = partition_key(partition)
                async with self._writes:
                    entry = await self._bucket.get(key)
                value, revision = (None, 0) if entry is None else (entry.value, entry.revision)
                self._carry_out(self.ownership.changed(self._clock.now(), key, value, revision))
        except BusError as e:
            log.warning("partitions not verified", error=e.message)

    async def _beat(self) -> None:
        try:
            async with asyncio.timeout(BEAT_WITHIN_HEARTBEATS * self._heartbeat_s):
                await self._bucket.put(router_key(self.ownership.me.router), encode(self.ownership.me))
        except (BusError, TimeoutError) as e:
            log.debug("heartbeat not written", error=str(e))
        else:
            self.ownership.beaten()

    async def _watch(self) -> None:
        while True:
            try:
                watch = await self._bucket.watch()
                try:
                    async for key, entry in watch:
                        value, revision = (None, 0) if entry is None else (entry.value, entry.revision)
                        self._carry_out(self.ownership.changed(self._clock.now(), key, value, revision))
                finally:
                    await watch.stop()
            except BusError as e:
                log.info("the watch on partitions ended", error=e.message)
            await asyncio.sleep(self._heartbeat_s)

    def _tick(self) -> None:
        self._carry_out(self.ownership.tick(self._clock.now()))

    def _carry_out(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Gained | Lost):
                self._hooks.owns(effect)
            elif isinstance(effect, Superseded):
                log.error("another process runs under this router's name", epoch=effect.epoch)
                self.superseded.set()
            else:
                self._spawn(self._claim(effect) if isinstance(effect, TryClaim) else self._release(effect))

    async def _claim(self, effect: TryClaim) -> None:
        key, value = partition_key(effect.partition), self.ownership.claim(effect)
        try:
            async with self._writes:
                if effect.last is None:
                    revision = await self._bucket.create(key, value)
                else:
                    revision = await self._bucket.update(key, value, effect.last)
        except BusError as e:
            log.debug("claim refused", partition=effect.partition, error=e.message)
            self.ownership.refused(effect.partition)
            return
        self._carry_out(self.ownership.claimed(effect, revision))

    async def _release(self, effect: TryRelease) -> None:
        key, value = partition_key(effect.partition), self.ownership.release(effect)
        try:
            async with self._writes:
                # First, so that nothing changes any more that would then have to be written too.
                self._hooks.owns(Lost(effect.partition))
                await self._hooks.hand_over(effect.partition)
                revision = await self._bucket.update(key, value, effect.last)
        except BusError as e:
            log.debug("release refused", partition=effect.partition, error=e.message)
            self.ownership.refused(effect.partition)
            return
        self.ownership.released(effect, revision)
