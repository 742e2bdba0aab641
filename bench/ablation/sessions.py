"""The sessions that are replayed: ten issues on each of three models, cut and scaled alike (5.1, appendix A)."""

from __future__ import annotations

import itertools
import os
import random
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from bench.ablation.models import VOCAB
from talaria_replay import convert, trace, workload
from talaria_replay.generate import gap, generate
from talaria_replay.trace import Call

SEED = 7
FILE = "swebench_verified.calls.jsonl.gz"
"""In a folder of traces: the paper's tasks, by another agent."""
SKIP = 10
"""Calls of a trace's session that are left out. The paper's sessions begin with tens of thousands of tokens and grow by
a few percent with each call; mini-swe-agent's begin with few, and each call adds a quarter."""
FIRST_ID = 100
"""Of the ids that prompts are made of: what comes before has a meaning to some tokenizer."""


def source(given: Path | None) -> Path | None:
    """The trace to read: `given`, else $TALARIA_TRACES; None: neither. Raises FileNotFoundError."""
    path = given or (Path(os.environ["TALARIA_TRACES"]) if os.environ.get("TALARIA_TRACES") else None)
    if path is not None and path.is_dir():
        path /= FILE
    if path is not None and not path.is_file():
        raise FileNotFoundError(f"no trace at {path}")
    return path


def read(path: Path | None, models: Sequence[str], *, calls: int, issues: int, skip: int = SKIP) -> list[Call]:
    """`issues` sessions on each model, of each its calls from the `skip`th on, `calls` of them.

    Gaps that the trace lacks are drawn (synthetic). Without a trace sessions are generated, and none is skipped into:
    they begin as the paper's do.
    """
    if path is None:
        made = list(generate("paper", sessions=40 * issues, models=["m"], seed=SEED, max_calls=calls))
        return workload.on_each_model(_windows(made, 0, calls)[:issues], models)
    whole = list(itertools.chain.from_iterable(_windows(_calls(path), skip, calls)))
    rng = random.Random(SEED)
    # One gap for an issue's call, whichever the model: sessions are told apart by their model alone.
    return workload.from_trace(list(convert.with_gaps(whole, lambda: gap(rng))), models, issues=issues)


def _windows(calls: Iterable[Call], skip: int, length: int) -> list[list[Call]]:
    """Of each session that has them, `length` calls after the first `skip`, as if it had begun there."""
    out: list[list[Call]] = []
    for session in trace.sessions(calls).values():
        kept = [msgspec.structs.replace(c, call=n) for n, c in enumerate(session[skip : skip + length])]
        if len(kept) == length:
            kept[0] = msgspec.structs.replace(kept[0], reusable_tokens=0)
            out.append(kept)
    return out


def _calls(path: Path) -> list[Call]:
    _, row = next(convert.rows(path))
    if "lcp_prev_blocks" in row or "hash_ids" in row or "think_time" in row:
        return list(convert.claude_code_calls(path))
    if "tool_output_chars" in row or "finish" in row:
        return list(convert.swebench_calls(path))
    return trace.read(path)


def median_prefix(calls: Sequence[Call]) -> float:
    """Tokens that a return finds computed, at the median: what is recomputed where nothing is kept."""
    return statistics.median(c.reusable_tokens for c in calls if c.call)


def scaled(calls: Sequence[Call], factor: float, answers: float, context: int) -> tuple[list[Call], int]:
    """The calls with prompts times `factor` and answers over `answers`; and how many were cut off.

    A session ends before the first call that no longer fits the context.
    """
    out: list[Call] = []
    for session in trace.sessions(calls).values():
        before: Call | None = None
        for call in session:
            prompt, answer = max(1, round(call.prompt_tokens * factor)), max(1, round(call.completion_tokens / answers))
            if prompt + answer > context:
                break
            most = 0 if before is None else min(prompt, before.prompt_tokens)
            before = msgspec.structs.replace(
                call,
                prompt_tokens=prompt,
                completion_tokens=answer,
                reusable_tokens=min(most, round(call.reusable_tokens * factor)),
            )
            out.append(before)
    return out, len(calls) - len(out)


def prompts(session: Sequence[Call]) -> list[list[int]]:
    """Token ids of a session's prompts: the same in every run, each with what it shares with the one before.

    As in the paper's replay the bodies are fixed: an answer is not in the next prompt, the recorded one is.
    """
    out: list[list[int]] = []
    rng = random.Random(session[0].session)
    for call in session:
        kept = out[-1][: call.reusable_tokens] if out else []
        out.append(kept + [rng.randrange(FIRST_ID, VOCAB) for _ in range(call.prompt_tokens - len(kept))])
    return out


def starts(calls: Sequence[Call], spread_s: float) -> dict[str, float]:
    """When each session begins (s): evenly over `spread_s`, models in turn."""
    names = list(trace.sessions(calls))
    return dict(zip(names, itertools.count(0.0, spread_s / max(1, len(names))), strict=False))
