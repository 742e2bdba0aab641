"""Rounds of real models with host KV: sessions return over switches, decodes go on over slots, nothing is computed twice."""

from __future__ import annotations

import time

import pytest

from talaria_common.clock import SystemClock
from talaria_common.ids import new_rid
from talaria_gpu.engine.contract import EngineCall, Sampling
from talaria_gpu.engine.driver import SlotDriver
from talaria_gpu.engine.ipc import Stepped, Switched
from talaria_gpu.models.reference import assert_greedy
from talaria_gpu.sched.config import SlotConfig

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]
QWEN3, MLA = "tiny-qwen3-random", "tiny-mla-random"


def test_three_turns_of_four_sessions_in_rounds(make_engine, references, new_prompt):
    from talaria_gpu.engine.sglang.spec import HostKvOptions

    engine = make_engine(QWEN3, MLA, host_kv=HostKvOptions(capacity_bytes=64 << 20))
    clock = SystemClock()
    driver = SlotDriver(engine, SlotConfig(slot_ms=20.0, drain_ms=5.0, suspends=True), clock)
    history = {(model, n): new_prompt(40 + 30 * n) for model in (QWEN3, MLA) for n in range(2)}
    kept = dict.fromkeys(history, 0)
    suspended = retracted = switches = restored = 0
    for _ in range(3):
        calls, said = {}, {}
        for key, ids in history.items():
            rid = new_rid()
            calls[rid], said[rid] = key, []
            sampling = Sampling(max_new_tokens=40, temperature=0.0, ignore_eos=True)
            call = EngineCall(rid=rid, model=key[0], input_ids=ids, sampling=sampling, is_continuation=kept[key] > 0)
            assert driver.submit(call) == []
        ends = {}
        give_up = time.monotonic() + 120
        while len(ends) < len(calls):
            assert time.monotonic() < give_up
            for report in driver.turn(clock.now()):
                if isinstance(report, Switched):
                    switches += report.timings[0].path != "none"
                    suspended += report.timings[0].suspended
                    retracted += report.timings[0].retracted
                elif isinstance(report, Stepped):
                    for tokens in report.result.tokens:
                        said[tokens.rid] += tokens.token_ids
                        if tokens.finished:
                            ends[tokens.rid] = tokens
        for rid, key in calls.items():
            ids, last = history[key], ends[rid]
            assert_greedy(references[key[0]], ids, said[rid])
            assert last.finished == "length"
            assert last.recomputed_tokens == 0
            assert last.cached_tokens >= kept[key]
            restored += last.cache_source == "host"
            kept[key] = (len(ids) + len(said[rid]) - 1) // 16 * 16
            history[key] = ids + said[rid] + new_prompt(7)
    assert switches >= 6
    assert suspended > 0
    assert retracted == 0
    assert restored >= 4
    engine.check_idle()
