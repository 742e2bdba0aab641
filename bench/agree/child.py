"""Component figures of one real engine, in a process of its own: `python -m bench.agree.child JOB.json ANSWER.json`."""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from bench.ablation.child import CHUNK, build
from bench.ablation.job import Job
from bench.ablation.models import VOCAB
from bench.ablation.sessions import FIRST_ID
from talaria_gpu.engine.contract import EngineCall, Sampling, SwitchTiming

PROMPTS = (256, 1024, 4096)
FOLLOWING = ((1024, 32), (1024, 128))
"""(cached, new) of prompts whose beginning is cached."""
BATCHES = ((1, 1024), (2, 1024), (3, 1024), (4, 1024), (6, 1024), (8, 1024), (12, 1024), (4, 4096))
"""(calls, context of each) of the decode steps that are measured. Many sizes: of a CPU's kernels those for three calls
may take longer than those for eight."""
STEPS = 16
REPEATS = 5


class Measured(msgspec.Struct, kw_only=True):
    """Of one model."""

    weight_bytes: int
    kv_bytes_per_token: int
    kv_capacity_tokens: int
    prefill: list[tuple[int, int, float]]
    """(cached, new, ms) of single steps."""
    decode: list[tuple[int, int, float]]
    """(batch, context of each, ms) of single iterations."""


class Components(msgspec.Struct, kw_only=True):
    """Of the engine."""

    buffer_bytes: int
    models: dict[str, Measured]
    switches: list[SwitchTiming]
    """Of an idle engine: some with nothing staged, some with everything."""


def measure(engine: Any) -> Components:
    """All of it; the engine has no calls before and none after."""
    rng = random.Random(1)
    models: dict[str, Measured] = {}
    switches: list[SwitchTiming] = []
    names = list(engine.models())
    for name, info in engine.models().items():
        switches.append(engine.switch(name))
        _prefill(engine, name, 64, rng)  # warm
        models[name] = Measured(
            weight_bytes=info.weight_bytes,
            kv_bytes_per_token=info.kv_bytes_per_token,
            kv_capacity_tokens=info.kv_capacity_tokens,
            prefill=[step for n in PROMPTS for step in _prefill(engine, name, n, rng)]
            + [_following(engine, name, cached, new, rng) for cached, new in FOLLOWING],
            decode=[(batch, context, _decode(engine, name, batch, context, rng)) for batch, context in BATCHES],
        )
    for name in names * 2:
        if name == engine.active:
            continue
        engine.stage(name)
        deadline = time.monotonic() + 60
        while engine.stager is not None and not engine.stager.chunks.is_complete and time.monotonic() < deadline:
            time.sleep(0.01)
        switches.append(engine.switch(name))
    return Components(buffer_bytes=engine.buffer_bytes, models=models, switches=switches[1:])


def _ids(length: int, rng: random.Random) -> list[int]:
    return [rng.randrange(FIRST_ID, VOCAB) for _ in range(length)]


def _submit(engine: Any, name: str, ids: Sequence[int], new: int, rng: random.Random) -> None:
    sampling = Sampling(max_new_tokens=new, temperature=0.0, ignore_eos=True)
    rid = f"{rng.getrandbits(64):x}"
    engine.submit(EngineCall(rid=rid, model=name, input_ids=ids, sampling=sampling))


def _prefill(engine: Any, name: str, length: int, rng: random.Random) -> list[tuple[int, int, float]]:
    """The steps of one prompt; nothing of it is cached."""
    _submit(engine, name, _ids(length, rng), 1, rng)
    steps, done = [], 0
    while engine.has_unfinished(name):
        result = engine.step(None)
        if result.kind == "prefill":
            new = min(CHUNK, length - done)
            steps.append((done, new, result.wall_ms))
            done += new
    return steps


def _following(engine: Any, name: str, cached: int, new: int, rng: random.Random) -> tuple[int, int, float]:
    """The median step of prompts that go on from one that has been computed."""
    before = _ids(cached, rng)
    _submit(engine, name, before, 1, rng)
    while engine.has_unfinished(name):
        engine.step(None)
    took = []
    for _ in range(REPEATS):
        _submit(engine, name, before + _ids(new, rng), 1, rng)
        steps = []
        while engine.has_unfinished(name):
            steps.append(engine.step(None))
        took += [step.wall_ms for step in steps if step.kind == "prefill"]
    return cached, new, statistics.median(took)


def _decode(engine: Any, name: str, batch: int, context: int, rng: random.Random) -> float:
    for _ in range(batch):
        _submit(engine, name, _ids(context, rng), STEPS + batch + 1, rng)
    while engine.waiting(name):
        engine.step(None)
    took: list[float] = [engine.step(None).wall_ms for _ in range(STEPS)]
    while engine.has_unfinished(name):
        engine.step(None)
    return statistics.median(took)


def main() -> None:
    """Do the job."""
    asked, answer = Path(sys.argv[1]), Path(sys.argv[2])
    engine = build(msgspec.json.decode(asked.read_bytes(), type=Job))
    answer.write_bytes(msgspec.json.encode(measure(engine)))
    engine.close()


if __name__ == "__main__":
    main()
