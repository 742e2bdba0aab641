"""The sim engine's memory substrate: host KV, suspension, staging, the five phases, and what mutations of them show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from talaria_common.clock import ManualClock
from talaria_common.settings import InstanceSettings
from talaria_gpu.engine.contract import EngineCall, Sampling, StepResult, SwitchTiming
from talaria_gpu.engine.driver import SlotDriver
from talaria_gpu.engine.ipc import SlotEnded, Stepped, Switched
from talaria_gpu.engine.sim.device import ModelSpec, Part, Phases, Substrate
from talaria_gpu.engine.sim.engine import SimEngine
from talaria_gpu.engine.sim.links import Link
from talaria_gpu.engine.sim.pool import SimCall, SimPool
from talaria_gpu.engine.sim.tokens import expected_tokens
from talaria_gpu.sched.ablation import Ablation
from talaria_gpu.sched.config import SlotConfig
from talaria_gpu.sched.slot import Slot

KV = 1000
"""Bytes per token."""
WEIGHTS = 20_000_000
PAGE = 16


class Device:
    """1 ms per 100 tokens of prefill, 10 ms a decode step; 20 MB of weights at 100 MB/s, 20 times as fast if staged."""

    def __init__(self, capacity: int, substrate: Substrate, reserved: int = 0) -> None:
        self.capacity, self.substrate, self.reserved = capacity, substrate, reserved

    def spec(self, model: str) -> ModelSpec:
        return ModelSpec(
            self.capacity, self.capacity, 8, WEIGHTS, KV, prefill_tokens=2048, reserved_bytes=self.reserved
        )

    def prefill_ms(self, model: str, parts: Sequence[Part]) -> float:
        return sum(p.todo for p in parts) / 100

    def decode_ms(self, model: str, batch: int, context_tokens: int, steps: int) -> float:
        return 10.0 * steps

    def switch_ms(self, source: str | None, target: str, d2d_bytes: int = 0) -> Phases:
        return (2.0, max(d2d_bytes / 2e6, (WEIGHTS - d2d_bytes) / 1e5), 1.0, 3.0, 0.5)


def substrate(**changes: object) -> Substrate:
    base = Substrate(
        hkvr=True,
        staging=True,
        host_bytes=100_000_000,
        h2d_bytes_per_s=100e6,
        d2h_bytes_per_s=100e6,
        buffer_bytes=WEIGHTS + 40_000 * KV,
        chunk_bytes=1_000_000,
        block_tokens=PAGE,
    )
    return replace(base, **changes)  # type: ignore[arg-type]


class Rig:
    def __init__(
        self, figures: Substrate, capacity: int = 40_000, config: SlotConfig | None = None, *, reserved: int = 0
    ) -> None:
        self.clock = ManualClock()
        instance = InstanceSettings(id="i", engine="sim", models=("a", "b"), page_size=PAGE)
        self.engine = SimEngine(instance, self.clock, Device(capacity, figures, reserved))
        self.driver = SlotDriver(
            self.engine, config or SlotConfig(200.0, 50.0, suspends=figures.hkvr), self.clock, idle_check_s=0.001
        )
        self.steps: dict[str, list] = {}
        self.ended: dict[str, float] = {}
        self.switches: list[SwitchTiming] = []
        self.slots: list[SlotEnded] = []

    def submit(self, rid: str, ids: list[int], model: str = "a", new: int = 4, session: str = "") -> None:
        sampling = Sampling(max_new_tokens=new)
        call = EngineCall(
            rid=rid, model=model, input_ids=ids, sampling=sampling, session=session, is_continuation=bool(session)
        )
        assert self.driver.submit(call) == []

    def rest(self, until: float = float("inf")) -> None:
        for _ in range(100_000):
            wait = self.driver.next_wakeup()
            if wait is None or self.clock.now() + wait > until:
                return
            self.clock.advance(wait)
            for report in self.driver.turn(self.clock.now()):
                if isinstance(report, Stepped):
                    for t in report.result.tokens:
                        self.steps.setdefault(t.rid, []).append(t)
                        if t.finished:
                            self.ended[t.rid] = self.clock.now()
                elif isinstance(report, Switched):
                    self.switches += report.timings
                elif isinstance(report, SlotEnded):
                    self.slots.append(report)
            active = self.engine.active
            if active is not None and self.engine.kept is not None:
                assert self.engine.kv_used_tokens(active) <= self.engine.models()[active].kv_capacity_tokens
                assert self.engine.kept.used_bytes(active) <= self.engine.buffer_bytes
        raise AssertionError("no end in sight")

    def tokens(self, rid: str) -> list[int]:
        return [token for t in self.steps[rid] for token in t.token_ids]


def follow(prompt: list[int], new: int = 4) -> list[int]:
    return prompt + expected_tokens(prompt, new) + [7, 8, 9]


class TestHostKv:
    def test_a_prefix_comes_back_over_a_switch(self) -> None:
        rig = Rig(substrate())
        prompt = list(range(1000))
        rig.submit("one", prompt, session="s")
        rig.rest()
        rig.submit("other", [5] * 100, model="b")
        rig.rest()
        rig.submit("two", follow(prompt), session="s")
        rig.rest()
        first = rig.steps["two"][0]
        assert first.cached_tokens == 1003 // PAGE * PAGE  # the 1004th token's KV was never computed
        assert first.cache_source == "host"
        assert rig.tokens("two") == expected_tokens(follow(prompt), 4)
        assert rig.engine.load("a").kv_epoch == 0
        assert rig.engine.load("a").restore_ms_per_token > 0
        told = rig.driver.status().host_kv
        assert told is not None
        assert told.restored_tokens == first.cached_tokens
        assert told.saved > 0
        assert told.restored > 0
        assert 0 < told.taken_bytes <= told.capacity_bytes

    def test_a_restore_takes_the_link_s_time(self) -> None:
        """16 MB at 100 MB/s before the rest is prefilled; nothing else can run."""
        rig = Rig(substrate(staging=False))
        prompt = list(range(16_000))
        rig.submit("one", prompt, session="s")
        rig.rest()
        rig.submit("other", [5] * 100, model="b")
        rig.rest()
        start = rig.clock.now()
        rig.submit("two", follow(prompt), session="s", new=1)
        rig.rest()
        switch_ms = rig.switches[-1].total_ms
        assert (rig.ended["two"] - start) * 1000 == pytest.approx(switch_ms + 160.0 + 0.23, abs=0.5)

    def test_others_decode_while_a_prefix_comes(self) -> None:
        rig = Rig(substrate(staging=False))
        prompt = list(range(16_000))
        rig.submit("one", prompt, session="s")
        rig.rest()
        rig.submit("other", [5] * 100, model="b")
        rig.rest()
        rig.submit("short", [1] * 32, new=30)
        rig.submit("two", follow(prompt), session="s", new=1)
        rig.rest()
        steps_before = sum(1 for t in rig.steps["short"] if t.token_ids)
        assert steps_before == 30
        assert rig.ended["two"] < rig.ended["short"]

    def test_without_room_on_the_host_the_router_is_told(self) -> None:
        rig = Rig(substrate(host_bytes=2_000_000))
        prompt = list(range(8000))
        rig.submit("one", prompt, session="s")
        rig.rest()
        rig.submit("other", [5] * 100, model="b")
        rig.rest()
        assert rig.engine.load("a").kv_epoch == 1
        rig.submit("two", follow(prompt), session="s")
        rig.rest()
        assert 0 < rig.steps["two"][0].cached_tokens < 2000

    def test_running_calls_go_on_where_they_were(self) -> None:
        rig = Rig(substrate(), config=SlotConfig(50.0, 20.0, suspends=True))
        rig.submit("long", list(range(2000)), new=60)
        rig.submit("b", [1, 2] * 500, model="b", new=60)
        rig.rest()
        assert sum(t.suspended for t in rig.switches) >= 2
        assert sum(t.retracted for t in rig.switches) == 0
        assert [(s.suspended, s.retracted) for s in rig.slots] == [(t.suspended, 0) for t in rig.switches[1:]]
        for rid, ids in (("long", list(range(2000))), ("b", [1, 2] * 500)):
            assert rig.tokens(rid) == expected_tokens(ids, 60)
            assert rig.steps[rid][-1].recomputed_tokens == 0
        parked = next(t for t in rig.switches if t.suspended)
        assert parked.phases_ms[0] > 2.0 + 900 * KV / 100e3  # D2H of at least the smaller call's rows

    def test_a_call_waits_where_a_prefix_on_its_way_has_the_last_rows(self) -> None:
        """It runs alone, and there is nobody whose rows it could have: the prefix has to arrive first."""
        rig = Rig(
            substrate(h2d_bytes_per_s=0.1e6, staging=False, buffer_bytes=WEIGHTS + 1024 * KV), 1024,
            SlotConfig(60_000.0, 0.0, suspends=True),
        )  # fmt: skip
        prompt = [5] * 500
        rig.submit("first", prompt, session="s")
        rig.rest()
        rig.submit("other", [6], model="b", new=1)
        rig.rest()
        rig.submit("long", [7] * 300, new=700)
        rig.rest(rig.clock.now() + 0.5)
        rig.submit("return", follow(prompt), session="s")
        rig.rest()  # no more rows than there are, after each turn
        assert rig.steps["return"][0].cached_tokens == 496
        assert rig.steps["return"][0].cache_source == "host"
        assert rig.tokens("long") == expected_tokens([7] * 300, 700)
        assert rig.steps["long"][-1].recomputed_tokens == 0
        assert rig.driver.status().decode_step_ms["a"] == pytest.approx(10.0), "the wait of seconds is no decode"

    def test_prefixes_that_take_turns_in_the_last_rows_do_not_stop_the_call_that_runs(self) -> None:
        """Two returns with prefixes of one length, neither of which can begin beside it, and each of which fits."""
        rig = Rig(
            substrate(staging=False, buffer_bytes=WEIGHTS + 1024 * KV), 1024, SlotConfig(60_000.0, 0.0, suspends=True)
        )
        prompts = {"one": [5] * 500, "two": [6] * 500}
        for session, prompt in prompts.items():
            rig.submit(f"first {session}", prompt, session=session)
        rig.rest()
        rig.submit("other", [8], model="b", new=1)
        rig.rest()
        rig.submit("long", [7] * 300, new=700)
        rig.rest(rig.clock.now() + 0.5)
        for session, prompt in prompts.items():
            rig.submit(f"return {session}", follow(prompt), session=session, new=512)
        rig.rest()
        assert rig.tokens("long") == expected_tokens([7] * 300, 700)
        assert rig.steps["long"][-1].recomputed_tokens == 0
        for session, prompt in prompts.items():
            assert rig.tokens(f"return {session}") == expected_tokens(follow(prompt), 512)
            assert rig.steps[f"return {session}"][0].cached_tokens == 496

    def test_half_a_prompt_gives_its_rows_to_the_last_call_that_runs(self) -> None:
        pool = SimPool(1000, PAGE, 8)
        for rid, prompt, new in (("runs", [1] * 300, 400), ("half", [2] * 600, 100)):
            sampling = Sampling(max_new_tokens=new)
            pool.waiting[rid] = SimCall.of(
                EngineCall(rid=rid, model="a", input_ids=prompt, sampling=sampling), pool.code
            )
            (share,) = pool.admit(None, 0.0, 320)
            pool.prefilled(share.call, share.upto, 0.0)
        assert pool.half is not None
        for _ in range(100):
            assert [call.call.rid for call in pool.grow()] == ["runs"]
            assert pool.half is not None
        assert (pool.available, pool.used) == (0, 1000)
        assert [call.call.rid for call in pool.grow()] == ["runs"]
        assert (pool.half, list(pool.waiting)) == (None, ["half"])
        assert pool.used <= 1000

    def test_half_a_prompt_that_gave_way_owes_no_decode(self) -> None:
        """Its prefill is lost: it is counted when it is done again."""
        slot = Slot("a", 0.0)
        prefill = StepResult(kind="prefill", prefilled_tokens=300, wall_ms=30.0, half="half")
        slot.stepped(1.0, prefill)
        slot.stepped(2.0, StepResult(kind="decode", wall_ms=5.0, half="half"))
        assert slot.lost_ms == 25.0
        slot.stepped(3.0, StepResult(kind="decode", wall_ms=5.0))
        assert slot.lost_ms == -10.0
        slot.stepped(4.0, prefill)
        slot.stepped(5.0, StepResult(kind="prefill", wall_ms=20.0), started=["half"])
        assert slot.lost_ms == 40.0

    def test_without_host_memory_for_them_they_are_retracted(self) -> None:
        rig = Rig(substrate(host_bytes=400_000), config=SlotConfig(50.0, 20.0, suspends=True))
        rig.submit("long", list(range(2000)), new=60)
        rig.submit("b", [1, 2] * 500, model="b", new=60)
        rig.rest()
        assert sum(t.retracted for t in rig.switches) > 0
        assert sum(s.retracted for s in rig.slots) == sum(t.retracted for t in rig.switches)
        assert rig.tokens("long") == expected_tokens(list(range(2000)), 60)


class TestStaging:
    def busy(self, figures: Substrate, prompt: int = 500, capacity: int = 40_000) -> list[SwitchTiming]:
        rig = Rig(figures, capacity, SlotConfig(400.0, 400.0, suspends=True))
        rig.submit("a", [1] * prompt, new=120)
        rig.submit("b", [2] * prompt, model="b", new=120)
        rig.rest()
        return rig.switches

    def test_idle_pages_shorten_the_switch(self) -> None:
        staged, plain = self.busy(substrate()), self.busy(substrate(staging=False))
        assert [t.path for t in staged[:2]] == ["h2d", "d2d"]
        assert {t.path for t in plain} == {"h2d"}
        assert staged[1].total_ms < plain[1].total_ms / 5
        for t in staged + plain:
            assert t.d2d_bytes + t.h2d_bytes == t.weight_bytes == WEIGHTS
            assert t.dirty_bytes + t.missing_bytes == t.h2d_bytes
            assert sum(t.phases_ms) == pytest.approx(t.total_ms)

    def test_a_short_slot_stages_a_part(self) -> None:
        """20 MB need 200 ms of the link."""
        slow = self.busy(substrate(h2d_bytes_per_s=20e6))
        assert {t.path for t in slow[1:]} == {"partial"}

    def test_what_is_staged_is_told_and_what_calls_hold(self) -> None:
        rig = Rig(substrate(h2d_bytes_per_s=20e6), 40_000, SlotConfig(400.0, 400.0, suspends=True))
        rig.submit("a", [1] * 500, new=120)
        rig.submit("b", [2] * 500, model="b", new=120)
        rig.rest(rig.clock.now() + 0.3)
        assert rig.engine.active == "a"
        model, staged = rig.engine.staged
        assert model == "b"
        assert 0 < staged < WEIGHTS
        load = rig.engine.load("a")
        assert 500 <= load.kv_held_tokens <= 620
        rig.rest()
        assert rig.engine.staged == ("", 0)
        load = rig.engine.load(rig.engine.active)
        assert load.kv_held_tokens == 0 < load.kv_used_tokens, "prefixes could be evicted"

    def test_calls_take_pages_back(self) -> None:
        """A call whose KV grows into staged pages makes chunks dirty."""
        rig = Rig(
            substrate(buffer_bytes=WEIGHTS + 22_000 * KV),
            capacity=22_000,
            config=SlotConfig(2000.0, 0.0, suspends=True),
        )
        rig.submit("a", [1] * 1000, new=400)
        rig.submit("b", [2] * 100, model="b", new=2)
        rig.rest(rig.clock.now() + 0.9)
        for n in range(4):
            rig.submit(f"more{n}", [3 + n] * 3000, new=4, session="s")
        rig.rest()
        dirty = [t for t in rig.switches if t.target == "b" and t.dirty_bytes]
        assert dirty
        assert all(t.path == "partial" for t in dirty)

    @pytest.mark.parametrize("reserved", [0, 700 * KV])
    def test_rows_of_a_last_page_that_is_not_whole_are_no_gap(self, reserved: int) -> None:
        """Nor is what the model keeps for recurrent state: weights, KV and what is staged fit the buffer."""
        figures = substrate(buffer_bytes=WEIGHTS + 2047 * KV + reserved, chunk_bytes=100_000)
        rig = Rig(figures, 2047, SlotConfig(400.0, 400.0, suspends=True), reserved=reserved)
        rig.submit("first", [1], new=1)
        rig.rest()
        kept = rig.engine.kept
        assert kept is not None
        assert kept.slack_bytes("a") == 2047 * KV
        kept.stage("a", "b", rig.clock.now())
        rig.clock.advance(1.0)
        kept.taken("a", rig.clock.now())
        assert rig.engine.staged.bytes == 1024 * KV
        assert kept.used_bytes("a") == WEIGHTS + reserved + 1024 * KV
        rig.submit("a", [2] * 1900, new=120)
        rig.submit("b", [3] * 1900, model="b", new=120)
        rig.rest()  # looks at the buffer after each turn

    def test_full_kv_leaves_no_room(self) -> None:
        switches = self.busy(substrate(buffer_bytes=WEIGHTS + 2_048 * KV), prompt=1800, capacity=2_048)
        assert all(t.d2d_bytes < WEIGHTS / 5 for t in switches)


class TestLink:
    def test_two_streams_share(self) -> None:
        done: dict[str, float] = {}
        link = Link(100.0, 0.0, "kv", "weights")
        link.put("kv", 100, 0.0, lambda at: done.setdefault("kv1", at))
        link.put("kv", 100, 0.0, lambda at: done.setdefault("kv2", at))
        link.put("weights", 50, 0.0, lambda at: done.setdefault("w", at))
        assert link.eta("kv") == pytest.approx(2.5)
        assert link.eta("weights") == pytest.approx(1.0)
        link.advance(10.0)
        assert done == pytest.approx({"w": 1.0, "kv1": 1.5, "kv2": 2.5})

    @given(st.lists(st.tuples(st.sampled_from(["kv", "weights"]), st.integers(1, 1000)), min_size=1, max_size=12))
    @settings(max_examples=60, deadline=None)
    def test_nothing_is_lost_and_estimates_hold(self, copies: list[tuple[str, int]]) -> None:
        """Without further copies the last one ends when all bytes have gone through, and each when it was said to."""
        done: list[tuple[float, float]] = []
        link = Link(1000.0, 5.0, "kv", "weights")
        transfers = [link.put(stream, size, 5.0, lambda _: None) for stream, size in copies]
        for transfer, (stream, _) in zip(transfers, copies, strict=True):
            eta = link.eta(stream, transfer)
            transfer.on_done = lambda at, eta=eta: done.append((at, eta))
        link.advance(1e9)
        assert len(done) == len(copies)
        assert max(at for at, _ in done) == pytest.approx(5.0 + sum(size for _, size in copies) / 1000.0)
        for at, eta in done:
            assert at == pytest.approx(eta, abs=1e-3)


@st.composite
def sessions(draw: st.DrawFn) -> list[tuple[str, list[int], int]]:
    """(model, prompt, new tokens); prompts share beginnings."""
    out = []
    for _ in range(draw(st.integers(1, 12))):
        base = [draw(st.integers(0, 2))] * draw(st.integers(1, 300))
        own = draw(st.lists(st.integers(0, 3), min_size=1, max_size=40))
        out.append((draw(st.sampled_from("ab")), base + own, draw(st.integers(1, 300))))
    return out


@given(
    calls=sessions(),
    gaps=st.lists(st.integers(0, 400), min_size=12, max_size=12),
    ablation=st.sampled_from([Ablation.named(name) for name in ("talaria", "no-sp", "no-hkvr", "h2d-only")]),
    host=st.sampled_from([300_000, 2_000_000]),
    data=st.data(),
)
@settings(max_examples=40, deadline=None)
def test_under_pressure_nothing_is_lost_or_leaked(
    calls: list[tuple[str, list[int], int]], gaps: list[int], ablation: Ablation, host: int, data: st.DataObject
) -> None:
    """1024 rows and little host memory for up to 12 calls of up to 640 tokens, with aborts."""
    figures = substrate(hkvr=ablation.hkvr, staging=ablation.staging, host_bytes=host, buffer_bytes=WEIGHTS + 1024 * KV)
    rig = Rig(figures, 1024, SlotConfig(300.0, 50.0, ablation=ablation, suspends=True))
    aborted = set()
    for n, (model, prompt, new) in enumerate(calls):
        rig.submit(f"r{n}", prompt, model, new, session=f"s{n % 3}")
        rig.rest(rig.clock.now() + gaps[n] / 1000)
        if data.draw(st.integers(0, 9)) == 0:
            victim = f"r{data.draw(st.integers(0, n))}"
            aborted.add(victim)
            rig.driver.abort(victim)
    rig.rest()
    for n, (_, prompt, new) in enumerate(calls):
        rid = f"r{n}"
        if rid not in rig.ended:
            assert rid in aborted
            continue
        assert rig.tokens(rid) == expected_tokens(prompt, new)
        last = rig.steps[rid][-1]
        assert last.cached_tokens + last.prefilled_tokens == len(prompt)
    rig.engine.check_idle()
    for t in rig.switches:
        assert t.d2d_bytes + t.h2d_bytes == t.weight_bytes
        assert t.dirty_bytes + t.missing_bytes == t.h2d_bytes


def test_a_long_prompt_takes_several_steps() -> None:
    rig = Rig(substrate())
    rig.submit("long", list(range(5000)), new=2)
    assert rig.engine.waiting("a") == ["long"]
    rig.rest(rig.clock.now() + 0.3)
    rig.rest()
    assert rig.steps["long"][0].prefilled_tokens == 5000
    assert rig.driver.status().prefilled_tokens == 5000


def test_a_prompt_half_way_through_is_suspended_too() -> None:
    """Its chunks are not computed again after a switch."""
    rig = Rig(substrate(), config=SlotConfig(10.0, 0.0, suspends=True))
    engine, clock = rig.engine, rig.clock
    engine.switch("a")
    clock.advance(1.0)
    engine.submit(
        EngineCall(rid="r", model="a", input_ids=list(range(5000)), sampling=Sampling(max_new_tokens=2), session="s")
    )
    engine.step(None)
    clock.advance(engine.next_event_in() or 0.0)
    result = engine.step(None)
    assert (result.kind, result.prefilled_tokens, result.tokens) == ("prefill", 2048, [])
    assert engine.waiting("a") == ["r"]
    assert engine.running("a") == 1
    timing = engine.switch("b")
    assert (timing.suspended, timing.retracted) == (1, 0)
    clock.advance(1.0)
    engine.switch("a")
    clock.advance(1.0)
    done = 0
    while engine.waiting("a"):
        engine.step(None)
        clock.advance(engine.next_event_in() or 0.0)
        result = engine.step(None)
        done += result.prefilled_tokens
        assert result.recomputed_tokens == 0
    assert done == 5000 - 2048
