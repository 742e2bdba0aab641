"""Where a call's frames wait for its HTTP side: a bounded queue for streams, a gatherer for whole answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from talaria_api.errors import SlowClientError
from talaria_api.render import Whole
from talaria_common.errors import TalariaError
from talaria_common.wire import Frame

STALL_GRACE_S = 5.0
"""How long a client that does not read keeps its connection after its call has failed."""
READ_WITHIN_S = 120.0
"""How long a client may take to read what is left of its answer once its call has ended."""


class FrameQueue:
    """Frames of a stream. At most `limit` wait; the writer takes all that wait at once.

    `abort`: drops the connection. Called when the call has ended and the writer does not: if it failed while the writer
    was stuck in a write, at once where the client's slowness is the failure, else after STALL_GRACE_S; if it went well,
    after READ_WITHIN_S.

    `direct`, once set, is offered each delta that nothing waits before. True: it has been written; the nudge moves.
    """

    def __init__(self, limit: int, abort: Callable[[], None] | None = None) -> None:
        self.error: TalariaError | None = None
        self.ended = False
        self.first_at: float | None = None
        """Loop time of the first frame."""
        self.writing = False
        self.direct: Callable[[Frame], bool] | None = None
        self.quiet_s = 0.0
        """From a frame written by `direct` to the next nudge."""
        self._abort = abort
        self._abort_timer: asyncio.TimerHandle | None = None
        self._limit = limit
        self._frames: list[Frame] = []
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        self._nudge_at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def put(self, frame: Frame) -> bool:
        """Take a frame; False if `limit` wait already."""
        if len(self._frames) >= self._limit:
            return False
        if self.first_at is None:
            self.first_at = self._loop.time()
        alone = not self._frames and not self.writing and frame.kind == "delta"
        # Between two tokens the pump does nothing but wait: no need to wake it.
        if alone and self.direct is not None and self.direct(frame):
            self._nudge_at = self._loop.time() + self.quiet_s
            return True
        self._frames.append(frame)
        self._wake()
        return True

    def finish(self, error: TalariaError | None) -> None:
        """The call has ended."""
        self.error, self.ended = error, True
        if self._abort is not None:
            delay_s = READ_WITHIN_S
            if error is not None and self.writing:
                delay_s = 0.0 if isinstance(error, SlowClientError) else STALL_GRACE_S
            self._abort_timer = self._loop.call_later(delay_s, self._abort)
        self._wake()

    def take(self) -> list[Frame]:
        """Everything that waits."""
        frames, self._frames = self._frames, []
        return frames

    async def wait(self, nudge_at: float) -> None:
        """Return when there is something to take, when the call has ended, or at loop time `nudge_at`."""
        if self._frames or self.ended:
            return
        self._nudge_at = nudge_at
        if self._timer is None:
            self._timer = self._loop.call_at(nudge_at, self._nudge)
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def close(self) -> None:
        """Release the timers: the connection may serve another request from here on."""
        for timer in (self._timer, self._abort_timer):
            if timer is not None:
                timer.cancel()

    def _nudge(self) -> None:
        # One timer for the stream's whole life: moved on when it fires, not each time a token arrives.
        if self._loop.time() < self._nudge_at:
            self._timer = self._loop.call_at(self._nudge_at, self._nudge)
            return
        self._timer = None
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Gatherer:
    """Frames of a whole answer. The answer is bounded by the model's context, so nothing overflows."""

    def __init__(self, whole: Whole) -> None:
        self.whole = whole
        self.error: TalariaError | None = None
        self.first_at: float | None = None
        self._loop = asyncio.get_running_loop()
        self._done: asyncio.Future[None] = self._loop.create_future()

    def put(self, frame: Frame) -> bool:
        """Take a frame."""
        if self.first_at is None:
            self.first_at = self._loop.time()
        self.whole.add(frame)
        return True

    def finish(self, error: TalariaError | None) -> None:
        """The call has ended."""
        self.error = error
        if not self._done.done():
            self._done.set_result(None)

    async def wait(self) -> None:
        """Return when the call has ended."""
        await self._done
