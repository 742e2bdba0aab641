"""The generator against the figures it is built on, and against the real traces where they are at hand."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from talaria_replay.convert import claude_code_calls, message_logs, swebench_calls, with_gaps
from talaria_replay.generate import SHAPES, generate
from talaria_replay.quantiles import nearest_rank
from talaria_replay.trace import Call, read, sessions, write


def prompts(calls: list[Call], *percents: float) -> list[float]:
    return [nearest_rank([c.prompt_tokens for c in calls], p) for p in percents]


def pairs(calls: list[Call]) -> list[tuple[Call, Call]]:
    """Each continuation with the call before it."""
    return [pair for session in sessions(calls).values() for pair in pairwise(session)]


def test_paper_shape_has_the_published_quantiles() -> None:
    calls = list(generate("paper", sessions=1500, models=["m"], seed=1))
    by_session = sessions(calls)
    depth = [len(s) for s in by_session.values()]
    assert nearest_rank(depth, 50) == pytest.approx(11, abs=1)
    assert nearest_rank(depth, 95) == pytest.approx(49, rel=0.1)
    assert max(depth) <= 187
    gaps = [c.gap_s for c in calls if c.gap_s is not None]
    assert nearest_rank(gaps, 50) == pytest.approx(0.39, rel=0.05)
    assert nearest_rank(gaps, 95) == pytest.approx(1.32, rel=0.07)
    assert prompts(calls, 50)[0] == pytest.approx(25_000, rel=0.15)
    assert prompts(calls, 95)[0] == pytest.approx(105_000, rel=0.15)
    continuations = [c for c in calls if c.call]
    before = {(c.session, c.call): c for c in calls}
    half = sum(c.reusable_tokens > before[c.session, c.call - 1].prompt_tokens / 2 for c in continuations)
    assert half / len(continuations) == pytest.approx(0.968, abs=0.01)
    assert {c.gap_source for c in continuations} == {"synthetic"}


@given(st.sampled_from(sorted(SHAPES)), st.integers(0, 2**32), st.integers(1, 4), st.sampled_from([None, 2000, 9000]))
@settings(max_examples=30, deadline=None)
def test_any_generated_trace_is_valid_and_repeatable(
    tmp_path_factory: pytest.TempPathFactory, shape: str, seed: int, count: int, limit: int | None
) -> None:
    def make() -> list[Call]:
        return list(
            generate(shape, sessions=count, models=["a", "b"], seed=seed, max_calls=30, max_context_tokens=limit)
        )

    calls = make()
    assert calls == make()
    file = tmp_path_factory.mktemp("t") / "t.jsonl"
    write(file, calls)
    assert read(file) == calls
    if limit is not None:
        assert max(c.prompt_tokens + c.completion_tokens for c in calls) <= limit


REAL = {
    "mini-swe-agent": ("swebench_verified.calls.jsonl.gz", swebench_calls),
    "claude-code": ("claude_code.calls.jsonl.gz", claude_code_calls),
}


@pytest.mark.parametrize(("shape", "tolerance"), [("mini-swe-agent", 0.15), ("claude-code", 0.3)])
def test_shapes_against_the_real_traces(traces: Path, tmp_path: Path, shape: str, tolerance: float) -> None:
    file, convert = REAL[shape]
    real = [c for c in convert(traces / file) if c.parent is None]
    write(tmp_path / "real.jsonl.gz", convert(traces / file))
    assert len(read(tmp_path / "real.jsonl.gz")) >= len(real)  # the converter's output is a valid trace
    made = list(generate(shape, sessions=1500, models=["m"], seed=2))
    for percent in (25, 50, 75, 95):
        a, b = prompts(made, percent)[0], prompts(real, percent)[0]
        assert a == pytest.approx(b, rel=tolerance), f"prompt p{percent}: generated {a}, real {b}"
    depth = [[len(s) for s in sessions(c).values()] for c in (made, real)]
    for percent in (25, 50, 75, 95):
        assert nearest_rank(depth[0], percent) == pytest.approx(nearest_rank(depth[1], percent), rel=0.12, abs=1)


@pytest.mark.parametrize("shape", REAL)
def test_growth_completion_and_reuse_against_the_real_traces(traces: Path, shape: str) -> None:
    """Up to p95 of growth: beyond it the real Claude Code has histories written anew, of which shapes know nothing."""
    file, convert = REAL[shape]
    real = [c for c in convert(traces / file) if c.parent is None]
    made = list(generate(shape, sessions=1500, models=["m"], seed=2))
    of = [pairs(calls) for calls in (made, real)]
    growth = [[b.prompt_tokens - b.reusable_tokens for _, b in each] for each in of]
    completion = [[c.completion_tokens for c in calls] for calls in (made, real)]
    for name, values, percents, rel in (
        ("growth", growth, (25, 50, 75, 90, 95), 0.15),
        ("completion", completion, (5, 25, 50, 75, 95, 99), 0.06),
    ):
        for percent in percents:
            a, b = (nearest_rank(v, percent) for v in values)
            assert a == pytest.approx(b, rel=rel), f"{name} p{percent}: generated {a}, real {b}"
    half = [sum(2 * b.reusable_tokens > a.prompt_tokens + a.completion_tokens for a, b in each) for each in of]
    assert half[0] / len(of[0]) == pytest.approx(half[1] / len(of[1]), abs=0.005)
    reused = [sum(b.reusable_tokens for _, b in each) / sum(b.prompt_tokens for _, b in each) for each in of]
    assert reused[0] == pytest.approx(reused[1], abs=0.015)


@pytest.mark.parametrize("shape", SHAPES)
def test_gaps_are_the_published_ones_in_every_shape(shape: str) -> None:
    """No real trace here records gaps of tools alone: mini-swe-agent's are unusable, Claude Code's include people."""
    gaps = [c.gap_s for c in generate(shape, sessions=400, models=["m"], seed=2) if c.gap_s is not None]
    assert nearest_rank(gaps, 50) == pytest.approx(0.39, rel=0.05)
    assert nearest_rank(gaps, 95) == pytest.approx(1.32, rel=0.07)


def test_messages_become_calls(traces: Path) -> None:
    calls = list(message_logs(traces / "taubench_airline.jsonl.gz", model="m"))
    by_session = sessions(calls)
    assert len(by_session) == 200
    for session in by_session.values():
        for a, b in pairwise(session):
            assert a.messages is not None
            assert b.messages is not None
            assert b.messages[: len(a.messages)] == a.messages
            assert b.reusable_tokens == a.prompt_tokens + a.completion_tokens


def test_gaps_are_added_only_where_there_is_none() -> None:
    calls = [
        Call(session="s", call=0, model="m", prompt_tokens=5, completion_tokens=1),
        Call(session="s", call=1, model="m", prompt_tokens=5, completion_tokens=1, gap_s=2.0, gap_source="recorded"),
        Call(session="s", call=2, model="m", prompt_tokens=5, completion_tokens=1),
    ]
    out = list(with_gaps(calls, lambda: 0.5))
    assert [(c.gap_s, c.gap_source) for c in out] == [(None, "none"), (2.0, "recorded"), (0.5, "synthetic")]
