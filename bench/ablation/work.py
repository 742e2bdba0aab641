"""What a replay's steps did and took. Beside what curves say of the same steps it tells, where a prediction parts from
the engine, a wrong curve from a different course."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from talaria_gpu.engine.contract import StepResult


class Work(msgspec.Struct, kw_only=True):
    """Sums over steps, in the terms of `talaria_replay.sim.device.Times`; ms are the engine's."""

    prefills: int = 0
    new_tokens: int = 0
    """Computed by prefills, those of calls that were retracted again."""
    pairs: float = 0.0
    """Σ new · (cached + new/2) of calls, whenever their prefill comes to its end."""
    prefill_ms: float = 0.0
    """Without restores."""
    decodes: dict[int, int] = {}
    """Iterations, by the calls in each."""
    context: int = 0
    """Σ tokens of all calls' contexts."""
    decode_ms: dict[int, float] = {}
    """The same."""
    restored_tokens: int = 0
    restore_ms: float = 0.0

    def add(self, result: StepResult, context: Callable[[str], int]) -> None:
        """A step's; `context`: tokens of a call's prompt and of what it has said so far."""
        if result.kind == "prefill":
            self.prefills += 1
            self.new_tokens += result.prefilled_tokens + result.recomputed_tokens
            self.prefill_ms += result.wall_ms - result.restore_ms
            for news in result.tokens:
                if news.token_ids and news.prefilled_tokens:
                    self.pairs += news.prefilled_tokens * (news.cached_tokens + news.prefilled_tokens / 2)
        elif result.kind == "decode":
            self.decodes[result.batch] = self.decodes.get(result.batch, 0) + result.steps
            self.context += sum(context(news.rid) for news in result.tokens)
            took = result.wall_ms - result.restore_ms
            self.decode_ms[result.batch] = self.decode_ms.get(result.batch, 0.0) + took
        self.restored_tokens += result.restored_tokens
        self.restore_ms += result.restore_ms


def watch(engine: Any, seen: Callable[[str, StepResult], None]) -> None:
    """From now on `seen` is told of each of `engine`'s steps, and of which model."""
    step = engine.step

    def watched(admit: frozenset[str] | None) -> StepResult:
        result: StepResult = step(admit)
        seen(engine.active, result)
        return result

    engine.step = watched
