"""Two rank processes on real SGLang: one engine's tokens, prefixes that both have, and a clear end when one goes."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from talaria_gpu.engine.contract import EngineCall, Sampling
from talaria_gpu.engine.ipc import Fatal, Ready, Status, Switched
from talaria_gpu.models.reference import assert_greedy
from tests.gpu.engine.sglang.conftest import HYBRID, MLA, QWEN3
from tests.gpu.engine.worker_client import WorkerClient, worker

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

CONFIG = """
{models}
[[instances]]
id = "i-0"
tp = 2
models = [{names}]
kv_tokens = 1024
max_running = 4
chunked_prefill_tokens = 64
host_kv_mib = 64
slot_ms = 100.0
drain_ms = 10.0
canary = 2
threads = 1
emulate_weight_h2d_gbps = {h2d}
"""


def start(directory: Path, paths, names, h2d: float) -> Path:
    models = "\n".join(
        f'[models.{name}]\nsource = "path"\npath = "{paths[name]}"\ndtype = "float32"\ncontext_tokens = 512'
        for name in names
    )
    file = directory / "talaria.toml"
    file.write_text(CONFIG.format(models=models, names=", ".join(f'"{n}"' for n in names), h2d=h2d))
    return file


@pytest.fixture(scope="module")
def ranked(paths, tmp_path_factory):
    """A worker with two ranks; weights come at 0.15 GB/s, so that a switch's copy takes its time."""
    with worker(start(tmp_path_factory.mktemp("ranks"), paths, (QWEN3, MLA), 0.15)) as client:
        client.until(lambda: bool(client.of(Ready)), 240)
        yield client


def follower(client: WorkerClient) -> psutil.Process:
    children = psutil.Process(client.process.pid).children()
    (process,) = [child for child in children if any(part.endswith("ranks.follower") for part in child.cmdline())]
    return process


def ask(client: WorkerClient, calls: dict[str, tuple[str, list[int]]], n: int = 24) -> None:
    sampling = Sampling(max_new_tokens=n, temperature=0.0, ignore_eos=True)
    client.submit(*(EngineCall(rid=r, model=m, input_ids=ids, sampling=sampling) for r, (m, ids) in calls.items()))


def sessions(client, references, new_prompt, models, *, between=lambda turn: None) -> None:
    """Two sessions per model, in turns; every answer as a full recompute says it, every prefix used again."""
    history = {f"{m}/{n}": new_prompt(40 + 30 * n) for m in models for n in range(2)}
    kept = dict.fromkeys(history, 0)
    for turn in range(3):
        rids = {f"{key}/{turn}": (key.split("/")[0], ids) for key, ids in history.items()}
        ask(client, rids)
        between(turn)
        client.until(lambda rids=rids: rids.keys() <= client.finished().keys(), 240)
        for rid, (model, ids) in rids.items():
            key = rid.rpartition("/")[0]
            last, said = client.steps(rid)[-1], client.tokens(rid)
            assert last.finished == "length", last
            assert_greedy(references[model], ids, said)
            assert last.cached_tokens >= kept[key]
            kept[key] = 0 if model == HYBRID else (len(ids) + len(said) - 1) // 16 * 16
            history[key] = ids + said + new_prompt(7)


def test_tokens_prefixes_and_switches_of_two_ranks(ranked, references, new_prompt):
    """With one rank stopped for a while in between: the other waits, and nothing else changes."""

    def lag(turn: int) -> None:
        if turn == 1:
            other = follower(ranked)
            other.suspend()
            time.sleep(0.3)
            other.resume()

    sessions(ranked, references, new_prompt, (QWEN3, MLA), between=lag)
    assert any(t.cache_source == "host" for r in list(ranked.finished()) for t in ranked.steps(r))
    records = [r.timings for r in ranked.of(Switched)]
    assert len(records) >= 4
    assert sum(timing.suspended for (timing,) in records) > 0
    for (timing,) in records:
        assert [rank.rank for rank in timing.ranks] == [0, 1]
        assert timing.total_ms == max(rank.total_ms for rank in timing.ranks)
        assert timing.weight_bytes == timing.d2d_bytes + timing.h2d_bytes
        for rank in timing.ranks:
            assert rank.weight_bytes == rank.d2d_bytes + rank.h2d_bytes
            assert rank.target == timing.target
    assert any(timing.canary for (timing,) in records)
    ranked.until(lambda: ranked.of(Status)[-1].idle_checked > 0)
    told = ranked.of(Status)[-1].host_kv
    assert told.saved > 0
    assert told.restored > 0
    assert (told.corrupt, told.disagreed, told.failed, told.refused) == (0, 0, 0, 0)


def test_a_rank_killed_in_mid_copy_ends_the_engine(ranked, new_prompt):
    """Last of the module: no further token, no hang; the supervisor starts it again."""
    active = ranked.of(Status)[-1].active
    target = MLA if active == QWEN3 else QWEN3
    switches = len(ranked.of(Switched))
    ask(ranked, {"doomed": (target, new_prompt(40))})
    ranked.read(0.15)  # the copies of the switch take a second
    assert len(ranked.of(Switched)) == switches
    os.kill(follower(ranked).pid, signal.SIGKILL)
    ranked.until(lambda: bool(ranked.of(Fatal)), 30)
    assert "rank 1 was killed by signal 9" in ranked.of(Fatal)[0].message
    assert ranked.tokens("doomed") == []
    assert ranked.process.wait(10) == 1


@pytest.mark.soak
def test_a_rank_that_dies_while_idle_is_missed(paths, tmp_path):
    with worker(start(tmp_path, paths, (QWEN3,), 10.0)) as client:
        client.until(lambda: bool(client.of(Ready)), 240)
        os.kill(follower(client).pid, signal.SIGKILL)
        client.until(lambda: bool(client.of(Fatal)), 30)
        assert "rank 1 was killed by signal 9" in client.of(Fatal)[0].message


@pytest.mark.soak
def test_a_hybrid_on_two_ranks(paths, tmp_path, references, new_prompt):
    with worker(start(tmp_path, paths, (HYBRID, QWEN3), 10.0)) as client:
        client.until(lambda: bool(client.of(Ready)), 240)
        sessions(client, references, new_prompt, (HYBRID, QWEN3))
