"""Two results side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from talaria_cli.main import app
from talaria_replay.live import results
from talaria_replay.live.compare import compare
from talaria_replay.live.results import Results
from talaria_replay.measure import CallRecord, summary


def record(session: str, call: int, ttft_s: float, **fields: Any) -> CallRecord:
    base: dict[str, Any] = {
        "model": "m",
        "intended_s": 10.0 * call,
        "sent_s": 10.0 * call,
        "first_s": 10.0 * call + ttft_s,
        "done_s": 10.0 * call + 2 * ttft_s,
        "body": f"{session}{call}",
    }
    return CallRecord(session=session, call=call, **(base | fields))


def run(*calls: CallRecord, complete: bool = True, **plan: Any) -> Results:
    return Results(plan={"url": "a", "salt": ""} | plan, complete=complete, calls=list(calls), summary=summary(calls))


A = [record(s, n, 1.0 + n) for s in ("s", "t") for n in (0, 1)]
B = [record(s, n, 3.0 + 3 * n) for s in ("s", "t") for n in (0, 1)]


def test_times_are_related_call_by_call() -> None:
    found = compare(run(*A), run(*B, url="b"))
    assert (found["sessions"], found["calls"], found["left_out"]) == (2, 4, 0)
    assert found["same_bodies"] == 1.0
    assert found["differs"] == ["url"]
    ttft = found["figures"]["ttft_s"]
    assert (ttft["a"]["p50"], ttft["b"]["p50"], ttft["ratio"]["p50"], ttft["paired_p50"]) == (1.0, 3.0, 3.0, 3.0)
    sct = found["figures"]["sct_s"]
    assert (sct["a"]["p95"], sct["b"]["p95"]) == (14.0, 22.0)
    assert sct["paired_p50"] == pytest.approx(22 / 14, abs=1e-4)
    assert found["figures"]["return_ttft_s"]["a"]["n"] == 2


def test_sessions_that_one_run_did_not_finish_are_left_out() -> None:
    failed = [*B[:2], B[2], record("t", 1, 0.0, error="HTTP 500: no")]
    for other in (failed, B[:3], B[:2]):
        found = compare(run(*A), run(*other, complete=False))
        assert (found["sessions"], found["calls"], found["left_out"]) == (1, 2, 1)
        assert found["complete"] == [True, False]


def test_bodies_are_counted() -> None:
    other = [*B[:3], record("t", 1, 3.0, body="another")]
    assert compare(run(*A), run(*other))["same_bodies"] == 0.75


def test_the_command(tmp_path: Path) -> None:
    a, b, c = tmp_path / "a.json", tmp_path / "b.json", tmp_path / "c.json"
    results.write(a, run(*A))
    results.write(b, run(*B[:2], complete=False, salt="x"))
    results.write(c, run())
    told = CliRunner().invoke(app, ["compare", str(a), str(b)], env={"COLUMNS": "200"})
    assert told.exit_code == 0, told.output
    for line in (
        "2 calls of 1 sessions, 100.0% with the same body",
        "1 sessions were not finished in both",
        "salt: '' and 'x'",
    ):
        assert line in told.output
    assert "the run is not complete" in told.output
    as_json = CliRunner().invoke(app, ["compare", str(a), str(b), "--json"])
    assert json.loads(as_json.stdout)["figures"]["ttft_s"]["ratio"]["p95"] == 3.0
    for other, says in ((c, "no session was finished in both"), (tmp_path / "none.json", "none.json: ")):
        told = CliRunner().invoke(app, ["compare", str(a), str(other)])
        assert told.exit_code == 2
        assert says in told.output
