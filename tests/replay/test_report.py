"""The report: experiments are data, and what is not simulated is said, not made up."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from msgspec.structs import replace

from talaria_cli.report import ReportOptions, run_report
from talaria_replay import trace, workload
from talaria_replay.generate import generate
from talaria_replay.report import spec
from talaria_replay.report.figures import draw
from talaria_replay.report.outcome import Outcome, metric
from talaria_replay.sim.run import simulate
from talaria_replay.trace import read, write

MODELS = ["a", "b", "c"]


def test_the_workload_is_the_paper_s_in_numbers(tmp_path: Path) -> None:
    calls = workload.generated(MODELS, seed=0, max_context_tokens=190_000)
    assert len(calls) == 960
    sessions = trace.sessions(calls)
    assert len(sessions) == 30
    per_issue: dict[str, set[int]] = {}
    for name, session in sessions.items():
        per_issue.setdefault(name.split("@")[0], set()).add(len(session))
    assert len(per_issue) == 10
    assert all(len(depths) == 1 for depths in per_issue.values())  # the same issue on each model
    write(tmp_path / "t.jsonl", calls)
    assert read(tmp_path / "t.jsonl") == calls
    assert len(workload.first_calls(calls, 4)) == 120


def test_a_trace_s_astropy_sessions_come_first() -> None:
    calls = list(generate("mini-swe-agent", sessions=6, models=["x"], seed=1, max_calls=3))
    marked = [replace(c, session=f"astropy-{c.session}") if c.session.endswith(("1", "3")) else c for c in calls]
    made = workload.from_trace(marked, MODELS)
    assert {c.session.split("@")[0] for c in made} == {c.session for c in marked if c.session.startswith("astropy")}
    assert {c.model for c in made} == set(MODELS)


def test_the_quick_parts_of_the_report(tmp_path: Path) -> None:
    code = run_report(ReportOptions("paper", tmp_path, None, ["figure-2", "table-2", "figure-9"], 1, 0))
    assert code == 0
    text = (tmp_path / "report.md").read_text()
    assert "| paper, measured |" in text
    assert "generated: the paper's shape, 1 issues" in text
    assert "gaps are synthetic" in text
    for png in ("figure-2.png", "figure-9.png"):
        assert (tmp_path / png).read_bytes().startswith(b"\x89PNG")
        assert png in text


def test_ratios_to_a_published_zero_are_left_out(tmp_path: Path) -> None:
    assert run_report(ReportOptions("paper", tmp_path, None, ["figure-10"], 1, 0)) == 0


@pytest.mark.timeout(120)
def test_capacity_and_catalogs_are_experiments(tmp_path: Path) -> None:
    (tmp_path / "e.toml").write_text(
        """
[scenarios.s]
groups = [{ hardware = "paper-tp4", models = ["qwen3-32b", "qwen2.5-32b"] }]
calibration = "roofline"
overload = "queue"
sessions_per_s = 2.0
page_tokens = 256
kv_block_tokens = 256

[[experiments]]
id = "c"
title = "capacity"
kind = "capacity"
section = "x"
scenario = "s"
bounds = [1000.0, 0.001]
most = 2
metrics = ["sct_s.p95"]

[[experiments]]
id = "many"
title = "a catalog"
kind = "catalog"
section = "x"
scenario = "s"
instances = 4
catalog = { hardware = "paper-tp4", base = ["qwen3-32b", "qwen2.5-32b"], size = 8, exponent = 1.0 }
shape = "mini-swe-agent"
sessions = 60
max_calls = 2
metrics = ["sct_s.p95"]
changes = { "talaria" = {}, "sticky" = { policy = "session-sticky" } }

[[experiments]]
id = "many-c"
title = "capacity of a catalog"
kind = "capacity"
section = "x"
scenario = "s"
catalog = { hardware = "paper-tp4", base = ["qwen3-32b", "qwen2.5-32b"], size = 8, exponent = 1.0 }
shape = "mini-swe-agent"
sessions = 60
max_calls = 2
bounds = [1000.0]
metrics = ["sct_s.p95"]
"""
    )
    assert run_report(ReportOptions(str(tmp_path / "e.toml"), tmp_path, None, [], 1, 0)) == 0
    text = (tmp_path / "report.md").read_text()
    assert "| p95 SCT under 1000 s, roofline | instances | 1 |" in text
    assert "| p95 SCT under 0.001 s, roofline | instances | - |" in text
    assert "none is enough" in text
    for what in ("talaria", "sticky"):
        assert f"| {what}, roofline | sct_s.p95 |" in text
    assert "8 models, Zipf 1" in text
    many = text[text.index("## many-c") :]
    assert "| p95 SCT under 1000 s, roofline | instances | 3 |" in many, "the least that has a place for eight models"


def test_what_a_profile_forbids_is_said_in_its_row_and_the_rest_goes_on(tmp_path: Path) -> None:
    """With so little HBM the model does not fit: what follows from a change is known only when it is made."""
    (tmp_path / "e.toml").write_text(
        """
[scenarios.s]
groups = [{ hardware = "paper-tp4", models = ["qwen3-32b"] }]
calibration = "roofline"

[[experiments]]
id = "memory"
title = "less memory"
kind = "sweep"
section = "x"
scenario = "s"
metrics = ["sct_s.p50", "sct_s.p95"]
changes = { "as it is" = {}, "small" = { hardware = { hbm_gib = 10.0 } } }

[[experiments]]
id = "c"
title = "capacity without measurements"
kind = "capacity"
section = "x"
scenario = "s"
calibrations = ["measured"]
bounds = [1000.0]
metrics = ["sct_s.p95"]
"""
    )
    assert run_report(ReportOptions(str(tmp_path / "e.toml"), tmp_path, None, [], 1, 0)) == 0
    text = (tmp_path / "report.md").read_text()
    assert re.search(r"\| as it is, roofline \| sct_s.p95 \| \d", text)
    assert re.search(
        r"\| small, roofline \| sct_s.p50 \| - \| - \| - \| model qwen3-32b does not fit paper-tp4: ", text
    )
    assert re.search(r"\| p95 SCT under 1000 s, measured \| instances \| - \| .*no \[measured.paper-tp4\]", text)


FIGURES = ["figure-12", "figure-13"]


def test_figures_share_simulations_and_a_second_report_needs_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_report(ReportOptions("paper", tmp_path, None, FIGURES, 1, 0)) == 0
    first = (tmp_path / "report.md").read_text()
    runs = sorted((tmp_path / "runs").iterdir())
    assert len(runs) == 2 * 2  # calibrations and ablations, in both figures
    for figure in FIGURES:
        assert (tmp_path / f"{figure}.png").is_file()
    stamps = [run.stat().st_mtime_ns for run in runs]
    (tmp_path / "report.md").unlink()
    assert run_report(ReportOptions("paper", tmp_path, None, FIGURES, 1, 0)) == 0
    assert (tmp_path / "report.md").read_text() == first
    assert [run.stat().st_mtime_ns for run in runs] == stamps


@pytest.mark.parametrize("name", ["paper", "beyond"])
def test_every_metric_is_one_that_results_have(name: str) -> None:
    """A misspelt one would be an empty column for ever. Switch paths are there if a switch took them."""
    shipped = spec.load(name)
    scenario = shipped.scenarios["tp8"]
    calls = workload.generated(
        ["qwen3-235b", "glm-5-nvfp4", "qwen3.5-122b"], seed=0, max_context_tokens=90_000, issues=1
    )
    summary = simulate(replace(scenario, calibration="aic"), calls[:24]).summary
    for e in shipped.experiments:
        published = [values for values in e.paper.values() if isinstance(values, dict)]
        nested = [deep for values in published for deep in values.values() if isinstance(deep, dict)]
        for path in {
            *e.metrics,
            *e.highest,
            *(p for values in [*published, *nested] for p in values if "." in p or p in summary),
        }:
            if not path.startswith("switch_paths."):
                assert metric(summary, path) is not None, f"{e.id}: {path}"


def test_where_prediction_and_paper_part_is_said() -> None:
    for e in spec.load("paper").experiments:
        assert e.why, e.id
        assert e.metrics or e.paper


def test_a_picture_of_forty_curves_has_room_for_their_names(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    starts = next(e for e in spec.load("paper").experiments if e.id == "starts")
    curves = {f"round-only, paper, number {n} at once": [1.0 + n, 2.0 + n, 30.0] for n in range(40)}
    assert draw(Outcome(starts, curves=curves, curve="sct"), tmp_path / "it.png")  # a warning would be an error
    assert (tmp_path / "it.png").stat().st_size > 10_000


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["paper", "beyond"])
def test_the_whole_report_with_one_issue(tmp_path: Path, name: str) -> None:
    assert run_report(ReportOptions(name, tmp_path, None, [], 1, 0)) == 0
    text = (tmp_path / "report.md").read_text()
    for e in spec.load(name).experiments:
        assert f"## {e.id}: " in text


def test_mistakes_in_experiment_files_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "e.toml").write_text('[[experiments]]\nid = "x"\n')
    assert run_report(ReportOptions(str(tmp_path / "e.toml"), tmp_path, None, [], 1, 0)) == 2
    assert "e.toml: " in capsys.readouterr().err
    assert run_report(ReportOptions("paper", tmp_path, None, ["figure-99"], 1, 0)) == 2
    assert "no experiment 'figure-99'" in capsys.readouterr().err
