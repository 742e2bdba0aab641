"""Where a call's prompt tokens came from: the cache, the first computation, or computation again after a retract."""

from __future__ import annotations

from dataclasses import dataclass

from talaria_common.errors import EngineError


@dataclass(slots=True)
class PromptAccount:
    """One call's prompt of `prompt` tokens. Fed with what each prefill really covered.

    When the first token is there, cached + prefilled = prompt. What a retract made the engine compute a second time is
    in `recomputed`, and in neither of the two.
    """

    prompt: int
    cached: int = 0
    prefilled: int = 0
    recomputed: int = 0
    _covered: int = 0
    """Tokens [0, _covered) have been counted as cached or prefilled."""

    def check(self) -> None:
        """Raise EngineError unless every prompt token was either cached or prefilled."""
        if self.cached + self.prefilled != self.prompt:
            raise EngineError(f"{self.cached} cached + {self.prefilled} prefilled tokens of a prompt of {self.prompt}")

    def extend(self, start: int, length: int) -> tuple[int, int]:
        """A prefill computed positions [start, start + length); those before `start` were in the cache.

        Returns: tokens computed for the first time, and again.
        """
        skipped = min(start, self.prompt) - self._covered
        if skipped > 0:
            self.cached += skipped
            self._covered += skipped
        fresh = max(0, min(start + length, self.prompt) - self._covered)
        again = length - fresh
        self._covered += fresh
        self.prefilled += fresh
        self.recomputed += again
        return fresh, again
