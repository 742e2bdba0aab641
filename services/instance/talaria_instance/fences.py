"""Which commands come too late: fences, deadlines, repeats and cancels that overtook their call (DESIGN 3).

NATS delivers what was published while it was away, so every forward is held against what is known already.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from talaria_common.clock import from_ms
from talaria_common.errors import BadRequestError, DeadlineError, TalariaError, UnavailableError
from talaria_common.wire import Cancel, ForwardHead
from talaria_instance.messages import CallKey

ATTEMPT_MEMORY_S = 900.0
ATTEMPT_MEMORY_MAX = 65_536
EARLY_CANCEL_S = 10.0
EARLY_CANCEL_MAX = 4096
FUTURE_S = 86_400.0
"""No clock in the mesh is further ahead than this."""


class Refusal(NamedTuple):
    """Why a forward is refused, and whether another placement makes sense."""

    error: TalariaError
    retryable: bool


class Fences:
    """Args: iid: this instance; skew_s: clock difference between hosts that deadlines forgive, seconds."""

    def __init__(self, iid: str, skew_s: float) -> None:
        self._iid = iid
        self._skew_s = skew_s
        self._owner_revs: dict[int, int] = {}
        self._attempts: OrderedDict[str, tuple[int, float]] = OrderedDict()
        self._early: OrderedDict[CallKey, float] = OrderedDict()

    def check(self, now: float, head: ForwardHead) -> Refusal | None:  # noqa: PLR0911 - one return per reason
        """None if the forward is in order; what it carries is remembered either way, so a repeat is refused."""
        place, fence = head.placement, head.placement.fence
        if place.iid != self._iid:
            return Refusal(UnavailableError(f"placed on {place.iid}, not on {self._iid}"), retryable=True)
        if fence.owner_rev > (now + FUTURE_S) * 1000:
            # Taken in, it would fence off every true owner of the partition until this process ends.
            message = f"owner revision {fence.owner_rev} lies in the future: revisions are times in ms (ADR 7)"
            return Refusal(BadRequestError(message), retryable=False)
        known = self._owner_revs.get(fence.partition, 0)
        if fence.owner_rev < known:
            message = f"fenced: partition {fence.partition} has owner revision {known}, not {fence.owner_rev}"
            return Refusal(UnavailableError(message), retryable=True)
        self._owner_revs[fence.partition] = fence.owner_rev
        last = self._attempts.get(fence.rid)
        if last is not None and fence.attempt <= last[0]:
            message = f"attempt {fence.attempt} of {fence.rid} has been here already, the last was {last[0]}"
            return Refusal(UnavailableError(message), retryable=True)
        self._remember(now, fence.rid, fence.attempt)
        if now > from_ms(place.deadline_ms) + self._skew_s:
            return Refusal(DeadlineError("the call's deadline passed before it arrived"), retryable=False)
        if now > from_ms(place.accept_by_ms) + self._skew_s:
            return Refusal(UnavailableError("the placement had expired when the call arrived"), retryable=True)
        if self._was_cancelled(now, CallKey(fence.rid, fence.attempt)):
            return Refusal(UnavailableError("cancelled before it arrived"), retryable=False)
        return None

    def cancel_came_early(self, now: float, cancel: Cancel) -> None:
        """A cancel for a call that is not here: perhaps it is on its way. Kept briefly."""
        last = self._attempts.get(cancel.rid)
        if last is not None and last[0] >= cancel.attempt:
            return  # it was here and has ended
        self._early[CallKey(cancel.rid, cancel.attempt)] = now
        while len(self._early) > EARLY_CANCEL_MAX:
            self._early.popitem(last=False)

    def _was_cancelled(self, now: float, key: CallKey) -> bool:
        while self._early and now - next(iter(self._early.values())) > EARLY_CANCEL_S:
            self._early.popitem(last=False)
        return self._early.pop(key, None) is not None

    def _remember(self, now: float, rid: str, attempt: int) -> None:
        self._attempts[rid] = (attempt, now)
        self._attempts.move_to_end(rid)
        while self._attempts and (
            len(self._attempts) > ATTEMPT_MEMORY_MAX or now - next(iter(self._attempts.values()))[1] > ATTEMPT_MEMORY_S
        ):
            self._attempts.popitem(last=False)
