"""What one `handle` of the core has to say, collected and put in order."""

from __future__ import annotations

from typing import Any

from talaria_common import subjects
from talaria_common.wire import Completion, Frame, TokenBatch
from talaria_instance import events
from talaria_instance.messages import Effect, Publish


class Outbox:
    """Args: iid, epoch: who speaks."""

    def __init__(self, iid: str, epoch: str) -> None:
        self._iid = iid
        self._epoch = epoch
        self._effects: list[Effect] = []
        self._completions: list[Completion] = []
        self._frames: dict[str, list[Frame]] = {}
        self._alive: dict[str, list[str]] = {}
        self._events: list[Publish] = []

    def do(self, effect: Effect) -> None:
        """An effect, before everything else and in order."""
        self._effects.append(effect)

    def frame(self, api: str, frame: Frame) -> None:
        """A frame for `api`; all of one `handle` leave as one batch (GATEWAY 1)."""
        self._frames.setdefault(api, []).append(frame)

    def alive(self, api: str, rid: str) -> None:
        """A call of `api` that lives here, on a heartbeat."""
        self._alive.setdefault(api, []).append(rid)

    def completion(self, message: Completion) -> None:
        """A completion hook."""
        self._completions.append(message)

    def event(self, now: float, kind: str, data: dict[str, Any]) -> None:
        """An event."""
        self._events.append(events.make(now, kind, self._iid, data))

    def flush(self) -> list[Effect]:
        """All of it, once.

        Completions go before frames: a client that answers its final frame at once must find its lease installed.
        """
        out, self._effects = self._effects, []
        if self._completions:
            out += [Publish(subjects.completion(self._iid), message) for message in self._completions]
            self._completions = []
        if self._alive:
            for api in self._frames | self._alive:
                self._batch(out, api, self._frames.get(api, []), self._alive.get(api))
            self._frames, self._alive = {}, {}
        elif self._frames:
            for api, frames in self._frames.items():
                self._batch(out, api, frames, None)
            self._frames = {}
        if self._events:
            out += self._events
            self._events = []
        return out

    def _batch(self, out: list[Effect], api: str, frames: list[Frame], alive: list[str] | None) -> None:
        batch = TokenBatch(iid=self._iid, epoch=self._epoch, frames=frames, alive=alive)
        out.append(Publish(subjects.tokens(api), batch))
