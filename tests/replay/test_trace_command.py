from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from talaria_cli.report import ReportOptions, run_report
from talaria_cli.simulate import SimulateOptions, run_simulate
from talaria_cli.trace import run_check, run_convert, run_generate
from talaria_replay.trace import read


def test_convert_and_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log.jsonl"
    turn = [{"role": "user", "content": "hello there"}, {"role": "assistant", "content": "yes"}]
    log.write_text(json.dumps({"session": "s", "messages": turn * 3}) + "\n")
    assert run_convert(log, tmp_path / "t.jsonl.gz", "messages", "m", "synthetic", 1) == 0
    calls = read(tmp_path / "t.jsonl.gz")
    assert [c.gap_source for c in calls] == ["none", "synthetic", "synthetic"]
    assert "3 calls of 1 sessions, models m" in capsys.readouterr().out


def test_texts_can_be_left_out(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    turn = [{"role": "user", "content": "hello there"}, {"role": "assistant", "content": "yes"}]
    log.write_text(json.dumps({"session": "s", "messages": turn}) + "\n")
    sizes = []
    for texts in (True, False):
        assert run_convert(log, tmp_path / "t.jsonl", "messages", "m", "none", 0, texts=texts) == 0
        (call,) = read(tmp_path / "t.jsonl")
        assert (call.messages is not None) == texts
        sizes.append((call.prompt_tokens, call.completion_tokens))
    assert sizes[0] == sizes[1]


def test_a_bad_log_leaves_nothing_behind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "log.jsonl").write_text('{"session": "s", "prompt_tokens": 5}\n')
    assert run_convert(tmp_path / "log.jsonl", tmp_path / "t.jsonl", "swebench", "", "none", 0) == 1
    assert "log.jsonl: line 1: field 'completion_tokens' is missing" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["log.jsonl"], "nothing is left behind"
    assert run_convert(tmp_path / "log.jsonl", tmp_path / "t.jsonl", "what", "", "none", 0) == 2


def test_generate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_generate("paper", tmp_path / "t.jsonl", 4, "a,b", 0, 50_000) == 0
    assert "models a, b" in capsys.readouterr().out
    assert run_generate("nothing", tmp_path / "u.jsonl", 4, "a", 0, None) == 2
    (tmp_path / "t.jsonl").write_text("{}\n")
    assert run_check(tmp_path / "t.jsonl") == 1
    assert "t.jsonl: line 1: " in capsys.readouterr().err


GOOD = {"session": "s", "prompt_tokens": 5, "completion_tokens": 1}


@pytest.mark.parametrize(
    ("form", "row", "says"),
    [
        ("swebench", GOOD | {"prompt_tokens": "5"}, "field 'prompt_tokens': expected an integer >= 0, got string '5'"),
        (
            "swebench",
            GOOD | {"completion_tokens": None},
            "field 'completion_tokens': expected an integer >= 0, got null",
        ),
        ("swebench", GOOD | {"prompt_tokens": 5.5}, "field 'prompt_tokens': expected an integer >= 0, got number 5.5"),
        ("swebench", GOOD | {"session": 7}, "field 'session': expected a string, got number 7"),
        ("swebench", GOOD | {"model": ["m"]}, "field 'model': expected a string, got array"),
        ("claude-code", GOOD | {"think_time": "soon"}, "field 'think_time': expected a number of seconds >= 0"),
        ("claude-code", GOOD | {"think_time": -1}, "field 'think_time': expected a number of seconds >= 0"),
        ("claude-code", GOOD | {"think_time": float("nan")}, "field 'think_time': expected a number of seconds >= 0"),
        ("claude-code", GOOD | {"lcp_prev_blocks": -1}, "field 'lcp_prev_blocks': expected an integer >= 0"),
        ("claude-code", GOOD | {"parent": {}}, "field 'parent': expected a string, got object"),
        ("messages", {"messages": "no"}, "expected a list of messages"),
        ("messages", {"messages": [["user", "x"]]}, "field 'messages[0]': expected a message (an object), got array"),
        ("messages", {"traj": [{"role": "user", "content": 5}]}, "field 'traj[0].content': expected a string"),
        ("messages", {"messages": [{"content": "x"}]}, "field 'messages[0].role': expected a string, got null"),
        ("messages", {"messages": [{"content": [{"text": None}]}]}, "field 'messages[0].content[0]': expected"),
    ],
)
def test_a_wrong_field_is_named_with_file_line_and_what_was_expected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str, row: dict[str, object], says: str
) -> None:
    good: object = {"messages": [{"role": "user", "content": "x"}]} if form == "messages" else GOOD
    (tmp_path / "log.jsonl").write_text(f"{json.dumps(good)}\n{json.dumps(row)}\n")
    assert run_convert(tmp_path / "log.jsonl", tmp_path / "t.jsonl", form, "", "none", 0) == 1
    assert f"{tmp_path / 'log.jsonl'}: line 2: {says}" in capsys.readouterr().err


def test_two_conversations_of_one_name_are_told_apart_by_the_line_in_the_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    turn = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    row = json.dumps({"task_id": 1, "trial": 0, "messages": turn * 3})
    (tmp_path / "log.jsonl").write_text(f"{row}\n\n{row}\n")
    assert run_convert(tmp_path / "log.jsonl", tmp_path / "t.jsonl", "messages", "", "none", 0) == 1
    said = capsys.readouterr().err
    assert f"{tmp_path / 'log.jsonl'}: line 3: field 'task_id-trial': expected another name than that of line 1" in said


def test_a_cut_log_is_an_error_not_a_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log.jsonl.gz"
    log.write_bytes(gzip.compress(json.dumps(GOOD).encode() * 50)[:-12])
    assert run_convert(log, tmp_path / "t.jsonl", "swebench", "", "none", 0) == 1
    assert f"{log}: line 1: the gzip data end here" in capsys.readouterr().err
    (tmp_path / "log.jsonl").write_bytes(b'{"session": "\xff"}\n')
    assert run_convert(tmp_path / "log.jsonl", tmp_path / "t.jsonl", "swebench", "", "none", 0) == 1
    assert "log.jsonl: line 1: " in capsys.readouterr().err


def test_missing_gaps_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "log.jsonl").write_text(f"{json.dumps(GOOD)}\n" * 3)
    assert run_convert(tmp_path / "log.jsonl", tmp_path / "t.jsonl", "swebench", "m", "none", 0) == 0
    assert "2 of 2 gaps are missing from the trace and taken for 0 s" in capsys.readouterr().err


def test_a_simulation_and_a_report_name_the_trace_that_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "t.jsonl"
    file.write_text('{"session": "s"}\n')
    options = SimulateOptions(str(file), ["paper-tp8"], ["qwen3-235b"], [], 5, None, {}, None, as_json=True)
    assert run_simulate(options) == 2
    assert f"talaria simulate: {file}: line 1: " in capsys.readouterr().err
    assert run_report(ReportOptions("paper", tmp_path / "out", file, ["figure-9"], 1, 0)) == 2
    assert f"talaria report: {file}: line 1: " in capsys.readouterr().err


def test_a_simulation_says_that_gaps_are_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = tmp_path / "t.jsonl", tmp_path / "r.json"
    rows = [GOOD | {"model": "qwen3-235b", "call": n} for n in range(3)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = SimulateOptions(str(file), ["paper-tp8"], ["qwen3-235b"], [], 5, None, {"calibration": "aic"}, out, True)
    assert run_simulate(options) == 0
    assert "2 of 2 gaps are missing" in capsys.readouterr().out
    kept = json.loads(out.read_text())
    assert "2 of 2 gaps are missing from the trace and taken for 0 s" in kept["notes"]
    assert kept["trace"]["gap_sources"] == {"none": 2}
