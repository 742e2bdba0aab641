"""Calls that were placed and calls that wait: asking is idempotent on (rid, attempt), and attempts only rise."""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import Literal

import msgspec

from talaria_common.wire import Placement
from talaria_router.config import COMPLETED_KEPT
from talaria_router.messages import Ask
from talaria_router.sessions import Entry


class Placed(msgspec.Struct):
    """A call that was given a place and has not completed."""

    attempt: int
    tenant: str
    placement: Placement
    accept_by: float
    forget_at: float
    prefix_id: str = ""
    parent: str = ""
    """Its session is a sub-agent of this one."""


class Case(msgspec.Struct):
    """A call that asks, and where it belongs."""

    ask: Ask
    key: str
    partition: int
    since: float
    """When it asked first."""
    entry: Entry | None = None
    """Its session's, as last looked up."""


@dataclass(slots=True)
class Waiting:
    """A call whose answer has to wait; `why` says for what."""

    case: Case
    why: Literal["view", "restore", "probe", "room", "open", "fit"]
    """For any view of the instances, its session's record in the bucket, a health probe, room; open: its model is being
    opened for it; fit: nobody who serves it is well now, but somebody may be soon."""
    until: float
    asked_at: float
    """When it asked last."""
    told_at: float = 0.0
    """When it was last told that it waits."""
    probe: str = ""
    """Instance that is being probed."""

    @property
    def in_line(self) -> bool:
        """Whether it is placed as soon as the instances allow."""
        return self.why in {"room", "open", "fit"}


class Calls:
    """Placed calls by rid, and what has completed lately."""

    def __init__(self) -> None:
        self._placed: dict[str, Placed] = {}
        self._forget: list[tuple[float, str]] = []
        self._completed: OrderedDict[str, int] = OrderedDict()
        self.in_flight: Counter[str] = Counter()
        """Placed calls by tenant: from the placement to the completion, or to the deadline if that is lost."""

    def __len__(self) -> int:
        return len(self._placed)

    def get(self, rid: str) -> Placed | None:
        """The call's current placement."""
        return self._placed.get(rid)

    def place(self, rid: str, placed: Placed) -> None:
        """The call has a place; an earlier attempt's is replaced."""
        if rid not in self._placed:
            self.in_flight[placed.tenant] += 1
        self._placed[rid] = placed
        heapq.heappush(self._forget, (placed.forget_at, rid))

    def over(self, rid: str, attempt: int) -> bool:
        """Whether this attempt, or a later one, completed lately."""
        return self._completed.get(rid, -1) >= attempt

    def complete(self, rid: str, attempt: int) -> bool:
        """An attempt ended. False if it is no news: seen before, or a later attempt has been placed or has ended."""
        if self.over(rid, attempt):
            return False
        placed = self._placed.get(rid)
        if placed is not None and placed.attempt > attempt:
            return False
        if placed is not None:
            self._remove(rid)
        self._completed[rid] = attempt
        if len(self._completed) > COMPLETED_KEPT:
            self._completed.popitem(last=False)
        return True

    def expire(self, now: float) -> None:
        """Forget placed calls long past their deadline: their completion was lost."""
        while self._forget and self._forget[0][0] <= now:
            at, rid = heapq.heappop(self._forget)
            placed = self._placed.get(rid)
            if placed is not None and placed.forget_at == at:
                self._remove(rid)

    def _remove(self, rid: str) -> None:
        tenant = self._placed.pop(rid).tenant
        self.in_flight[tenant] -= 1
        if not self.in_flight[tenant]:
            del self.in_flight[tenant]
