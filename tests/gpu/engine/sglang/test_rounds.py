"""Rounds on real SGLang: sessions of two models in closed loop, under every configuration, token by token."""

from __future__ import annotations

from random import Random

import pytest

from talaria_common.clock import SystemClock
from talaria_gpu.engine.contract import EngineCall, Sampling
from talaria_gpu.engine.driver import SlotDriver
from talaria_gpu.engine.ipc import SlotEnded, Stepped
from talaria_gpu.models.reference import assert_greedy
from talaria_gpu.sched.ablation import NAMES, Ablation
from talaria_gpu.sched.config import SlotConfig
from tests.gpu.engine.sglang.conftest import MLA, QWEN3

pytestmark = pytest.mark.engine
TURNS = 3


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in {"talaria", "round-only"} else pytest.mark.soak) for n in NAMES]
)
def test_sessions_get_the_same_tokens_in_rounds(name, make_engine, references) -> None:
    from talaria_gpu.engine.sglang.spec import HostKvOptions, MemoryOptions

    ablation = Ablation.named(name)
    engine = make_engine(
        QWEN3,
        MLA,
        host_kv=HostKvOptions(capacity_bytes=64 << 20) if ablation.hkvr else None,
        memory=MemoryOptions(staging=ablation.staging),
    )
    clock = SystemClock()
    config = SlotConfig(150.0, 0.0, ablation=ablation)
    driver = SlotDriver(engine, config, clock)
    rng = Random(5)
    history = {f"{m}-{n}": (m, [rng.randrange(1000, 40000) for _ in range(40)]) for m in (QWEN3, MLA) for n in range(3)}
    turn = dict.fromkeys(history, 0)
    out: dict[str, list[int]] = {}
    slots: list[SlotEnded] = []

    def send(session: str) -> None:
        model, ids = history[session]
        out[session] = []
        sampling = Sampling(max_new_tokens=4 + 6 * (len(session) % 3), temperature=0.0, ignore_eos=True)
        assert not driver.submit(
            EngineCall(
                rid=f"{session}-{turn[session]}",
                model=model,
                input_ids=ids,
                sampling=sampling,
                session=session,
                is_continuation=turn[session] > 0,
                arrival=clock.now(),
            )
        )

    for session in history:
        send(session)
    while any(n < TURNS for n in turn.values()):
        for report in driver.turn(clock.now()):
            if isinstance(report, SlotEnded):
                slots.append(report)
            for t in report.result.tokens if isinstance(report, Stepped) else []:
                session = t.rid.rsplit("-", 1)[0]
                out[session] += t.token_ids
                if t.finished:
                    assert t.finished == "length"
                    model, ids = history[session]
                    assert_greedy(references[model], ids, out[session])
                    history[session] = (model, ids + out[session] + [rng.randrange(1000, 40000) for _ in range(12)])
                    turn[session] += 1
                    if turn[session] < TURNS:
                        send(session)
    assert slots
    assert all(s.wall_ms == pytest.approx(s.active_ms + s.switch_ms) for s in slots)
    if not ablation.sp:
        assert not any(s.sps for s in slots)
