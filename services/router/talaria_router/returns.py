"""When those who were refused should come back: not before there is room, and not all at once.

Room comes at the rate at which calls end, which is measured: of a model over all instances (every router hears every
completion), of a tenant over the calls that this router placed. Until enough have ended lately a guess from the
profiles stands in. Each refusal is given the next turn at that rate, so that a thousand clients who were refused in one
second come back over the time in which a thousand calls end; who asks before its turn is told the rest of it.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable

MIN_S, MAX_S = 1.0, 60.0
KEPT = 64
"""Ends remembered of each kind."""
LATELY_S = 30.0
"""An older end says nothing about now."""
ENOUGH = 4
TURNS_KEPT = 65_536


class Returns:
    """Ends of calls by kind (a model, a tenant), and who was given which turn. Times in seconds."""

    def __init__(self) -> None:
        self._ends: dict[Hashable, deque[float]] = {}
        self._turns: OrderedDict[str, float] = OrderedDict()
        self._last: dict[Hashable, float] = {}

    def ended(self, of: Hashable, now: float) -> None:
        """A call of this kind ended."""
        ends = self._ends.get(of)
        if ends is None:
            ends = self._ends[of] = deque(maxlen=KEPT)
        ends.append(now)

    def per_s(self, of: Hashable, now: float) -> float | None:
        """Calls of this kind that end per second; None: too few have lately to say."""
        ends = self._ends.get(of)
        while ends and now - ends[0] > LATELY_S:
            ends.popleft()
        if not ends or len(ends) < ENOUGH or now <= ends[0]:
            return None
        return len(ends) / (now - ends[0])

    def after_s(self, of: Hashable, key: str, now: float, first_s: float, per_s: float) -> float:
        """In how many seconds the session `key`, refused now, should ask again: MIN_S to MAX_S, in tenths.

        Args:
            of: what it waits for room of.
            key: the session's.
            now: seconds.
            first_s: when there may be room for one more at all.
            per_s: room that comes per second from then on.
        """
        turn = self._turns.get(key, 0.0)
        if turn <= now:
            turn = max(now + max(first_s, MIN_S), self._last.get(of, 0.0) + 1 / per_s)
            if turn > now + MAX_S:
                # Beyond what is told to anyone: somewhere in the second half, by the key, so that they still spread.
                turn = now + MAX_S * (1 + int(key[:8], 16) / 2**32) / 2
            else:
                self._last[of] = turn
            self._turns[key] = turn
            self._turns.move_to_end(key)
            if len(self._turns) > TURNS_KEPT:
                self._turns.popitem(last=False)
        return max(MIN_S, round(turn - now, 1))

    def came(self, key: str) -> None:
        """The session has a place: its turn is used up."""
        if self._turns:
            self._turns.pop(key, None)
