"""The comparison's pure parts: bodies, closed loop, ratios within a run, what is right; and all systems once (soak)."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from bench.ablation.scale import Scale
from bench.compare import check, device, figures, models, mux, systems
from bench.compare.__main__ import chosen
from bench.compare.loop import Outcome, Pace, replay, warm_up
from bench.compare.workload import with_bodies
from bench.gateway.processes import Processes, StartError, free_port
from bench.gateway.worker import serve
from bench.report import ROOT

from talaria_common import settings
from talaria_replay.measure import CallRecord
from talaria_replay.trace import Call

HOW = Scale(0.25, 0.4, 5.0, 1000.0, 30.0, 2e8, 3e8)
SETUP = systems.Setup({"m": Path("/models/m"), "n": Path("/models/n")}, HOW, 0.4)


def count(messages: list[dict[str, str]]) -> int:
    """Six characters a token, and four for a message's frame."""
    return sum(4 + len(m["content"]) // 6 for m in messages)


def session(name: str, model: str = "m", calls: int = 4) -> list[Call]:
    return [
        Call(
            session=name, call=c, model=model, prompt_tokens=200 + 100 * c, completion_tokens=5,
            reusable_tokens=100 + 100 * c if c else 0, gap_s=0.01 if c else None,
        )
        for c in range(calls)
    ]  # fmt: skip


def texts(call: Call) -> str:
    return "\n".join(f"{m['role']}: {m['content']}" for m in call.messages or [])


def test_bodies_are_fixed_and_have_their_lengths_and_prefixes() -> None:
    calls = [*session("a"), *session("b")]
    made = with_bodies(calls, count, "salt")
    assert made == with_bodies(calls, count, "salt")
    assert all(c.prompt_tokens == count(c.messages or []) for c in made)
    for before, after in zip(calls, made, strict=True):
        assert after.prompt_tokens == pytest.approx(before.prompt_tokens, rel=0.1)
    for one, two in itertools.pairwise(made[:4]):
        shared = len(texts(one)) - len(texts(one).rpartition("\n")[2])
        assert texts(two)[:shared] == texts(one)[:shared]
        assert len(two.messages or []) >= len(one.messages or [])
    assert not {texts(c) for c in made} & {texts(c) for c in with_bodies(calls, count, "another")}
    assert texts(made[0]) != texts(made[4]), "sessions differ"


def test_a_tokenizer_is_cut_to_ids_that_the_model_has() -> None:
    vocab = {"<s>": 0, "a": 1, "b": 2, "c": 3, "ab": 4, "abc": 5, "ac": 6}
    full = {
        "added_tokens": [{"id": 0}, {"id": 7}],
        "decoder": "kept",
        "model": {"type": "BPE", "vocab": vocab, "merges": [["a", "b"], "ab c", ["a", "c"]]},
    }
    cut = models.first_ids(full, 6)
    assert cut["model"] == {
        "type": "BPE",
        "vocab": {k: v for k, v in vocab.items() if v < 6},
        "merges": [["a", "b"], "ab c"],
    }
    assert (cut["added_tokens"], cut["decoder"]) == ([{"id": 0}], "kept")
    assert models.first_ids(full, 5)["model"]["merges"] == [["a", "b"]], "no merge of pieces that are gone"


@contextlib.asynccontextmanager
async def worker(**paces: tuple[float, float]):
    port = free_port()
    task = asyncio.create_task(serve(port, paces))
    try:
        for _ in range(200):
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.close()
                await writer.wait_closed()
                break
            await asyncio.sleep(0.01)
        yield f"http://127.0.0.1:{port}"
        await asyncio.sleep(0.01)
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def test_sessions_run_in_closed_loop_and_no_more_than_so_many_at_a_time() -> None:
    names = [f"s{i}" for i in range(5)]
    calls = with_bodies([c for n in names for c in session(n, calls=3)], count, "")
    async with worker(m=(5, 2)) as url:
        await warm_up({"m": url})
        out = await replay(calls, {"m": url}, Pace(2.0, {n: 0.02 * i for i, n in enumerate(names)}, 2))
    assert len(out.records) == len(out.answers) == 15
    spans = []
    for name in names:
        own = sorted((r for r in out.records if r.session == name), key=lambda r: r.call)
        spans.append((own[0].intended_s, own[-1].done_s))
        for before, after in itertools.pairwise(own):
            assert after.intended_s == pytest.approx(before.done_s + 0.02), "the gap, scaled"
            assert after.sent_s >= after.intended_s - 0.001
        assert all(r.first_s > r.sent_s for r in own)
    assert spans[1][0] >= 0.02
    for begin, _ in spans:
        assert sum(b <= begin < e for b, e in spans) <= 2
    assert out.wall_s >= max(e for _, e in spans) - 0.001


async def test_a_call_that_fails_ends_the_replay() -> None:
    async with worker(other=(0, 0)) as url:
        with pytest.raises(RuntimeError, match="warm-up of m"):
            await warm_up({"m": url})
        with pytest.raises(ExceptionGroup, match="TaskGroup") as e:
            await replay(with_bodies(session("s"), count, ""), {"m": url}, Pace(1.0, {}, 0))
    assert "s call 0" in str(e.value.exceptions[0])


def outcome(factor: float, answer: str = "x", tokens: int = 3) -> Outcome:
    """Two sessions of two calls; every time is `factor`."""
    records = [
        CallRecord(
            session=s, call=c, model="m", intended_s=c * factor, sent_s=c * factor, first_s=(c + 0.5) * factor,
            done_s=(c + 1) * factor, prompt_tokens=100, completion_tokens=tokens, cached_tokens=50 * c,
        )
        for s in "ab" for c in range(2)
    ]  # fmt: skip
    answers = {f"{r.session}/{r.call}": answer for r in records}
    return Outcome(records=records, answers=answers, wall_s=2 * factor, reloads_s=[factor] if factor > 2 else [])


def test_ratios_are_taken_within_a_run() -> None:
    runs = [{"talaria": outcome(f), "plain": outcome(f / 2), "sglangmux": outcome(3 * f)} for f in (1, 2)]
    found = figures.figures(runs)
    assert found["sct_p50_plain_over_talaria"] == {"median": 0.5, "min": 0.5, "max": 0.5, "unit": "x"}
    assert found["wall_sglangmux_over_talaria"]["max"] == 3.0
    assert found["ttft_p50_s_talaria"]["median"] == 0.75
    assert found["call_p95_s_plain"]["max"] == 1.0
    assert found["cached_share_talaria"]["median"] == 0.25
    assert found["reload_p50_s_sglangmux"]["median"] == 4.5
    assert "ttft_p50_plain_over_talaria" in found
    assert "ttft_p50_sglangmux_over_talaria" not in found, "it holds streams back: its first token comes with its last"
    assert not any("talaria_over" in name for name in found)
    assert "wall_s_plain" in figures.figures([{"plain": outcome(1)}]), "without Talaria there are no ratios"


def test_other_answers_and_counts_are_counted() -> None:
    run = {"talaria": outcome(1, "abc"), "plain": outcome(1, "abc\ufffd"), "round_only": outcome(1, "abd", tokens=4)}
    found = figures.figures([run])
    assert found["other_answers_plain"]["median"] == 0, "half a character is no difference"
    assert found["other_prompts_plain"]["median"] == 0
    assert found["other_answers_round_only"]["median"] == 4
    assert found["other_prompts_round_only"]["median"] == 4
    assert figures.other_answers(run, "round_only")["a/0"] == ["abc", "abd"]


def test_greedy_continuations_take_both_sides_of_a_tie() -> None:
    def two(ids: list[int]) -> tuple[int, int, float]:
        """Counts on; after a 2 it may as well say 9."""
        return ids[-1] + 1, 9, 0.0 if ids[-1] == 2 else 1.0

    assert list(check.greedy(two, [0], 4, 1e-4)) == [[1, 2, 3, 4], [1, 2, 9, 10]]
    assert list(check.greedy(two, [5], 2, 1e-4)) == [[6, 7]]
    assert len(list(check.greedy(lambda ids: (1, 2, 0.0), [0], 6, 1e-4))) == check.MAX_PATHS


def test_a_launch_script_names_model_and_port(tmp_path: Path) -> None:
    text = mux.script("wide-a", 3100, tmp_path)
    assert text.splitlines()[1:3] == ['MODEL_NAME="wide-a"', "PORT=3100"]
    assert f'cd "{tmp_path}"' in text
    said = mux.command(30, tmp_path, [tmp_path / "a.sh"], 900)
    assert said[-1] == str(tmp_path / "a.sh")
    assert said[said.index("--model-switch-timeout-secs") + 1] == "900"


def test_a_part_that_has_died_leaves_none_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also none in a session of its own, and the error is that of the start."""
    child = f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], start_new_session=True); open('{tmp_path}/pid', 'w').write(str(p.pid)); p.wait()"

    def start(_name: str, _setup: systems.Setup, processes: Processes) -> dict[str, str]:
        processes.start("dies", [sys.executable, "-c", "raise SystemExit(3)"])
        processes.start("lives", [sys.executable, "-c", child])
        while not (tmp_path / "pid").is_file() or not (tmp_path / "pid").read_text():
            time.sleep(0.01)
        processes.wait_http("http://127.0.0.1:9/", ["dies"], 20)
        return {}

    monkeypatch.setattr(systems, "_plain", start)
    with pytest.raises(StartError, match="dies exited with 3"), systems.running("plain", SETUP, tmp_path / "x"):
        pass
    pid = int((tmp_path / "pid").read_text())
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_reloads_are_read_from_a_log() -> None:
    assert device.reload_times("INFO\nbench: reload 0.5000\nbench: reload 1.2500\nbye") == [0.5, 1.25]


def test_talaria_s_settings_are_the_ablation_s() -> None:
    ours = settings.parse(systems.talaria_settings("talaria", SETUP, 1234))
    (instance,) = ours.instances
    assert (instance.pool, instance.scheduler, instance.models) == ("cold", "talaria", ("m", "n"))
    assert instance.slot_ms == pytest.approx(500)
    assert instance.emulate_weight_h2d_gbps == pytest.approx(0.2)
    assert ours.router.t_ttft_s == pytest.approx(2.5)
    assert ours.router.overload == "queue"
    other = settings.parse(systems.talaria_settings("round_only", SETUP, 1234)).instances[0]
    assert other == instance.model_copy(update={"scheduler": "round-only"}), "nothing else differs"


def test_systems_are_chosen_by_name() -> None:
    assert chosen("talaria, round-only,plain") == ["talaria", "round_only", "plain"]
    with pytest.raises(ValueError, match="llamaswap"):
        chosen("talaria,llamaswap")


@pytest.mark.soak
@pytest.mark.mesh
@pytest.mark.engine
@pytest.mark.timeout(2500)
def test_every_system_answers_the_same(tmp_path: Path) -> None:
    out = tmp_path / "compare.json"
    done = subprocess.run(
        [sys.executable, "-m", "bench.compare", "--quick", "--out", str(out)],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=2400,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads(out.read_text())["figures"]
    assert found["answers_unlike_reference"]["median"] == 0
    for system in systems.NAMES[1:]:
        assert found[f"wall_{system}_over_talaria"]["median"] > 0
        assert found[f"other_prompts_{system}"]["median"] == 0
    assert found["reloads_sglangmux"]["median"] > 0
