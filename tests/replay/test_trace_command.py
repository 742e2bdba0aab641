from __future__ import annotations

import json
from pathlib import Path

import pytest

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


def test_a_bad_log_leaves_nothing_behind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "log.jsonl").write_text('{"session": "s", "prompt_tokens": 5}\n')
    assert run_convert(tmp_path / "log.jsonl", tmp_path / "t.jsonl", "swebench", "", "none", 0) == 1
    assert "log.jsonl: line 1: field 'completion_tokens' is missing" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["log.jsonl"]
    assert run_convert(tmp_path / "log.jsonl", tmp_path / "t.jsonl", "what", "", "none", 0) == 2


def test_generate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_generate("paper", tmp_path / "t.jsonl", 4, "a,b", 0, 50_000) == 0
    assert "models a, b" in capsys.readouterr().out
    assert run_generate("nothing", tmp_path / "u.jsonl", 4, "a", 0, None) == 2
    (tmp_path / "t.jsonl").write_text("{}\n")
    assert run_check(tmp_path / "t.jsonl") == 1
    assert "t.jsonl: line 1: " in capsys.readouterr().err
