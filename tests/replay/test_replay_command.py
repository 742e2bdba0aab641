"""`talaria replay`: what it says before anything is sent, and in the end."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path

import pytest

from talaria_cli.replay import ReplayOptions, _until_stopped, run_replay
from talaria_replay.live import results
from talaria_replay.live.results import Results
from talaria_replay.live.run import Plan, Replay
from talaria_replay.trace import Call, write
from tests.replay.plain_server import plain_server

CALL = Call(session="s", call=0, model="m", prompt_tokens=50, completion_tokens=1)


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


def test_figures_whose_file_cannot_be_written_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run(it: Replay) -> Results:
        results.close(it.results, {})
        raise OSError(28, "No space left")

    monkeypatch.setattr(Replay, "run", run)
    file = tmp_path / "t.jsonl"
    write(file, [CALL])
    assert run_replay(ReplayOptions(file, Plan("http://x"), None, resume=False, key="", as_json=True)) == 2
    told = capsys.readouterr()
    assert json.loads(told.out)["summary"]["calls"] == 0
    assert told.err == "talaria replay: [Errno 28] No space left\n"


async def test_a_signal_while_the_end_is_written_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = results.write

    def interrupted(path: Path, version: Results) -> None:
        if version.complete:
            os.kill(os.getpid(), signal.SIGINT)
        save(path, version)

    monkeypatch.setattr(results, "write", interrupted)
    async with plain_server() as server:
        found = await _until_stopped(Replay(Plan(server.url), [CALL], out=tmp_path / "r.json"))
    assert found is not None
    assert found.complete
    assert results.read(tmp_path / "r.json") == found


async def test_a_signal_behind_the_last_call_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run(it: Replay) -> Results:
        results.close(it.results, {})
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.Event().wait()
        return it.results

    monkeypatch.setattr(Replay, "run", run)
    found = await _until_stopped(Replay(Plan("http://x"), [CALL]))
    assert found is not None
    assert found.complete


async def test_a_signal_before_the_end_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run(it: Replay) -> Results:
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.Event().wait()
        return it.results

    monkeypatch.setattr(Replay, "run", run)
    assert await _until_stopped(Replay(Plan("http://x"), [CALL])) is None
