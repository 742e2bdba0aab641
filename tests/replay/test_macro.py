"""The sim engine's macro-steps against single iterations: the same calls get the same tokens at the same times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from talaria_common.settings import InstanceSettings
from talaria_gpu.engine.contract import EngineCall, Sampling
from talaria_gpu.engine.driver import SlotDriver
from talaria_gpu.engine.ipc import SlotEnded, Stepped
from talaria_gpu.engine.sim.device import ModelSpec, Part, Phases, Substrate
from talaria_gpu.engine.sim.engine import SimEngine
from talaria_gpu.sched.config import SlotConfig
from talaria_replay.sim.events import VirtualClock


class Device:
    """Times that depend on the batch and its contexts, as real ones do."""

    def __init__(self, capacity: int, substrate: Substrate | None = None) -> None:
        self.capacity = capacity
        self.substrate = substrate

    def spec(self, model: str) -> ModelSpec:
        return ModelSpec(self.capacity, self.capacity, 4, 1 << 30, 1000, prefill_tokens=600)

    def prefill_ms(self, model: str, parts: Sequence[Part]) -> float:
        return 3.0 + sum(0.01 * p.todo + 0.001 * (p.cached + p.done) for p in parts)

    def decode_ms(self, model: str, batch: int, context_tokens: int, steps: int) -> float:
        slope = 0.002
        return steps * (5.0 + batch + slope * context_tokens) + slope * batch * steps * (steps - 1) / 2

    def switch_ms(self, source: str | None, target: str, d2d_bytes: int = 0) -> Phases:
        return (1.0, 20.0 - 15.0 * d2d_bytes / (1 << 30), 0.0, 2.0, 0.5)


Arrival = tuple[int, str, int, int]
"""At ms, model, prompt tokens, completion tokens."""


KEEPS = Substrate(
    hkvr=True,
    staging=True,
    host_bytes=6_000_000,
    h2d_bytes_per_s=20e6,
    d2h_bytes_per_s=50e6,
    buffer_bytes=(1 << 30) + 20_000_000,
    chunk_bytes=1 << 22,
    block_tokens=32,
)
"""A slow link and little host memory: prefixes arrive late, blocks are evicted, calls wait for copies."""


def life(
    arrivals: list[Arrival], config: SlotConfig, capacity: int, *, macro: bool, substrate: Substrate | None = None
) -> tuple[dict[str, Any], list[Any], int]:
    clock = VirtualClock(1000.0)
    instance = InstanceSettings(id="i", engine="sim", models=("a", "b"), page_size=16)
    engine = SimEngine(instance, clock, Device(capacity, substrate), macro=macro)
    driver = SlotDriver(engine, config, clock, idle_check_s=0.5)
    # Each a fraction of a microsecond late, as all times of the device are whole ones: nothing comes just when an
    # iteration ends, where rounding would decide.
    todo = sorted((1000.0 + at / 1000 + n * 6.17e-8, f"r{n}", m, p, c) for n, (at, m, p, c) in enumerate(arrivals))
    ends: dict[str, Any] = {}
    slots: list[Any] = []
    turns = 0
    while True:
        wait = driver.next_wakeup()
        wake = None if wait is None else clock.now() + wait
        if todo and (wake is None or todo[0][0] <= wake):
            at, rid, model, prompt, completion = todo.pop(0)
            clock.set(at)
            session = f"s{int(rid[1:]) % 3}"  # three sessions, whose prompts begin alike
            ids = [(n * 7919 + int(session[1:]) * 104729) % 1000 for n in range(prompt)]
            sampling = Sampling(max_new_tokens=completion, temperature=0, ignore_eos=True)
            call = EngineCall(
                rid=rid, model=model, input_ids=ids, sampling=sampling, session=session, is_continuation=True
            )
            assert driver.submit(call) == []
            continue
        if wake is None:
            break
        clock.set(wake)
        engine.horizon, engine.most_steps = clock.now() + driver.boundary_ms / 1000, driver.boundary_steps
        turns += 1
        assert turns < 200_000
        for report in driver.turn(clock.now()):
            if isinstance(report, Stepped):
                for t in report.result.tokens:
                    tokens = ends.setdefault(t.rid, [[], 0.0, ""])
                    tokens[0] += t.token_ids
                    tokens[1], tokens[2] = round(clock.now(), 6), (t.finished, t.cached_tokens, t.cache_source)
            elif isinstance(report, SlotEnded):
                slots.append(
                    (
                        report.model,
                        round(report.wall_ms, 3),
                        report.decodes,
                        report.suspended + report.retracted,
                        report.reason,
                    )
                )
    engine.check_idle()
    return ends, slots, turns


@given(
    st.lists(
        st.tuples(st.integers(0, 3000), st.sampled_from("ab"), st.integers(1, 900), st.integers(1, 200)),
        min_size=1,
        max_size=14,
    ),
    st.sampled_from([SlotConfig(50.0, 20.0), SlotConfig(400.0, 100.0), SlotConfig(2000.0, 0.0)]),
    st.sampled_from([1200, 2000, 10_000]),
    st.sampled_from([None, KEEPS]),
)
@settings(max_examples=60, deadline=None)
def test_macro_steps_change_nothing_but_the_cost(
    arrivals: list[Arrival], config: SlotConfig, capacity: int, substrate: Substrate | None
) -> None:
    ends, slots, _ = life(arrivals, config, capacity, macro=False, substrate=substrate)
    fast_ends, fast_slots, _ = life(arrivals, config, capacity, macro=True, substrate=substrate)
    assert len(ends) == len(arrivals)
    assert fast_slots == slots
    assert fast_ends == ends


def test_macro_steps_cost_by_events() -> None:
    arrivals = [(n * 700, "a", 100, 400) for n in range(6)]
    config = SlotConfig(2000.0, 500.0)
    *_, slow = life(arrivals, config, 10_000, macro=False)
    *_, fast = life(arrivals, config, 10_000, macro=True)
    assert fast < slow / 20


def test_the_clock_does_not_go_back() -> None:
    clock = VirtualClock(5.0)
    with pytest.raises(ValueError, match="back"):
        clock.set(4.9)
