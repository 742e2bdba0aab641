"""When a server that brings nothing counts as away. Its connection stands, so nothing else shows that it hangs."""

from __future__ import annotations

from typing import Literal

PROBE_S = 0.25
MUTE_S = 1.0
"""A server that brings nothing for this long, not even the answer to a ping, is away, though its connection stands: it
hangs. Shorter than any silence for which a part takes another for dead."""


class Silence:
    """How long the server has brought nothing, as far as we could have heard it; judged every PROBE_S."""

    def __init__(self) -> None:
        self._seconds = 0.0

    def judge(self, lasted_s: float, *, quiet: bool) -> Literal["", "ask", "mute"]:
        """What to do after an interval that `lasted_s`, in which nothing was read if it was `quiet`."""
        if not quiet:
            self._seconds = 0.0
            return ""
        if lasted_s > 2 * PROBE_S:
            return ""  # it was us who stood still: what the server said waits to be read, and is heard in the next one
        asked = self._seconds > 0
        self._seconds += PROBE_S
        if self._seconds >= MUTE_S:
            self._seconds = 0.0
            return "mute"
        return "" if asked else "ask"
