"""The command against a real mesh of sim engines: replayed through NATS, router and instances, and captured again."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest

from talaria_replay.generate import generate
from talaria_replay.live import results
from talaria_replay.trace import read, sessions, write
from tests.mesh.settings import PATIENT, sim
from tests.support.mesh import mesh

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(120)]

PACED = {"ttft_ms": 5.0, "decode_step_ms": 2.0, "switch_ms": 10.0}


async def start(*args: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "talaria_cli.main", *args, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )


async def talaria(*args: str) -> tuple[int, str, str]:
    process = await start(*args)
    out, err = await process.communicate()
    return process.returncode or 0, out.decode(), err.decode()


async def test_a_trace_through_a_mesh(tmp_path: Path) -> None:
    calls = list(generate("mini-swe-agent", sessions=4, models=["model-a", "model-b"], seed=5, max_calls=5))
    write(tmp_path / "t.jsonl", calls)
    out = tmp_path / "r.json"
    settings = sim(
        *({"id": f"cold-{n}", "sim": PACED, "slot_ms": 100.0, "drain_ms": 20.0} for n in range(2)), api=PATIENT
    )
    async with mesh(tmp_path / "mesh", settings) as it:
        # warm-up: two calls for each of two models
        capture = await start("capture", str(tmp_path / "c.jsonl"), "--bus", it.nats_url, "--calls", "24", "--texts")
        assert capture.stderr is not None
        listening = await capture.stderr.readline()
        assert b"listening" in listening
        assert b"to RPC subjects too: callers wait for a dead part" in listening
        code, stdout, stderr = await talaria(
            "replay",
            str(tmp_path / "t.jsonl"),
            "--url",
            it.url,
            "--scale",
            "0.2",
            "--gap-cap",
            "0.2",
            "--out",
            str(out),
            "--json",
        )
        _, said = await capture.communicate()
    assert code == 0, stderr
    assert capture.returncode == 0, said
    captured = sessions(read(tmp_path / "c.jsonl"))
    assert sorted(len(c) for c in captured.values()) == [2, 2, 5, 5, 5, 5]
    replayed = sorted((r.model, r.call, r.prompt_tokens, r.completion_tokens) for r in results.read(out).calls)
    longest = [c for s in captured.values() if len(s) == 5 for c in s]
    assert sorted((c.model, c.call, c.prompt_tokens, c.completion_tokens) for c in longest) == replayed
    for c in longest:
        assert c.messages
        assert c.gap_s is None if not c.call else 0.0 < (c.gap_s or 0) < 30.0
        assert bool(c.reusable_tokens) == bool(c.call)
    summary = json.loads(stdout)["summary"]
    done = results.read(out)
    assert done.complete
    assert done.summary == summary
    assert summary["calls"] == 20
    assert summary["failed_calls"] == summary["short_answers"] == 0
    assert summary["sct_s"]["n"] == 4
    assert {r.instance for r in done.calls} <= {"cold-0", "cold-1"}
    assert {r.route for r in done.calls} <= {"lease", "cost", "retry"}
    assert any(r.cached_tokens for r in done.calls if r.call)
    for r in done.calls:
        assert r.prompt_tokens == pytest.approx(
            r.wanted_prompt_tokens, rel=0.05, abs=100
        )  # each turn adds its frame, however little it says


async def test_mistakes_are_named_with_file_and_line(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"session": "s"}\n')
    code, _, err = await talaria("replay", str(tmp_path / "bad.jsonl"))
    assert code == 2
    assert "bad.jsonl: line 1: " in err
    code, _, err = await talaria("replay", str(tmp_path / "missing.jsonl"))
    assert code == 2
    assert "missing.jsonl" in err
