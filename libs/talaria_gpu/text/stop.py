"""Stop strings over streamed text, with OpenAI's semantics: the output ends before the match."""

from __future__ import annotations

from typing import NamedTuple


class Released(NamedTuple):
    """`text` may go out now; `matched` is the stop string that ended the output, or None."""

    text: str
    matched: str | None = None


class StopStrings:
    """Holds back what might be the beginning of a stop string.

    The match that completes first wins (of those that complete together, the longest); the text before it is the
    whole output. How the text is cut into pieces makes no difference: nothing that could still become part of a match
    is ever released.
    """

    def __init__(self, stops: tuple[str, ...] | list[str]) -> None:
        if any(not s for s in stops):
            raise ValueError("an empty stop string matches everywhere")
        self._stops = tuple(stops)
        self._held = ""

    def feed(self, text: str) -> Released:
        """Add text; returns what may go out. After a match nothing more must be fed."""
        if not self._stops:
            return Released(text)
        buffer = self._held + text
        found = self._first(buffer)
        if found is not None:
            at, stop = found
            self._held = ""
            return Released(buffer[:at], stop)
        keep = self._partial(buffer)
        self._held = buffer[len(buffer) - keep :]
        return Released(buffer[: len(buffer) - keep])

    def flush(self) -> str:
        """The held-back text, when the output ended for another reason."""
        held, self._held = self._held, ""
        return held

    def _first(self, buffer: str) -> tuple[int, str] | None:
        """Of all matches the one with the smallest end (that is when it stops), then the earliest start."""
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            at = buffer.find(stop)
            if at >= 0 and (best is None or (at + len(stop), at) < best[:2]):
                best = (at + len(stop), at, stop)
        return None if best is None else (best[1], best[2])

    def _partial(self, buffer: str) -> int:
        """Length of the longest suffix of `buffer` that is a proper prefix of a stop string."""
        longest = 0
        for stop in self._stops:
            for n in range(min(len(stop) - 1, len(buffer)), longest, -1):
                if stop.startswith(buffer[len(buffer) - n :]):
                    longest = n
                    break
        return longest
