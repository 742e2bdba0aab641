"""The engine process as a process: what it says, and when it goes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from talaria_gpu.engine.contract import EngineCall, Sampling
from talaria_gpu.engine.ipc import Abort, Fatal, Progress, SlotEnded, Status, Stop, Switched
from talaria_gpu.engine.sim import expected_tokens
from tests.gpu.engine.worker_client import worker, write_config


def call(rid: str, model: str = "a", prompt: int = 40, new: int = 8, **kw) -> EngineCall:
    ids = [(7 * i + sum(rid.encode())) % 250 for i in range(prompt)]
    return EngineCall(rid=rid, model=model, input_ids=ids, sampling=Sampling(max_new_tokens=new), **kw)


def test_tokens_are_those_of_the_prompt_and_the_models_take_turns(tmp_path: Path) -> None:
    config = write_config(tmp_path, slot_ms=10_000, ttft_ms=2, decode_step_ms=1, switch_ms=5)
    with worker(config) as w:
        ready = w.until_ready()
        assert w.of(Progress)
        assert [m.name for m in ready.models] == ["a", "b"]
        assert ready.pid == w.process.pid
        calls = [call(f"r{i}", "ab"[i % 2], prompt=30 + i) for i in range(20)]
        w.submit(*calls)
        w.until(lambda: len(w.finished()) == len(calls))
        for c in calls:
            assert w.tokens(c.rid) == expected_tokens(c.input_ids, 8)
            last = w.steps(c.rid)[-1]
            assert last.finished == "length"
            assert last.cached_tokens + last.prefilled_tokens == len(c.input_ids)
        turns = [r.timings[0].target for r in w.of(Switched)]
        assert turns == (["a", "b"] * len(turns))[: len(turns)], "in turn, however often"
        assert [r.model for r in w.of(SlotEnded)] == turns[:-1]
        w.until(lambda: w.of(Status)[-1].idle_checked == 1)
        status = w.of(Status)[-1]
        assert status.switches == len(turns) >= 2
        assert status.prefilled_tokens == sum(w.steps(c.rid)[-1].prefilled_tokens for c in calls)
        assert status.decode_step_ms["a"] == 1


def test_a_thousand_short_calls(tmp_path: Path) -> None:
    with worker(write_config(tmp_path)) as w:
        w.until_ready()
        calls = [call(f"r{i:04}", "ab"[i % 3 == 0], new=4) for i in range(1000)]
        w.submit(*calls)
        w.until(lambda: len(w.finished()) == 1000)
        assert set(w.finished().values()) == {"length"}
        assert all(w.tokens(c.rid) == expected_tokens(c.input_ids, 4) for c in calls)


def test_abort_is_confirmed_and_ends_the_stream(tmp_path: Path) -> None:
    with worker(write_config(tmp_path, decode_step_ms=1)) as w:
        w.until_ready()
        w.submit(call("long", new=100_000), call("short", new=3))
        w.until(lambda: len(w.tokens("long")) >= 5)
        w.send(Abort(rid="long"), Abort(rid="unknown"))
        w.until(lambda: w.finished().get("long") == "abort")
        w.until(lambda: w.of(Status)[-1].idle_checked == 1)
        steps = w.steps("long")
        assert [s.finished for s in steps].index("abort") == len(steps) - 1
        assert w.of(Status)[-1].loads["a"].running == 0


def test_refusals_name_the_reason(tmp_path: Path) -> None:
    with worker(write_config(tmp_path)) as w:
        w.until_ready()
        w.submit(
            call("model", "nope"),
            call("length", new=1 << 30),
            call("late", deadline=1.0),
            EngineCall(rid="empty", model="a", input_ids=[], sampling=Sampling(max_new_tokens=1)),
        )
        w.until(lambda: len(w.finished()) == 4)
        assert w.finished() == {
            "model": "model_not_found",
            "length": "context_length_exceeded",
            "late": "deadline_exceeded",
            "empty": "invalid_request",
        }


def test_stop_ends_it_with_0(tmp_path: Path) -> None:
    with worker(write_config(tmp_path, decode_step_ms=1)) as w:
        w.until_ready()
        w.submit(call("r", new=10_000))
        w.until(lambda: len(w.tokens("r")) > 2)
        w.send(Stop())
        assert w.process.wait(10) == 0


def test_sigterm_ends_it_and_sigint_does_not(tmp_path: Path) -> None:
    with worker(write_config(tmp_path)) as w:
        w.until_ready()
        w.process.send_signal(signal.SIGINT)
        w.submit(call("r"))
        w.until(lambda: "r" in w.finished())
        w.process.send_signal(signal.SIGTERM)
        assert w.process.wait(10) == 0


def test_it_goes_when_its_socket_closes(tmp_path: Path) -> None:
    with worker(write_config(tmp_path, decode_step_ms=1)) as w:
        w.until_ready()
        w.submit(call("r", new=10_000))
        w.until(lambda: len(w.tokens("r")) > 2)
        w.sock.close()
        assert w.process.wait(10) == 0


PARENT = """
import os, sys
from pathlib import Path
from tests.gpu.engine.worker_client import worker
with worker(Path(sys.argv[1])) as w:
    pid = w.until_ready().pid
    held = os.dup(w.sock.fileno())
    os.set_inheritable(held, True)
    # A sibling keeps our end of the socket open, so that only the parent's death can tell the worker.
    sibling = os.fork()
    if sibling == 0:
        while True:
            os.read(0, 1) or os._exit(0)
    print(pid, flush=True)
    sys.stdin.read()
"""


def test_it_dies_with_a_killed_parent(tmp_path: Path) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(write_config(tmp_path))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[3],
    )
    assert parent.stdin
    assert parent.stdout
    try:
        pid = int(parent.stdout.readline())
        assert alive(pid)
        parent.kill()
        parent.wait()
        end = time.monotonic() + 10
        while alive(pid):
            assert time.monotonic() < end, "the worker outlived its parent"
            time.sleep(0.01)
    finally:
        parent.stdin.close()
        parent.stdout.close()
        parent.kill()
        parent.wait()


def test_a_wrong_instance_is_fatal(tmp_path: Path) -> None:
    with worker(write_config(tmp_path), iid="i-9") as w:
        w.until(lambda: bool(w.of(Fatal)))
        assert "i-9" in w.of(Fatal)[0].message
        assert w.process.wait(10) == 1


def test_it_sleeps_when_idle_and_beats(tmp_path: Path) -> None:
    with worker(write_config(tmp_path, heartbeat_s=0.1)) as w:
        w.until_ready()
        w.submit(call("r"))
        w.until(lambda: bool(w.of(Status)) and w.of(Status)[-1].idle_checked == 1)
        beats, before = len(w.of(Status)), cpu_seconds(w.process.pid)
        w.until(lambda: len(w.of(Status)) >= beats + 10)
        assert cpu_seconds(w.process.pid) - before < 0.1  # of about a second


def test_a_parent_that_does_not_read_blocks_nothing_for_good(tmp_path: Path) -> None:
    """More reports than the socket and the buffer hold: the worker pauses, and goes on when they are read."""
    with worker(write_config(tmp_path)) as w:
        w.until_ready()
        calls = [call(f"r{i:03}", new=1000) for i in range(200)]
        w.submit(*calls)
        seen = 0.0
        while (now := cpu_seconds(w.process.pid)) != seen:  # until it makes no progress: all buffers are full
            seen = now
            time.sleep(0.6)
        assert w.process.poll() is None
        w.until(lambda: len(w.reports) > 0 and len(w.finished()) == len(calls), 60)
        assert all(w.tokens(c.rid)[-1] == expected_tokens(c.input_ids, 1000)[-1] for c in calls[:3])


def alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii")
    except (FileNotFoundError, ProcessLookupError):  # the second: it ended between open and read
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
