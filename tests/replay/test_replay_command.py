"""`talaria replay`: what it says before anything is sent."""

from __future__ import annotations

from pathlib import Path

import pytest

from talaria_cli.replay import ReplayOptions, run_replay
from talaria_replay.live.run import Plan
from talaria_replay.trace import Call, write


@pytest.mark.parametrize("url", ["http://host:port", "http://a\nb", "http://\ud83d"])
def test_a_url_that_is_none_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str], url: str) -> None:
    file = tmp_path / "t.jsonl"
    write(file, [Call(session="s", call=0, model="m", prompt_tokens=5, completion_tokens=1)])
    assert run_replay(ReplayOptions(file, Plan(url), None, resume=False, key="", as_json=True)) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"talaria replay: --url {url!r}: ")
    assert said.endswith("; expected http://HOST:PORT\n")
