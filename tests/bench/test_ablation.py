"""The ablation benchmark's pure parts: sessions cut and scaled alike, the miniature's constants, ratios within a run."""

from __future__ import annotations

import gzip
import itertools
import json
from pathlib import Path

import pytest
from bench.ablation import figures, models, scale, sessions
from bench.ablation.job import Profile, Replay

from talaria_gpu.sched.ablation import NAMES
from talaria_replay import trace
from talaria_replay.measure import CallRecord


@pytest.fixture
def swebench(tmp_path: Path) -> Path:
    """Twelve sessions, the last two of other tasks, in the public file's form."""
    path = tmp_path / sessions.FILE
    with gzip.open(path, "wt") as out:
        for s in range(12):
            for c in range(5 if s else 2):
                row = {"session": f"{'astropy' if s < 10 else 'django'}-{s}", "call": c, "finish": "stop"}
                row |= {"prompt_tokens": 1000 + 800 * c, "completion_tokens": 50, "tool_output_chars": 9}
                out.write(json.dumps(row) + "\n")
    return path


def test_sessions_are_cut_alike_and_each_issue_is_the_same_on_every_model(swebench: Path) -> None:
    calls = sessions.read(swebench, models.NAMES, calls=4, issues=3, skip=0)
    by_session = trace.sessions(calls)
    assert len(by_session) == 9
    assert {len(s) for s in by_session.values()} == {4}, "sessions that are shorter are left out"
    for issue in range(3):
        same = [list(by_session.values())[3 * issue + m] for m in range(3)]
        assert {tuple((c.prompt_tokens, c.gap_s) for c in s) for s in same} == {
            tuple((c.prompt_tokens, c.gap_s) for c in same[0])
        }
    assert all(c.gap_source == "synthetic" for c in calls if c.call)
    assert calls == sessions.read(swebench, models.NAMES, calls=4, issues=3, skip=0)


def test_a_session_can_begin_in_its_middle(swebench: Path) -> None:
    whole = sessions.read(swebench, ["m"], calls=5, issues=2, skip=0)
    calls = sessions.read(swebench, ["m"], calls=3, issues=2, skip=2)
    assert [c.prompt_tokens for c in calls] == [c.prompt_tokens for c in whole if c.call >= 2]
    assert [c.call for c in calls] == [0, 1, 2] * 2
    assert [c.reusable_tokens for c in calls] == [0, 2650, 3450] * 2, "nobody computed the first one's prefix"


def test_without_a_trace_sessions_are_generated() -> None:
    calls = sessions.read(None, models.NAMES, calls=3, issues=4)
    assert len(trace.sessions(calls)) == 12
    assert {len(s) for s in trace.sessions(calls).values()} == {3}


def test_a_trace_is_named_by_argument_or_environment(swebench: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TALARIA_TRACES", raising=False)
    assert sessions.source(None) is None
    monkeypatch.setenv("TALARIA_TRACES", str(swebench.parent))
    assert sessions.source(None) == swebench
    with pytest.raises(FileNotFoundError):
        sessions.source(swebench.parent / "none.jsonl")


def test_scaled_prompts_keep_their_prefixes(swebench: Path) -> None:
    calls, cut = sessions.scaled(sessions.read(swebench, ["m"], calls=5, issues=2, skip=0), 0.5, 4.0, 2000)
    (first, *_), _ = trace.sessions(calls).values()
    assert [c.prompt_tokens for c in calls if c.session == first.session] == [500, 900, 1300, 1700]
    assert {c.completion_tokens for c in calls} == {12}
    assert cut == 2, "2100 tokens do not fit"
    bodies = sessions.prompts([c for c in calls if c.session == first.session])
    for before, body in itertools.pairwise(bodies):
        assert body[: len(before)] == before
    assert sessions.prompts([c for c in calls if c.session == first.session]) == bodies


def test_costs_stand_to_each_other_as_the_paper_s() -> None:
    """A prefill of 4.3 s takes 2.15 s here: half of the paper's time. Decode takes 40 ms, as four tokens would."""
    one = Profile(
        prefix_tokens=2150, prefill_ms=2150.0, decode_ms=40.0, weight_bytes=750_000_000, kv_bytes_per_token=1000
    )
    how = scale.of({"a": one, "b": one}, 8600)
    assert how.time == pytest.approx(0.5)
    assert how.prompts == pytest.approx(0.25)
    assert how.answers == pytest.approx(4)
    assert how.weights_bytes_per_s == pytest.approx(1e9)  # 0.75 s of ours for 1.5 s
    assert how.kv_bytes_per_s == pytest.approx(2_150_000 / 0.01)
    assert how.slots()["t_ttft_ms"] == pytest.approx(5000)
    assert how.slots()["t_tpot_ms"] == pytest.approx(200)  # five steps, as there


def replay(factor: float) -> Replay:
    """Two sessions of two calls; every time is `factor`."""
    records = [
        CallRecord(
            session=s, call=c, model="m", intended_s=c * factor, sent_s=c * factor, first_s=(c + 0.5) * factor,
            done_s=(c + 1) * factor, prompt_tokens=100, completion_tokens=3, cached_tokens=50 * c,
        )
        for s in "xy" for c in range(2)
    ]  # fmt: skip
    slot = {"round": 1, "wall_ms": 10.0, "switch_ms": 4.0, "round_ms": 10.0, "infeasible": "", "sp_admitted": 3}
    slot |= dict.fromkeys(("p_ms", "d1_ms", "sp_ms", "d_ms", "dfin_ms", "linger_ms"), 1.0) | {"sp_deferred": 1}
    return Replay(
        records=records, tokens={}, slots=[slot, slot | {"round": 2}],
        switches=[{"total_ms": 4.0, "weight_bytes": 100, "d2d_bytes": 25}],
        wall_s=2 * factor, scheduler_s=0.01, engine_s=1.0,
    )  # fmt: skip


def test_ratios_are_taken_within_a_run() -> None:
    runs = [
        {name: {"main": replay(run * (1 if name == "talaria" else 3)), "single": replay(run)} for name in NAMES}
        for run in (1, 10)
    ]
    found = figures.figures(runs)
    assert found["sct_p50_round_only_over_talaria"] == {"median": 3.0, "min": 3.0, "max": 3.0, "unit": "x"}
    assert found["sct_p95_s_talaria"]["max"] == 20
    assert found["single_wall_no_sp_over_talaria"]["median"] == 1
    assert found["ttft_p50_s_talaria"]["min"] == 0.5
    assert found["round_switch_share_talaria"]["median"] == pytest.approx(0.4)
    assert found["sp_admission_rate_talaria"]["median"] == pytest.approx(0.75)
    assert found["staged_share_talaria"]["median"] == pytest.approx(0.25)
    assert found["cached_share_talaria"]["median"] == pytest.approx(0.25)
