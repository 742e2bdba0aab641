"""`talaria replay`: what it says before anything is sent."""

from __future__ import annotations

from pathlib import Path

import pytest

from talaria_cli.replay import ReplayOptions, run_replay
from talaria_replay.live.results import Results
from talaria_replay.live.run import Plan, Replay
from talaria_replay.trace import Call, write


@pytest.mark.parametrize("url", ["http://host:port", "http://a\nb", "http://\ud83d"])
def test_a_url_that_is_none_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str], url: str) -> None:
    file = tmp_path / "t.jsonl"
    write(file, [Call(session="s", call=0, model="m", prompt_tokens=5, completion_tokens=1)])
    assert run_replay(ReplayOptions(file, Plan(url), None, resume=False, key="", as_json=True)) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"talaria replay: --url {url!r}: ")
    assert said.endswith("; expected http://HOST:PORT\n")


def test_texts_that_a_plan_would_change_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "t.jsonl"
    messages = [{"role": "user", "content": "x"}]
    write(file, [Call(session="s", call=0, model="m", prompt_tokens=5, completion_tokens=1, messages=messages)])
    options = ReplayOptions(file, Plan("http://x", salt="b"), None, resume=False, key="", as_json=True)
    assert run_replay(options) == 2
    assert "talaria replay: --scale and --salt change made texts, but 1 of 1 calls" in capsys.readouterr().err


def test_each_error_of_a_group_is_said_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run(_: Replay) -> Results:
        raise ExceptionGroup("two", [OSError(28, "No space left"), ExceptionGroup("", [OSError(28, "No space left")])])

    monkeypatch.setattr(Replay, "run", run)
    file = tmp_path / "t.jsonl"
    write(file, [Call(session="s", call=0, model="m", prompt_tokens=5, completion_tokens=1)])
    assert run_replay(ReplayOptions(file, Plan("http://x"), None, resume=False, key="", as_json=True)) == 2
    assert capsys.readouterr().err == "talaria replay: [Errno 28] No space left\n"
