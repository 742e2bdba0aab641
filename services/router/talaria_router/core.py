"""The router as a pure machine: `handle(now, message) -> effects`. For the shell, the tests and the simulator."""

from __future__ import annotations

from collections.abc import Iterator

from talaria_common.wire import ClusterView, Completion, SessionRecord, Snapshot
from talaria_router import asking, following
from talaria_router.config import RouterConfig
from talaria_router.messages import Ask, Controlled, Effect, Gained, Heard, Input, Lost, Probed, Restored, Tick
from talaria_router.state import RouterState, Turn


class RouterCore:
    """One router.

    Args:
        config: see `RouterConfig`.
        router: its name; partitions are claimed under it.
        epoch: this life of it; placements are numbered within it.
    """

    def __init__(self, config: RouterConfig, router: str, epoch: str) -> None:
        self.state = RouterState(config, router, epoch)

    def handle(self, now: float, message: Input) -> list[Effect]:  # noqa: C901 - one case per message
        """Take in one message at `now` (seconds, never going back); returns what is to be done, in order."""
        turn = Turn(self.state, now)
        if isinstance(message, Ask):
            asking.ask(turn, message)
        elif isinstance(message, Completion):
            following.completed(turn, message)
        elif isinstance(message, ClusterView):
            following.viewed(turn, message)
        elif isinstance(message, Tick):
            following.ticked(turn)
        elif isinstance(message, Snapshot):
            following.heard(turn, message)
        elif isinstance(message, Restored):
            following.restored(turn, message)
        elif isinstance(message, Probed):
            following.probed(turn, message)
        elif isinstance(message, Controlled):
            following.controlled(turn, message)
        elif isinstance(message, Heard):
            self.state.cluster.connection(now, message.connected)
        elif isinstance(message, Gained):
            following.gained(turn, message)
        else:
            assert isinstance(message, Lost)
            following.lost(turn, message)
        return turn.out

    def settle(self, model: str) -> None:
        """Take up now, while nobody waits, what the last ask for the model changed: the next one is answered sooner."""
        self.state.ranker.boards.settle_one(model)

    def record(self, key: str) -> SessionRecord | None:
        """The session's record to be written behind; None: it is to be deleted."""
        entry = self.state.sessions.get(key)
        return None if entry is None else entry.record()

    def sessions(self) -> Iterator[tuple[str, SessionRecord]]:
        """All sessions, longest unused first, for `talaria sessions`."""
        return ((key, entry.record()) for key, entry in self.state.sessions.items())
