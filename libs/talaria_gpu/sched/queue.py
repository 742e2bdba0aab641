"""One model's calls, and which of the waiting ones stand in front."""

from __future__ import annotations

import math
from collections.abc import Sequence

from talaria_gpu.sched.messages import Call

_ALIKE_S = 0.25
"""Deadlines that fall within the same quarter of a second count as one where the engine keeps the order."""


class ModelQueue:
    """The unfinished calls of one model: waiting (retracted ones first, then by arrival) and running."""

    def __init__(self) -> None:
        self.waiting: dict[str, Call] = {}
        self.running: dict[str, Call] = {}
        self._retracted: set[str] = set()
        self._priorities: dict[int, int] = {}
        """How many waiting calls there are of each priority: with one kind there is nothing to choose."""

    def __bool__(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, call: Call) -> None:
        """A new call waits."""
        self.waiting[call.rid] = call
        self._count(call, 1)

    def remove(self, rid: str) -> None:
        """Forget a call, wherever it is."""
        if self.running.pop(rid, None) is None:
            self._count(self.waiting.pop(rid), -1)
            self._retracted.discard(rid)

    def sync(self, waiting: Sequence[str]) -> int:
        """Follow the engine: `waiting` are the calls that wait now; all others run. Returns how many started."""
        still = set(waiting)
        started = [rid for rid in self.waiting if rid not in still]
        for rid in started:
            call = self.waiting.pop(rid)
            self._count(call, -1)
            self._retracted.discard(rid)
            self.running[rid] = call
        self._retract([rid for rid in self.running if rid in still])
        return len(started)

    def after_switch(self, waiting: Sequence[str], *, suspended: int) -> None:
        """The model was switched out: what ran goes on later where it was, or waits again, in front.

        Args:
            waiting: as `sync`.
            suspended: how many calls kept their place.
        """
        still = set(waiting)
        self._retract([rid for rid in self.running if not suspended or rid in still])

    def never_started(self) -> int:
        """Waiting calls that were not retracted."""
        return len(self.waiting) - len(self._retracted)

    def admissible(self, now: float, patience_ms: float) -> frozenset[str] | None:
        """The waiting calls that may prefill next where the engine chooses among them; None: all.

        The engine takes them as they stand and lets nobody by. So these are the most urgent ones, in the order of
        `ranked`, as long as they stand in that order; the others are admitted once these run.
        """
        if self._in_order():
            return None
        place = {rid: i for i, rid in enumerate(self.waiting)}
        first: list[str] = []
        for call in self._ranked(now, patience_ms, _ALIKE_S):
            if first and place[call.rid] < place[first[-1]]:
                break
            first.append(call.rid)
        return None if len(first) == len(place) else frozenset(first)

    def ranked(self, now: float, patience_ms: float) -> list[Call]:
        """The waiting calls, the most urgent first.

        Retracted ones, then those that have waited for `patience_ms`, each in the order they stand; then by priority,
        deadline and arrival.
        """
        return self._ranked(now, patience_ms, 0.0)

    def owed(self, now: float, patience_ms: float) -> Call | None:
        """The call that the next slot owes its first token: the most urgent that never ran.

        While there are calls that ran and lost their KV, which come back in anyhow, only one that is overdue: so that
        those, and returns that go by, do not keep a new session out for ever. None: there is none.
        """
        for call in self.ranked(now, patience_ms):
            if call.rid not in self._retracted:
                return call if not self._retracted or self._overdue(call, now, patience_ms) else None
        return None

    def musts(self, now: float, patience_ms: float) -> list[Call]:
        """What its next slot has to prefill: the retracted calls, and the one that it owes."""
        owed = self.owed(now, patience_ms)
        return [self.waiting[rid] for rid in self.waiting if rid in self._retracted] + ([owed] if owed else [])

    def was_retracted(self, rid: str) -> bool:
        """Whether a waiting call ran before."""
        return rid in self._retracted

    def first(self, admit: frozenset[str] | None) -> str | None:
        """The first in line among `admit`."""
        return next((rid for rid in self.waiting if admit is None or rid in admit), None)

    def rank(self, call: Call, now: float, patience_ms: float) -> float:
        """A waiting call's priority; beyond every priority if it has waited for `patience_ms` or ran before."""
        overdue = self._overdue(call, now, patience_ms)
        return math.inf if overdue or call.rid in self._retracted else call.priority

    def _ranked(self, now: float, patience_ms: float, alike_s: float) -> list[Call]:
        place = {rid: i for i, rid in enumerate(self.waiting)}

        def key(call: Call) -> tuple[float, float, int]:
            rank = self.rank(call, now, patience_ms)
            return (-rank, 0.0 if rank == math.inf else _due(call, alike_s), place[call.rid])

        return sorted(self.waiting.values(), key=key)

    def _in_order(self) -> bool:
        """Whether the calls stand as `_ranked` has them, now and later: one priority, no deadline before a nearer one.

        The usual case, and asked before every step.
        """
        if len(self._priorities) > 1:
            return False
        last = 0.0
        for rid, call in self.waiting.items():
            if rid not in self._retracted:
                due = _due(call, _ALIKE_S)
                if due < last:
                    return False
                last = due
        return True

    @staticmethod
    def _overdue(call: Call, now: float, patience_ms: float) -> bool:
        return (now - call.arrival) * 1000 >= patience_ms

    def _retract(self, rids: list[str]) -> None:
        if not rids:
            return
        back = {rid: self.running.pop(rid) for rid in rids}
        for call in back.values():
            self._count(call, 1)
        self._retracted.update(back)
        self.waiting = back | self.waiting

    def _count(self, call: Call, by: int) -> None:
        left = self._priorities.get(call.priority, 0) + by
        if left:
            self._priorities[call.priority] = left
        else:
            del self._priorities[call.priority]


def _due(call: Call, alike_s: float) -> float:
    """A call's deadline, by the grain of `alike_s` (0: exactly); inf: it has none."""
    if not call.deadline:
        return math.inf
    return call.deadline // alike_s if alike_s else call.deadline
