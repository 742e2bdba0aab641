"""Keeps back the tokens of answers that nobody reads as they grow: one report instead of one per token.

Its first token is told at once (times to first tokens are made of it), its last at once with all that was held, and
those between at the latest HOLD_S after they were made or with the next heartbeat. A pure filter of reports.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from talaria_gpu.engine.contract import StepResult, StepTokens, join_steps
from talaria_gpu.engine.ipc import Refused, Report, Stepped

HOLD_S = 0.1


class Holding:
    """What is held, by call."""

    def __init__(self) -> None:
        self._silent: set[str] = set()
        """Calls without a token yet."""
        self._since: dict[str, float] = {}
        """Calls past their first token, and when they last told of one (s)."""
        self._held: dict[str, tuple[str, StepTokens]] = {}

    def expect(self, rid: str) -> None:
        """A call was queued whose tokens may be held."""
        self._silent.add(rid)

    def take(self, now: float, reports: Sequence[Report]) -> list[Report]:
        """What of `reports` is to be told now, in order, held tokens where they belong."""
        if not self._silent and not self._since:
            return list(reports)
        out: list[Report] = []
        for report in reports:
            if isinstance(report, Stepped):
                told = [t for step in report.result.tokens if (t := self._step(now, report.model, step)) is not None]
                if told:
                    result = msgspec.structs.replace(report.result, tokens=told)
                    out.append(Stepped(model=report.model, result=result))
                continue
            if isinstance(report, Refused):
                self._silent.discard(report.rid)
            out.append(report)
        return out

    def flush(self, now: float) -> list[Report]:
        """All that is held."""
        held, self._held = self._held, {}
        self._since.update(dict.fromkeys(held, now))
        return [Stepped(model=model, result=StepResult(kind="idle", tokens=[step])) for model, step in held.values()]

    def _step(self, now: float, model: str, step: StepTokens) -> StepTokens | None:
        rid = step.rid
        if rid in self._silent:
            if step.finished or step.token_ids:
                self._silent.discard(rid)
            if step.token_ids and not step.finished:
                self._since[rid] = now
            return step
        since = self._since.get(rid)
        if since is None:
            return step
        _, before = self._held.pop(rid, ("", None))
        joined = step if before is None else join_steps(before, step)
        assert joined is not None  # its caller holds nothing with log probabilities
        if step.finished:
            del self._since[rid]
            return joined
        if now - since >= HOLD_S:
            self._since[rid] = now
            return joined
        self._held[rid] = (model, joined)
        return None
