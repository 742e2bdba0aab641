"""What the converters make of a log: counts, reuse, and what they refuse."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from talaria_cli.trace import run_check, run_convert, run_generate, run_workload
from talaria_replay.convert import claude_code_calls, message_logs, swebench_calls
from talaria_replay.trace import read, sessions


def log(folder: Path, *rows: dict[str, Any]) -> Path:
    path = folder / "log.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def row(prompt: int, completion: int, **fields: Any) -> dict[str, Any]:
    return {"session": "s", "prompt_tokens": prompt, "completion_tokens": completion} | fields


TURNS = [
    {"role": "system", "content": "a" * 40},
    {"role": "user", "content": "b" * 40},
    {"role": "assistant", "content": "c" * 40, "prompt_tokens": 33, "completion_tokens": 7},
    {"role": "user", "content": "d" * 40},
    {"role": "assistant", "content": "e" * 40},
]


def test_counts_that_a_message_log_has_are_used_and_not_sent(tmp_path: Path) -> None:
    first, second = message_logs(log(tmp_path, {"session": "s", "messages": TURNS}), model="m")
    assert (first.prompt_tokens, first.completion_tokens) == (33, 7)
    assert (second.prompt_tokens, second.completion_tokens) == (33 + 7 + 10, 10), "what is new: four characters a token"
    assert second.reusable_tokens == 40
    assert second.messages is not None
    assert [set(m) for m in second.messages] == [{"role", "content"}] * 4


def test_a_log_without_counts_has_the_sum_of_its_texts(tmp_path: Path) -> None:
    plain = [{k: m[k] for k in ("role", "content")} for m in [TURNS[2], *TURNS, TURNS[4]]]
    calls = list(message_logs(log(tmp_path, {"session": "s", "messages": plain}), model="m"))
    assert [c.prompt_tokens for c in calls] == [30, 50, 60], "also where it begins with an answer, or two follow"
    assert [c.reusable_tokens for c in calls] == [0, 40, 60]


def test_real_message_logs_have_their_providers_counts(traces: Path) -> None:
    calls = list(message_logs(traces / "swebench_verified.messages60.jsonl.gz", model="m"))
    exact = {
        s: [(c.prompt_tokens, c.completion_tokens) for c in of]
        for s, of in sessions(swebench_calls(traces / "swebench_verified.calls.jsonl.gz")).items()
    }
    by_session = sessions(calls)
    assert len(by_session) == 60
    for name, session in by_session.items():
        assert [(c.prompt_tokens, c.completion_tokens) for c in session] == exact[name]
    assert {frozenset(m) for c in calls for m in c.messages or ()} == {frozenset(("role", "content"))}


def test_a_tokenizer_counts_where_the_log_does_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    whole = Tokenizer(models.WordLevel({"[UNK]": 0, "one": 1}, unk_token="[UNK]"))
    whole.pre_tokenizer = pre_tokenizers.Whitespace()
    whole.save(str(tmp_path / "tokenizer.json"))
    turns = [{"role": "user", "content": "one two three"}, {"role": "assistant", "content": "one two"}]
    source, out = log(tmp_path, {"session": "s", "messages": turns}), tmp_path / "t.jsonl"
    assert run_convert(source, out, "messages", "m", "none", 0, tokenizer=tmp_path) == 0
    assert [(c.prompt_tokens, c.completion_tokens) for c in read(out)] == [(3, 2)]
    assert run_convert(source, out, "messages", "m", "none", 0, tokenizer=tmp_path / "nowhere") == 2
    assert f"talaria trace: --tokenizer: {tmp_path / 'nowhere' / 'tokenizer.json'}: " in capsys.readouterr().err
    assert run_convert(source, out, "swebench", "m", "none", 0, tokenizer=tmp_path) == 2


def test_reasoning_is_in_no_history(tmp_path: Path) -> None:
    rows = [row(100, 50, reasoning_tokens=30), row(200, 50), row(300, 9, reasoning_tokens=20), row(400, 9)]
    assert [c.reusable_tokens for c in swebench_calls(log(tmp_path, *rows))] == [0, 120, 250, 300]


@pytest.mark.parametrize(
    ("fields", "prompt", "reusable"),
    [
        ({"lcp_prev_blocks": 2, "prev_blocks": 2}, 300, 150 + 20),
        ({"lcp_prev_blocks": 2, "prev_blocks": 2}, 170, 150 + 20),
        ({"lcp_prev_blocks": 2, "prev_blocks": 2}, 169, 128),  # no room for the answer
        ({"lcp_prev_blocks": 1, "prev_blocks": 2}, 300, 64),
        ({"lcp_prev_blocks": 0, "prev_blocks": 0}, 300, 0),
        ({}, 300, 0),
    ],
)
def test_an_answer_is_reusable_after_the_whole_prompt_only(
    tmp_path: Path, fields: dict[str, int], prompt: int, reusable: int
) -> None:
    source = log(tmp_path, row(150, 20), row(prompt, 5, **fields))
    assert [c.reusable_tokens for c in claude_code_calls(source)] == [0, reusable]


def test_claude_code_s_continuations_reuse_their_answers(traces: Path) -> None:
    """In the blocks: a prompt that holds all of the last one and more than its answer begins with both."""
    whole = total = 0
    for session in sessions(claude_code_calls(traces / "claude_code.calls.jsonl.gz")).values():
        for a, b in pairwise(session):
            total += 1
            whole += b.reusable_tokens == a.prompt_tokens + a.completion_tokens
    assert whole / total == pytest.approx(0.83, abs=0.01)


@pytest.mark.parametrize(
    ("form", "wrong", "says"),
    [
        ("messages", [*TURNS[:2], TURNS[2] | {"prompt_tokens": -1}], "field 'messages[2].prompt_tokens': expected an"),
        ("messages", [*TURNS[:2], TURNS[2] | {"completion_tokens": "7"}], "field 'messages[2].completion_tokens': exp"),
        ("messages", [{"role": "user", "content": "\ud83d"}, TURNS[2]], "field 'messages': expected text, got half of"),
        ("swebench", row(1 << 70, 1), "field 'prompt_tokens': expected an integer >= 0"),
        ("swebench", row(1, 1, model="\ud83d"), "field 'model': expected text, got half of a surrogate pair (\\ud83d)"),
    ],
)
def test_what_is_wrong_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str, wrong: Any, says: str
) -> None:
    source = log(tmp_path, {"session": "s", "messages": wrong} if form == "messages" else wrong)
    assert run_convert(source, tmp_path / "t.jsonl", form, "", "none", 0) == 1
    assert f"{source}: line 1: {says}" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == [source.name]


def test_whole_surrogate_pairs_are_text(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "\N{GRINNING FACE}"}, {"role": "assistant", "content": "x"}]
    source = log(tmp_path, {"session": "s", "messages": turns})
    assert "\\ud83d" in source.read_text()
    assert run_convert(source, tmp_path / "t.jsonl", "messages", "", "none", 0) == 0


def test_messages_too_deep_to_read_are_named_by_their_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    deep = "[" * 5000 + "]" * 5000
    (tmp_path / "t.jsonl").write_text(
        '{"session":"s","call":0,"model":"m","prompt_tokens":1,"completion_tokens":1,'
        f'"messages":[{{"role":"user","content":{deep}}}]}}\n'
    )
    assert run_check(tmp_path / "t.jsonl") == 1
    assert f"{tmp_path / 't.jsonl'}: line 1: " in capsys.readouterr().err
    (tmp_path / "log.jsonl").write_text(f'{{"session": "s", "messages": {deep}}}\n')
    assert run_convert(tmp_path / "log.jsonl", tmp_path / "u.jsonl", "messages", "", "none", 0) == 1
    assert f"{tmp_path / 'log.jsonl'}: line 1: " in capsys.readouterr().err


def test_sessions_are_generated_for_named_models_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_generate("paper", tmp_path / "t.jsonl", 4, ",", 0, None) == 2
    assert "talaria trace: --models ',': expected names" in capsys.readouterr().err


def test_the_workload_is_the_same_issues_on_each_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [row(10 + n, 5, session=name) for name in ("django-1", "astropy-1", "astropy-2") for n in range(2)]
    source, out = tmp_path / "t.jsonl", tmp_path / "w.jsonl.gz"
    assert run_convert(log(tmp_path, *rows), source, "swebench", "m", "none", 0) == 0
    assert run_workload(source, out, "a,b", 2) == 0
    calls = read(out)
    assert list(sessions(calls)) == ["astropy-1@a", "astropy-1@b", "astropy-2@a", "astropy-2@b"]
    assert {c.session.partition("@")[2] == c.model for c in calls} == {True}
    capsys.readouterr()
    assert run_workload(source, out, "a,b", 3) == 1
    assert f"{source}: expected 3 issues" in capsys.readouterr().err
    for models in (",", "a,a"):
        assert run_workload(source, out, models, 2) == 2
    assert run_workload(tmp_path / "none.jsonl", out, "a", 2) == 1


def test_the_real_workload_is_ten_astropy_issues_on_three_models(traces: Path, tmp_path: Path) -> None:
    source, out = tmp_path / "t.jsonl", tmp_path / "w.jsonl"
    given = traces / "swebench_verified.calls.jsonl.gz"
    assert run_convert(given, source, "swebench", "m", "synthetic", 0) == 0
    assert run_workload(source, out, "a,b,c", 10) == 0
    made = sessions(read(out))
    assert len(made) == 30
    assert all(name.startswith("astropy__astropy-") for name in made)


def test_a_file_that_cannot_be_written_or_read_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, nowhere = tmp_path / "folder", tmp_path / "nowhere" / "t.jsonl"
    folder.mkdir()
    assert run_generate("paper", folder, 1, "m", 0, None) == 1
    assert capsys.readouterr().err == f"talaria trace: {folder}: Is a directory\n"
    assert run_generate("paper", nowhere, 1, "m", 0, None) == 1
    assert capsys.readouterr().err == f"talaria trace: {nowhere}: No such file or directory\n"
    assert run_convert(nowhere, tmp_path / "t.jsonl", "swebench", "", "none", 0) == 1
    assert capsys.readouterr().err == f"talaria trace: {nowhere}: No such file or directory\n"
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, a device that is always full")
def test_a_full_disk_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("talaria_replay.trace.write", lambda _path, _calls: Path("/dev/full").write_bytes(b"x" * 9999))
    out = tmp_path / "t.jsonl"
    assert run_generate("paper", out, 1, "m", 0, None) == 1
    assert capsys.readouterr().err == f"talaria trace: {out}: No space left on device\n"
