"""Which placements a snapshot counts, exactly, per router epoch (`SeenPlacements`; DESIGN 3, 4)."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from talaria_common.wire import SeenPlacements

GAP_S = 30.0
"""A placement that has not come this long after a later one never will: its api died or went elsewhere. By then it has
left the router's overlay by its own deadline, so counting it as seen changes nothing there."""
ROUTER_IDLE_S = 600.0
MAX_GAPS = 256
"""More than an overlay holds in flight on one instance; the oldest count as seen."""


@dataclass(slots=True)
class _Router:
    upto: int = 0
    missing: OrderedDict[int, float] = field(default_factory=OrderedDict)
    """Number -> when it was first found missing, oldest first."""
    last: float = 0.0


class Placements:
    """What has arrived, of all routers."""

    def __init__(self) -> None:
        self._routers: dict[str, _Router] = {}

    def saw(self, now: float, router: str, router_epoch: str, seq: int) -> None:
        """A forward with this placement arrived, whatever became of it."""
        state = self._routers.setdefault(f"{router}/{router_epoch}", _Router())
        state.last = now
        if seq > state.upto:
            # A router that is older than we are starts high: what it placed in our earlier life expires as a gap.
            for skipped in range(max(state.upto + 1, seq - MAX_GAPS), seq):
                state.missing[skipped] = now
            state.upto = seq
        else:
            state.missing.pop(seq, None)
        while len(state.missing) > MAX_GAPS:
            state.missing.popitem(last=False)

    def seen(self, now: float) -> dict[str, SeenPlacements]:
        """For the snapshot; forgets gaps and routers whose time is over."""
        for name in [n for n, s in self._routers.items() if now - s.last > ROUTER_IDLE_S]:
            del self._routers[name]
        for state in self._routers.values():
            while state.missing and now - next(iter(state.missing.values())) > GAP_S:
                state.missing.popitem(last=False)
        return {n: SeenPlacements(upto=s.upto, missing=tuple(sorted(s.missing))) for n, s in self._routers.items()}
