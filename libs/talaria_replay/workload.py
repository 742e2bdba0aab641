"""The paper's replay workload (5.1): ten issues, each on every model, as traces made or read."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from talaria_replay import trace
from talaria_replay.generate import generate
from talaria_replay.trace import Call

ISSUES = 10
CALLS_PER_MODEL = 320
"""960 calls on three models."""
MIN_DEPTH = 16


def on_each_model(issues: Sequence[Sequence[Call]], models: Sequence[str]) -> list[Call]:
    """The same issues once per model: sessions with the same calls, told apart by the model's name."""
    return [
        msgspec.structs.replace(
            call,
            session=f"{call.session}@{model}",
            model=model,
            parent=None if call.parent is None else f"{call.parent}@{model}",
        )
        for issue in issues
        for model in models
        for call in issue
    ]


def generated(models: Sequence[str], *, seed: int, max_context_tokens: int, issues: int = ISSUES) -> list[Call]:
    """Ten sessions of the paper's shape that are deep enough, cut to 32 calls on average as the paper's are."""
    target = CALLS_PER_MODEL * issues // ISSUES
    made = generate("paper", sessions=40 * issues, models=["m"], seed=seed, max_context_tokens=max_context_tokens)
    deep = [s for s in trace.sessions(made).values() if len(s) >= MIN_DEPTH][:issues]
    while sum(map(len, deep)) > target:
        longest = max(range(len(deep)), key=lambda i: len(deep[i]))
        deep[longest] = deep[longest][:-1]
    return on_each_model(deep, models)


def from_trace(calls: Sequence[Call], models: Sequence[str], *, issues: int = ISSUES) -> list[Call]:
    """The first ten Astropy sessions of a trace (the first ten of any kind, if it has none), on each model."""
    sessions = list(trace.sessions(calls).values())
    astropy = [s for s in sessions if "astropy" in s[0].session.lower()]
    return on_each_model((astropy or sessions)[:issues], models)


def first_calls(calls: Sequence[Call], per_session: int) -> list[Call]:
    """The beginning of each session: 120 calls of 30 sessions for the router experiments."""
    return [c for c in calls if c.call < per_session]
