"""The simulator: repeatable to the byte, lawful, and with no rule of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from talaria_cli.main import main
from talaria_common.errors import OverloadedError
from talaria_gpu.engine.contract import SwitchTiming
from talaria_gpu.engine.ipc import SlotEnded
from talaria_gpu.engine.sim import SimEngine
from talaria_gpu.engine.sim.device import Part
from talaria_gpu.engine.sim.pool import SimPool
from talaria_gpu.hkvr.registry import Registry
from talaria_gpu.sched import admission
from talaria_gpu.sched.config import SlotConfig
from talaria_gpu.sched.messages import Phase
from talaria_gpu.sched.slot import Slot
from talaria_gpu.staging.chunks import ChunkMap, State
from talaria_replay import workload
from talaria_replay.generate import SHAPES, generate
from talaria_replay.sim import profiles
from talaria_replay.sim.clients import Agent
from talaria_replay.sim.device import GIB, ProfiledDevice, Times, buffer_bytes, kv_capacity_tokens, times
from talaria_replay.sim.events import EventHeap, VirtualClock
from talaria_replay.sim.instance import SimInstance
from talaria_replay.sim.laws import CallLaws, InstanceLaws, LawError
from talaria_replay.sim.mesh import Request
from talaria_replay.sim.run import encode, simulate
from talaria_replay.sim.scenario import Group, Scenario, ScenarioError
from talaria_replay.trace import Call
from talaria_router import asking, cost
from talaria_router.overlay import Overlay
from talaria_router.policies import POLICIES

BIG = ("qwen3-235b", "glm-5-nvfp4", "qwen3.5-122b")
SMALL = ("qwen3-32b", "qwen2.5-32b", "qwen3.5-35b-a3b")
ONE = Scenario(groups=(Group(hardware="paper-tp8", models=BIG),), calibration="aic", admission=False)
TWO = Scenario(groups=(Group(hardware="paper-tp4", models=SMALL, count=2),), calibration="roofline")


def trace_of(
    models: tuple[str, ...], sessions: int = 6, calls: int = 5, seed: int = 1, shape: str = "paper"
) -> list[Call]:
    return list(
        generate(shape, sessions=sessions, models=models, seed=seed, max_calls=calls, max_context_tokens=120_000)
    )


def prefill(t: Times, cached: int, new: int, step: int = 8192) -> float:
    """In steps of 8192 tokens, as the shipped models have it."""
    return sum(t.prefill_ms([Part(cached, done, min(step, new - done))]) for done in range(0, new, step))


@pytest.mark.parametrize("scenario", [ONE, TWO], ids=["one", "two"])
def test_the_same_input_gives_the_same_bytes(scenario: Scenario) -> None:
    calls = trace_of(scenario.groups[0].models)
    first = encode(simulate(scenario, calls))
    assert encode(simulate(scenario, calls)) == first
    assert encode(simulate(msgspec.structs.replace(scenario, hop_ms=2.0), calls)) != first


@pytest.mark.parametrize("ablation", ["talaria", "round-only"])
def test_tokens_that_nobody_waits_for_are_held_back_and_nothing_else_changes(
    monkeypatch: pytest.MonkeyPatch, ablation: str
) -> None:
    scenario = msgspec.structs.replace(TWO, ablation=ablation, stagger_s=0.1)
    calls = trace_of(SMALL, 9, 3)
    held = simulate(scenario, calls)
    monkeypatch.setattr(SimInstance, "_step", lambda _self, _model, step: step)
    told = simulate(scenario, calls)
    assert told.summary.pop("events") > held.summary.pop("events")
    assert encode(told) == encode(held)


def test_hash_seeds_change_nothing() -> None:
    """The order of a set must not matter: another process has another one."""
    program = """if True:
        import hashlib
        from talaria_replay.sim.run import encode, simulate
        from tests.replay.test_sim import SMALL, TWO, trace_of
        print(hashlib.sha256(encode(simulate(TWO, trace_of(SMALL, 4, 2)))).hexdigest())
    """

    def run(seed: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        return done.stdout

    first = run("1")
    assert len(first.strip()) == 64
    assert run("2") == first


def test_an_overlay_that_keeps_a_charge_gives_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that never leaves the router's overlay is load for ever."""
    plain = Overlay.leave

    def keeps_one_token(self: Overlay, iid: str, seq: int) -> bool:
        left = plain(self, iid, seq)
        if left:
            self.enter(iid, SMALL[0], 1, float("inf"))
            monkeypatch.setattr(Overlay, "leave", plain)
        return left

    monkeypatch.setattr(Overlay, "leave", keeps_one_token)
    monkeypatch.setattr(Overlay, "reconcile", lambda *_: None)
    with pytest.raises(LawError, match="overlay"):
        simulate(TWO, trace_of(SMALL, 2, 2))


@given(
    st.sampled_from(sorted(SHAPES)),
    st.integers(0, 10_000),
    st.integers(1, 8),
    st.sampled_from(sorted(POLICIES)),
    st.booleans(),
    st.sampled_from(["reject", "queue"]),
    st.sampled_from([0.0, 1.0, 5.0]),
    st.sampled_from([None, 2]),
)
@settings(max_examples=15, deadline=None)
def test_any_simulation_is_lawful(  # noqa: PLR0917 - one argument a strategy
    shape: str,
    seed: int,
    sessions: int,
    policy: str,
    admission: bool,
    overload: Any,
    tau_s: float,
    concurrent: int | None,
) -> None:
    scenario = msgspec.structs.replace(
        TWO, policy=policy, admission=admission, overload=overload, tau_s=tau_s, concurrent=concurrent, stagger_s=0.3
    )
    calls = trace_of(SMALL, sessions, 4, seed, shape)
    result = simulate(scenario, calls)
    assert sorted((r.session, r.call) for r in result.calls) == sorted((c.session, c.call) for c in calls)
    for r, c in zip(
        sorted(result.calls, key=lambda r: (r.session, r.call)),
        sorted(calls, key=lambda c: (c.session, c.call)),
        strict=True,
    ):
        assert not r.error
        assert (r.prompt_tokens, r.completion_tokens) == (c.prompt_tokens, max(1, c.completion_tokens))
        assert r.cached_tokens <= c.reusable_tokens
        assert r.intended_s <= r.sent_s < r.first_s <= r.done_s
    assert max(result.summary["kv_peak_share"].values()) <= 1.0


def test_a_session_alone_is_what_its_parts_add_up_to() -> None:
    """One model, one session: prefill of what is not cached, decode, gaps and messages, nothing else."""
    scenario = Scenario(groups=(Group(hardware="b200-8", models=("qwen3-235b",), pool="hot"),), calibration="aic")
    calls = trace_of(("qwen3-235b",), 1, 6)
    result = simulate(scenario, calls)
    t = times(profiles.model("qwen3-235b"), profiles.hardware("b200-8"), "aic")
    for r in result.calls:
        new = r.prompt_tokens - r.cached_tokens
        assert r.ttft_s * 1000 == pytest.approx(
            prefill(t, r.cached_tokens, new) + r.prompt_tokens / 1000 * 0.7 + 5 * scenario.hop_ms, abs=0.6
        )
        decode = t.decode_ms(1, r.prompt_tokens + 1, r.completion_tokens - 1)
        assert (r.done_s - r.first_s) * 1000 == pytest.approx(decode, rel=1e-3, abs=0.6)
        assert r.cached_tokens >= (calls[r.call].reusable_tokens - 65) // 64 * 64
    assert result.summary["switches"] == 0


def test_the_notes_are_honest() -> None:
    notes = " ".join(simulate(ONE, trace_of(BIG, 2, 2), generated="paper shape").notes)
    for word in ("simulated", "calibration aic", "generated", "gaps are synthetic"):
        assert word in notes


MUTATED = msgspec.structs.replace(TWO, tau_s=0.0, stagger_s=0.6)


@pytest.fixture(scope="module")
def calls() -> list[Call]:
    return trace_of(SMALL, 12, 5, seed=3)


@pytest.fixture(scope="module")
def before(calls: list[Call]) -> dict[str, Any]:
    return simulate(MUTATED, calls).summary


class TestMutations:
    """A change to a production rule changes the result: there is no shadow of it in the simulator."""

    def test_eligibility(self, monkeypatch: pytest.MonkeyPatch, calls: list[Call], before: dict[str, Any]) -> None:
        """No return is ever eligible for the open slot."""
        monkeypatch.setattr(admission, "for_sp", lambda *_: [])
        after = simulate(MUTATED, calls).summary
        assert after["return_ttft_s"]["p50"] > 3 * before["return_ttft_s"]["p50"]

    def test_costs(self, monkeypatch: pytest.MonkeyPatch, calls: list[Call], before: dict[str, Any]) -> None:
        """Waiting for a model's slot costs nothing in the ranking."""
        monkeypatch.setattr(cost, "round_wait_ms", lambda *_: 0.0)
        after = simulate(MUTATED, calls).summary
        assert after["sct_s"]["p50"] != before["sct_s"]["p50"]

    def test_leases(self, monkeypatch: pytest.MonkeyPatch, calls: list[Call]) -> None:
        """No lease can be honoured: a return is placed as everybody else, where the check may refuse it."""
        scenario = msgspec.structs.replace(MUTATED, tau_s=10.0)
        before = simulate(scenario, calls).summary
        assert before["leases"]["honoured"] > 0
        monkeypatch.setattr(asking, "obstacle", lambda *_: "prefix")
        after = simulate(scenario, calls).summary
        assert after["leases"]["honoured"] == 0
        assert after["sct_s"] != before["sct_s"]


class Kept:
    """What an engine keeps over a switch."""

    brought_bytes = 4
    buffer_bytes = 100

    def used_bytes(self, _active: str) -> int:
        return 50


class Nothing:
    """An engine of two models whose state a test sets."""

    capacities = {"m": 10, "n": 10}
    active: str | None = None
    kept = Kept()
    unfinished = 0

    def kv_used_tokens(self, _model: str) -> int:
        return 0


PRESSED = Scenario(
    groups=(Group(hardware="paper-tp8", models=BIG),), calibration="aic", admission=False, host_gib=120.0
)
"""Three large models whose sessions' KV does not all fit the host's memory."""


@pytest.fixture(scope="module")
def pressed() -> tuple[list[Call], dict[str, Any]]:
    calls = trace_of(BIG, 9, 5)
    summary = simulate(PRESSED, calls).summary
    assert summary["host_kv"]["evicted"] > 0
    assert summary["suspended"] > 0
    return calls, summary


class TestSubstrateMutations:
    """The same for what keeps KV and weights over a switch."""

    def test_eviction_from_the_host(self, monkeypatch: pytest.MonkeyPatch, pressed: Any) -> None:
        """All blocks are worth the same, whatever they cost."""
        calls, before = pressed
        monkeypatch.setattr(Registry, "_rank", lambda self, block: self._offer(block))
        after = simulate(PRESSED, calls).summary
        assert after["host_kv"]["restored_tokens"] != before["host_kv"]["restored_tokens"]

    def test_where_weights_are_staged(self, monkeypatch: pytest.MonkeyPatch, pressed: Any) -> None:
        """Chunks are written from the lowest page up: into the pages that calls want first."""
        calls, _ = pressed
        tight = msgspec.structs.replace(PRESSED, hardware={"hbm_gib": 110.0})
        before = simulate(tight, calls).summary
        plain = ChunkMap.__init__

        def lowest_first(self: ChunkMap, plan: Any) -> None:
            plain(self, plan)
            self._order.reverse()

        monkeypatch.setattr(ChunkMap, "__init__", lowest_first)
        monkeypatch.setattr(ChunkMap, "reclaim", _reclaim)
        after = simulate(tight, calls).summary
        assert after["dirty_bytes"] > before["dirty_bytes"]

    def test_the_round(self, monkeypatch: pytest.MonkeyPatch, pressed: Any) -> None:
        """Eq. 5 bounds rounds at half of the limit."""
        calls, before = pressed
        whole = SlotConfig.round_limit_ms.fget  # type: ignore[attr-defined]
        monkeypatch.setattr(SlotConfig, "round_limit_ms", property(lambda self: whole(self) / 2))
        after = simulate(PRESSED, calls).summary
        assert after["sct_s"]["p50"] != before["sct_s"]["p50"]

    def test_retraction_costs(self, monkeypatch: pytest.MonkeyPatch, pressed: Any) -> None:
        """Nothing may be parked: calls are computed again."""
        calls, before = pressed
        monkeypatch.setattr(Registry, "take_private", lambda *_: None)
        after = simulate(PRESSED, calls).summary
        assert after["suspended"] == 0
        assert after["retracted"] > 0
        assert after["sct_s"]["p50"] > before["sct_s"]["p50"]

    @pytest.mark.parametrize(("name", "figure"), [("no-hkvr", "cached_share"), ("h2d-only", "d2d_bytes")])
    def test_ablations_leave_out_what_they_say(self, pressed: Any, name: str, figure: str) -> None:
        calls, before = pressed
        after = simulate(msgspec.structs.replace(PRESSED, ablation=name), calls).summary
        assert after[figure] < before[figure] / 2
        if name == "h2d-only":
            assert after["switch_paths"].keys() == {"h2d"}
        else:
            assert after["host_kv"]["saved"] == after["suspended"] == 0


def _reclaim(chunks: ChunkMap, page: int) -> int:
    """As the real one, for any order of writing."""
    chunks.bar(page)
    lost = 0
    for index, state in enumerate(chunks.states):
        if state is State.CLEAN and chunks.plan.chunks[index].page < page:
            chunks.states[index] = State.DIRTY
            lost += chunks.plan.chunks[index].size
    return lost


class TestLaws:
    def test_calls(self) -> None:
        laws = CallLaws(100.0)
        laws.begin("s", 0, 0.0)
        with pytest.raises(LawError, match="never ended"):
            laws.end()
        with pytest.raises(LawError, match="under way"):
            laws.closed("s")
        laws.ended("s", 0, 1.0)
        with pytest.raises(LawError, match="twice"):
            laws.ended("s", 0, 1.0)
        with pytest.raises(LawError, match="began after"):
            laws.begin("s", 0, 1.0)
        laws.closed("s")
        laws.end()

    def test_a_mesh_that_is_stuck(self) -> None:
        laws = CallLaws(100.0)
        laws.stands(1e9)  # nothing is under way
        laws.begin("s", 0, 1e9)
        laws.stands(1e9 + 100.0)
        laws.begin("t", 0, 1e9 + 100.0)  # who comes is no sign of life
        with pytest.raises(LawError, match=r"a bug, .*: nothing has come of 2 calls"):
            laws.stands(1e9 + 101.0)
        laws.moved_at = 1e9 + 100.0
        laws.stands(1e9 + 101.0)

    def switched(self) -> tuple[InstanceLaws, Nothing]:
        """A switch to m began at 5 s, and at 5.003 s it should be over."""
        engine = Nothing()
        laws = InstanceLaws("i", engine, 0.0)  # type: ignore[arg-type]
        engine.active, engine.unfinished = "m", 1
        laws.after_turn(5.0)
        return laws, engine

    def test_switches(self) -> None:
        good = SwitchTiming(
            target="m", phases_ms=(1.0, 2.0, 0.0, 0.0, 0.0), total_ms=3.0, weight_bytes=9, d2d_bytes=4, h2d_bytes=5,
            dirty_bytes=2, missing_bytes=3,
        )  # fmt: skip
        self.switched()[0].switch(5.003, good)
        for wrong in (
            {"d2d_bytes": 5},
            {"dirty_bytes": 1},
            {"total_ms": 4.0},
            {"phases_ms": (4.0, -1.0, 0.0, 0.0, 0.0)},
            {"target": "n"},
            {"d2d_bytes": 3, "h2d_bytes": 6, "missing_bytes": 4},  # it adds up, but 4 were staged
            {"phases_ms": (2.0, 2.0, 0.0, 0.0, 0.0), "total_ms": 4.0},  # the same, but 3 ms passed
        ):
            with pytest.raises(LawError):
                self.switched()[0].switch(5.003, msgspec.structs.replace(good, **wrong))

    def test_slots(self) -> None:
        slot = {
            "model": "m", "prefills": 0, "decodes": 0, "admitted": 0, "deferred": 0, "retracted": 0, "reason": "idle",
        }  # fmt: skip

        def ends(active_ms: float, switch_ms: float, wall_ms: float) -> None:
            """It had a switch of 3 ms, no call for 20 ms, and another model's switch began 60 ms after its own.

            In the switch's last 2 ms there was no call either, which is the switch's time and not idle.
            """
            laws, engine = self.switched()
            engine.unfinished = 0
            laws.look(5.001)
            timing = {"weight_bytes": 4, "d2d_bytes": 4, "total_ms": 3.0, "phases_ms": (3.0, 0.0, 0.0, 0.0, 0.0)}
            laws.switch(5.003, SwitchTiming(target="m", **timing))  # type: ignore[arg-type]
            engine.unfinished = 1
            laws.look(5.003)
            engine.unfinished = 0
            laws.look(5.030)
            engine.unfinished = 1
            laws.look(5.050)
            engine.active = "n"
            laws.after_turn(5.060)
            record = SlotEnded(active_ms=active_ms, switch_ms=switch_ms, wall_ms=wall_ms, **slot)  # type: ignore[arg-type]
            laws.slot(5.060, record)

        ends(37.0, 3.0, 40.0)
        for wrong, said in (
            ((37.0, 3.0, 41.0), "is not active"),
            ((38.0, 2.0, 40.0), "a slot's switch of 2.0 ms took"),
            ((38.0, 3.0, 41.0), "a slot of 41.0 ms and"),  # it adds up, but not to what passed
            ((57.0, 3.0, 60.0), "a slot of 60.0 ms and"),
        ):
            with pytest.raises(LawError, match=said):
                ends(*wrong)

    def test_a_switch_that_took_longer_than_it_says(self, monkeypatch: pytest.MonkeyPatch) -> None:
        plain = SimEngine.switch

        def late(self: SimEngine, model: str) -> SwitchTiming:
            timing = plain(self, model)
            self._free_at += 0.01
            return timing

        monkeypatch.setattr(SimEngine, "switch", late)
        with pytest.raises(LawError, match=r"a switch to .* took"):
            simulate(ONE, trace_of(BIG, 3, 2))

    def test_a_slot_that_counts_too_much(self, monkeypatch: pytest.MonkeyPatch) -> None:
        plain = Slot.enter

        def twice(self: Slot, phase: Phase, now: float) -> None:
            plain(self, phase, now)
            self.spent_ms[phase] += 0.01

        monkeypatch.setattr(Slot, "enter", twice)
        with pytest.raises(LawError, match="without calls, in"):
            simulate(ONE, trace_of(BIG, 6, 3))

    def test_staged_bytes_that_were_dirty(self, monkeypatch: pytest.MonkeyPatch) -> None:
        plain = ChunkMap.switch_plan

        def one_less(self: ChunkMap, chunk_bytes: int) -> Any:
            plan = plain(self, chunk_bytes)
            moved = min(1, plan.d2d_bytes)
            return replace(
                plan,
                d2d_bytes=plan.d2d_bytes - moved,
                h2d_bytes=plan.h2d_bytes + moved,
                dirty_bytes=plan.dirty_bytes + moved,
            )

        monkeypatch.setattr(ChunkMap, "switch_plan", one_less)
        with pytest.raises(LawError, match="came from staging, where"):
            simulate(ONE, trace_of(BIG, 6, 3))


class TestProfiles:
    def test_all_shipped_ones_load_and_fit_their_points(self) -> None:
        fitted = 0
        for h in profiles.names("hardware"):
            hw = profiles.hardware(h)
            for m in profiles.names("models"):
                model = profiles.model(m)
                assert kv_capacity_tokens(model, hw) > 100_000
                if h not in model.aic:
                    continue
                t = times(model, hw, "aic")
                for cached, new, ms in profiles.parse_prefill(model.aic[h]):
                    assert t.prefill_ms([Part(cached, 0, new)]) == pytest.approx(ms, rel=0.35)
                    fitted += 1
                for batch, context, ms in profiles.parse_decode(model.aic[h]):
                    # The tables for the hybrid model on B200 are not even monotone in the context.
                    assert t.decode_ms(batch, context, 1) == pytest.approx(
                        ms, rel=0.45 if m == "qwen3.5-122b" else 0.15
                    )
        assert fitted == 63

    def test_the_paper_s_own_points_are_met(self) -> None:
        t = times(profiles.model("qwen3-235b"), profiles.hardware("paper-tp8"), "paper")
        assert prefill(t, 0, 25_000) == pytest.approx(4300)
        assert prefill(t, 0, 100_000) == pytest.approx(10_900)
        device = ProfiledDevice(profiles.hardware("paper-tp8"), {m: profiles.model(m) for m in BIG}, "paper")
        mean = sum(sum(device.switch_ms("x", m)) for m in BIG) / 3
        assert mean == pytest.approx(1520, rel=0.15)  # 5.6: H2D-only mean, from size and link, not fitted

    def test_a_short_prompt_beside_the_last_chunk_of_a_long_one_pays_for_itself(self) -> None:
        t = times(profiles.model("qwen3-235b"), profiles.hardware("paper-tp8"), "paper")
        last, short, other = Part(0, 24_576, 424), Part(5000, 0, 500), Part(0, 0, 700)
        together = t.prefill_ms([last, short, other])
        assert together == pytest.approx(t.prefill_ms([last]) + t.prefill_ms([short, other]))
        assert t.prefill_ms([short]) < t.prefill_ms([short, other]) < t.prefill_ms([short]) + t.prefill_ms([other])

    def test_mistakes_are_named(self, tmp_path: Path) -> None:
        with pytest.raises(profiles.ProfileError, match="no hardware profile 'x': there are b200-8"):
            profiles.hardware("x")
        (tmp_path / "m.toml").write_text('name = "m"\nweight_gb = "much"\n')
        with pytest.raises(profiles.ProfileError, match=r"m\.toml: .*weight_gb|m\.toml: .*about"):
            profiles.model(str(tmp_path / "m.toml"))

    def test_weights_state_and_kv_fill_the_buffer_and_no_more(self) -> None:
        hw = profiles.hardware("paper-tp8")
        model = profiles.model("qwen3.5-122b")
        spec = ProfiledDevice(hw, {"m": model}, "aic").spec("m")
        assert spec.reserved_bytes == 64 * 153_700_000
        assert 0 <= buffer_bytes(hw) - spec.kv_end_bytes < spec.kv_bytes_per_token
        more = msgspec.structs.replace(model, kv_tokens=spec.kv_capacity_tokens + 1)
        with pytest.raises(profiles.ProfileError, match=r"kv_tokens: expected at most \d+"):
            kv_capacity_tokens(more, hw)

    def test_host_memory_is_for_weights_first(self) -> None:
        hw = profiles.hardware("paper-tp8")
        models = {m: profiles.model(m) for m in BIG}
        weights = sum(m.weight_gb for m in models.values()) * 1e9
        device = ProfiledDevice(hw, models, "aic", hkvr=True)
        assert device.substrate.host_bytes == 1800 * GIB - weights
        assert ProfiledDevice(hw, models, "aic", hkvr=True, host_gib=120.0).substrate.host_bytes == 120 * GIB
        small = profiles.changed(hw, {"host_gib": 1000.0})
        with pytest.raises(profiles.ProfileError, match=r"paper-tp8: host_gib: expected at least 1075\.\d+: weights$"):
            ProfiledDevice(small, models, "aic")

    @pytest.mark.parametrize(("name", "models"), [("paper-tp4", SMALL), ("b200-8", BIG), ("h200-8", BIG)])
    def test_shipped_hosts_have_room_for_kv(self, name: str, models: tuple[str, ...]) -> None:
        hw = profiles.hardware(name)
        calibration: Any = "roofline" if models == SMALL else "aic"
        device = ProfiledDevice(hw, {m: profiles.model(m) for m in models}, calibration, hkvr=True)
        assert device.substrate.host_bytes > 400 * GIB

    def test_a_model_too_large_is_refused(self) -> None:
        group = Group(hardware="paper-tp4", models=("qwen3-235b", "glm-5-nvfp4"))
        with pytest.raises((ScenarioError, profiles.ProfileError)):
            simulate(Scenario(groups=(group,), calibration="roofline"), trace_of(("qwen3-235b",), 1, 1))


def test_full_kv_beside_staged_weights_is_lawful() -> None:
    """One model's KV fills up while another's weights are staged above it."""
    small = msgspec.structs.replace(ONE, hardware={"hbm_gib": 96.0})
    summary = simulate(small, trace_of(BIG, 40, 10)).summary
    assert summary["kv_peak_share"]["glm-5-nvfp4"] == 1.0
    assert summary["failed_calls"] == 0


def test_hours_between_sessions_are_lawful_and_the_last_call_ends_the_window() -> None:
    scenario = msgspec.structs.replace(ONE, stagger_s=20_000.0, heartbeat_s=5.0)
    result = simulate(scenario, trace_of(BIG, 2, 2))
    assert result.summary["failed_calls"] == 0
    assert result.summary["window_s"] == pytest.approx(max(r.done_s for r in result.calls), abs=0.01)


def test_a_call_that_is_refused_for_ever_fails() -> None:
    """A switch to its model takes longer than a round may: the round check never lets it in."""
    slow = msgspec.structs.replace(
        ONE, calibration="paper", admission=True, hardware={"h2d_gb_s": 4.0}, refused_s=3600.0
    )
    result = simulate(slow, trace_of(BIG, 3, 5, seed=0))
    (failed,) = [r for r in result.calls if r.error]
    assert failed.done_s - failed.intended_s == pytest.approx(3600.0, rel=0.05)
    assert failed.cached_tokens == 0
    assert result.summary["failed_calls"] == result.summary["failed_sessions"] == 1
    per_answered = 8 * result.summary["window_s"] / 2
    assert result.summary["gpu_s_per_session"] == pytest.approx(per_answered, abs=0.01)
    assert "1 calls failed, and with each the rest of its session; first call" in result.notes[-1]


class Refusing:
    """A mesh that refuses every call, the first after `first_s`, the others at once; each is told 1000 s."""

    def __init__(self, heap: EventHeap, first_s: float) -> None:
        self.heap, self.first_s, self.made_at = heap, first_s, list[float]()

    def call(self, request: Request) -> None:
        wait = 0.0 if self.made_at else self.first_s
        self.made_at.append(self.heap.clock.now())
        self.heap.after(wait, lambda: request.on_end("", OverloadedError("full", retry_after_s=1000.0)))


def test_refusals_count_from_the_first_and_no_wait_is_longer_than_a_minute() -> None:
    heap = EventHeap(VirtualClock(0.0))
    mesh, made, laws = Refusing(heap, 500.0), list[Any](), CallLaws(1e9)
    calls = trace_of(SMALL, 1, 2)
    Agent(heap, mesh, calls, seed=0, gap_cap_s=1.0, refused_s=300.0, laws=laws, done=made.extend).start()  # type: ignore[arg-type]
    heap.run(lambda: bool(made))
    (failed,) = made
    assert mesh.made_at == [0.0] + [500.0 + 60.0 * n for n in range(1, 6)]
    assert (failed.retries, failed.done_s, failed.error) == (5, 800.0, "full")


def test_refusals_are_borne_as_long_as_any_wait() -> None:
    """Who starts with hundreds of others on one server may have to wait for hours."""
    assert Scenario(groups=ONE.groups, deadline_s=20_000.0).longest_refused_s == 20_000.0
    assert Scenario(groups=ONE.groups, refused_s=60.0).longest_refused_s == 60.0


def test_a_call_that_is_queued_for_ever_fails() -> None:
    slow = msgspec.structs.replace(
        ONE, calibration="paper", admission=True, overload="queue", hardware={"h2d_gb_s": 4.0}, deadline_s=1000.0
    )
    result = simulate(slow, trace_of(BIG, 3, 5, seed=0))
    (failed,) = [r for r in result.calls if r.error]
    assert failed.done_s - failed.intended_s == pytest.approx(1000.0, abs=5.0)
    assert "deadline" in failed.error


@pytest.mark.parametrize("deadline_s", [0.2, 0.5, 1.0, 2.0, 4.0])
@pytest.mark.parametrize("ablation", ["talaria", "round-only"])
def test_deadlines_that_pass_in_steps_and_switches_are_lawful(deadline_s: float, ablation: str) -> None:
    hasty = msgspec.structs.replace(ONE, ablation=ablation, deadline_s=deadline_s, stagger_s=0.7)
    summary = simulate(hasty, trace_of(BIG, 40, 3)).summary
    assert summary["failed_calls"] > 0
    assert summary["switches"] > 0


def test_an_engine_that_finds_a_leak_gives_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SimPool, "check", lambda _: "3 rows have no call")
    with pytest.raises(LawError, match=r"a bug, .*: 3 rows have no call"):
        simulate(TWO, trace_of(SMALL, 2, 1))


def test_a_broken_law_is_said_and_no_result_given(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def broken(*_: object) -> None:
        raise LawError("a book does not balance")

    monkeypatch.setattr(CallLaws, "end", broken)
    monkeypatch.chdir(tmp_path)
    for command in (
        ["simulate", "--sessions", "1", "--max-calls", "1"],
        ["report", "--only", "table-2", "--issues", "1"],
    ):
        monkeypatch.setattr(sys, "argv", ["talaria", *command])
        with pytest.raises(SystemExit, match="3"):
            main()
        said = capsys.readouterr().err
        assert said.splitlines()[-1] == (
            f"talaria {command[0]}: a bug, in the simulator or in what it simulates: a book does not balance"
        )


def test_contexts_beyond_the_model_are_refused() -> None:
    calls = [Call(session="s", call=0, model="qwen3-32b", prompt_tokens=140_000, completion_tokens=5)]
    with pytest.raises(ScenarioError, match="exceed the context"):
        simulate(TWO, calls)
    with pytest.raises(ScenarioError, match="no instance serves m"):
        simulate(TWO, [Call(session="s", call=0, model="m", prompt_tokens=1, completion_tokens=5)])


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_the_paper_s_960_calls_take_seconds() -> None:
    calls = workload.generated(BIG, seed=0, max_context_tokens=190_000)
    assert len(calls) == 960
    start = time.process_time()
    result = simulate(ONE, calls)
    took = time.process_time() - start
    assert result.summary["failed_calls"] == 0
    assert took < 20, f"{took:.1f} s of CPU"
