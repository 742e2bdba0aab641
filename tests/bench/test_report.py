"""Figures and result files."""

from __future__ import annotations

import json

import pytest
from bench.gateway.cases import BURST, every, paced, quick, unpaced
from bench.gateway.figures import GOALS, make, verdicts
from bench.gateway.load import Result
from bench.mesh import window_s
from bench.report import figure, percentile, write


def sample(requests: int = 100, wall_s: float = 1.0, **more) -> Result:
    values = {
        "errors": [],
        "failed": 0,
        "cpu_s": {"worker": 0.1},
        "load_cpu_s": 0.1,
        "ttft_ms": [20.0] * 20,
        "per_token_ms": [10.0] * 20,
        "gap_ms": [10.0] * 20,
        "total_ms": [30.0] * 20,
        "burst_ms": [330.0, 340.0, 350.0],
    }
    return Result(requests=requests, wall_s=wall_s, **values | more)


@pytest.mark.parametrize(("q", "want"), [(0.5, 50), (0.95, 95), (0.0, 1), (1.0, 100)])
def test_percentile_is_a_value_that_was_seen(q, want):
    assert percentile(list(range(100, 0, -1)), q) == want


def test_percentile_of_one():
    assert percentile([7.0], 0.5) == percentile([7.0], 0.95) == 7.0


def test_figure_over_runs():
    assert figure([3.0, 1.0, 2.0], "ms") == {"median": 2.0, "min": 1.0, "max": 3.0, "unit": "ms"}
    with pytest.raises(ValueError, match="run"):
        figure([], "ms")


def test_result_file_has_the_agreed_keys(tmp_path):
    path = write("x", 2, {"b": figure([1.0], "x"), "a": figure([2.0], "x")}, tmp_path / "x.json", where="here")
    result = json.loads(path.read_text())
    assert list(result) == ["name", "when", "commit", "machine", "runs", "figures"]
    assert list(result["figures"]) == ["a", "b"]
    assert result["runs"] == 2


def test_ratios_are_of_one_run_each_and_added_latency_is_over_direct():
    case, latency = unpaced("1kb", 16, stream=False), paced("1kb", 1)
    runs = []
    for talaria, litellm in ((300, 10), (100, 10), (900, 100)):  # ratios 30, 10, 9: their median is not that of medians
        runs.append(
            {
                case.name: {
                    "talaria": sample(talaria, cpu_s={"api": 0.3, "nats": 0.3, "engine": 9.0}),
                    "litellm": sample(litellm, cpu_s={"litellm": 1.0, "worker": 1.0}),
                },
                latency.name: {"talaria": sample(ttft_ms=[22.0] * 19 + [40.0]), "direct": sample()},
            }
        )
    figures = make([case, latency], runs)
    assert figures["rps_talaria_over_litellm_whole_1kb_c16"]["median"] == 10
    assert figures["added_ttft_p50_ms_1kb_c1"]["median"] == 2
    assert figures["cpu_ms_per_request_talaria_whole_1kb_c16"]["max"] == pytest.approx(6)  # 0.6 s of 100, engine apart
    assert figures["cpu_ms_per_request_of_engine_whole_1kb_c16"]["max"] == pytest.approx(90)
    assert "rps_talaria_over_sglang_router_whole_1kb_c16" not in figures


def test_every_goal_is_a_figure_of_a_full_and_of_a_quick_run():
    for cases in (every(), quick()):
        run = {
            c.name: {s: sample(cpu_s={s: 0.2}) for s in ("direct", "talaria", "litellm", "sglang_router")}
            for c in cases
        }
        figures = make(cases, [run])
        assert [g.figure for g in GOALS if g.figure not in figures] == []
        assert len(verdicts(figures)) == len(GOALS)


def test_verdict_says_when_a_goal_is_missed():
    run = {BURST.name: {"talaria": sample(burst_ms=[400.0]), "direct": sample(burst_ms=[340.0])}}
    (line,) = verdicts(make([BURST], [run]))
    assert line.startswith("MISS paced64_finish_over_direct = 1.17")


def test_windows_keep_the_budget():
    assert 0.4 <= window_s(every(), 4, 3, 600) <= 3
    assert window_s(every(), 4, 30, 600) == 0.4
