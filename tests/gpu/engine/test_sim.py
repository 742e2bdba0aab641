"""The sim engine as an engine: time, tokens, prefix cache, KV bounds."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from talaria_common.errors import EngineError
from talaria_gpu.engine.contract import Sampling
from talaria_gpu.engine.driver import SlotDriver
from talaria_gpu.engine.ipc import Opened, Status, Stepped, Switched
from talaria_gpu.engine.sim import SimEngine, expected_text, expected_tokens, pool
from talaria_gpu.engine.sim.device import FlatDevice
from talaria_gpu.sched.config import SlotConfig
from talaria_gpu.text.byte_tokenizer import ByteTokenizer
from tests.gpu.engine.rig import Rig, make_call


def near(ms: float):
    """The clock's floats are of the order of 1e9 s: they resolve a quarter of a microsecond."""
    return pytest.approx(ms, abs=0.01)


def test_time_is_what_the_settings_say() -> None:
    rig = Rig(models=("a",), ttft_ms=7, prefill_ms_per_ktoken=100, decode_step_ms=10)
    rig.submit(make_call("r", list(range(40)), new=5))
    rig.until(1000)
    assert rig.first_token_ms("r") == near(7 + 100 * 40 / 1000)
    assert rig.at[-1] == near(11 + 4 * 10)
    rig.submit(make_call("r2", list(range(40)), new=1))
    rig.rest()
    assert rig.steps("r2")[0].cached_tokens == 36  # of 40, whole pages of 4, one token left to compute
    assert rig.first_token_ms("r2") == near(1000 + 7 + 100 * 4 / 1000)


def test_a_late_caller_does_not_slow_the_pace() -> None:
    rig = Rig(models=("a",), ttft_ms=0, decode_step_ms=10)
    rig.submit(make_call("r", [1, 2, 3], new=21))
    while "r" not in rig.finished():
        rig.clock.advance(rig.driver.next_wakeup() + 0.004)  # 4 ms late, every time
        rig.turn()
    assert rig.ms < 20 * 10 + 30


def test_without_delays_every_step_answers_at_once() -> None:
    rig = Rig(models=("a",), ttft_ms=0, decode_step_ms=0)
    rig.submit(*(make_call(f"r{i}", [i] * 9, new=6) for i in range(10)))
    while rig.driver.next_wakeup() == 0:
        rig.turn()
    assert len(rig.finished()) == 10
    assert rig.ms == 0
    assert len(rig.of(Stepped)) == 6  # one batch of all per step


class Disk(FlatDevice):
    """Reads a model in 300 ms."""

    def open_ms(self, model: str) -> float:
        return 300.0


def test_opening_takes_as_long_as_the_device_says_and_nobody_waits_meanwhile() -> None:
    rig = Rig(models=("a", "b"), ttft_ms=0, decode_step_ms=10)
    settings = rig.instance.model_copy(update={"open": ("a",)})
    rig.engine = SimEngine(settings, rig.clock, Disk(settings.sim))
    rig.driver = SlotDriver(rig.engine, SlotConfig(200.0, 50.0), rig.clock, models=settings.models)
    assert list(rig.engine.models()) == ["a"]
    rig.submit(make_call("r", [1, 2, 3], new=200))
    rig.until(105)
    assert rig.driver.open("b") == []
    rig.until(108)
    rig.until(109)
    wait = rig.driver.next_wakeup()
    assert wait is not None
    assert wait > 0, "a step is under way: there is nothing to ask for before its end"
    rig.until(400)
    assert list(rig.engine.models()) == ["a"]
    rig.until(500)
    (opened,) = rig.of(Opened)
    assert opened.info.name == "b"
    assert 300 <= opened.open_ms <= 400
    rig.submit(make_call("s", [1, 2, 3], model="b", new=1))
    rig.rest()
    assert {"r", "s"} <= set(rig.finished())


def test_sessions_without_end_are_not_remembered_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_SESSIONS_MAX", 3)
    rig = Rig(models=("a",), ttft_ms=0, decode_step_ms=0, kv_capacity_tokens=4096)
    for n in [0, 1, 2, 0, 3]:
        rig.submit(make_call(f"r{n}-{rig.turns}", [n] * 9, new=2, session=f"s{n}"))
        rig.rest()
    assert list(rig.engine._pools["a"]._sessions) == ["s2", "s0", "s3"]
    assert rig.engine.load("a").cached_sessions == 3


def test_tokens_are_letters_of_the_byte_tokenizer() -> None:
    tokens = expected_tokens([5, 6, 7], 200)
    text = ByteTokenizer().decode(tokens)
    assert text == expected_text([5, 6, 7], 200)
    assert len(text) == 200
    assert text.isascii()
    assert not set(tokens) & set(ByteTokenizer.eos_token_ids)
    assert expected_tokens([5, 6, 8], 200) != tokens


def test_a_stop_token_ends_the_call_and_is_not_sent() -> None:
    ids = [9, 8, 7]
    tokens = expected_tokens(ids, 50)
    stop = tokens[10]
    rig = Rig(models=("a",))
    rig.submit(make_call("r", ids, sampling=Sampling(max_new_tokens=50, stop_token_ids=(stop,))))
    rig.rest()
    assert rig.tokens("r") == tokens[: tokens.index(stop)]
    assert rig.finished() == {"r": "stop"}


def test_log_probabilities_come_when_asked_for() -> None:
    rig = Rig(models=("a",))
    rig.submit(make_call("r", [1, 2], sampling=Sampling(max_new_tokens=3, logprobs=2)))
    rig.rest()
    for s in rig.steps("r"):
        assert len(s.logprobs) == len(s.top) == len(s.token_ids) == 1
        assert s.top[0][0] == (s.token_ids[0], s.logprobs[0])
        assert s.top[0][1][1] < s.logprobs[0]


def test_prefixes_are_kept_per_salt_and_lost_at_a_switch() -> None:
    rig = Rig()
    prompt = list(range(100))
    follow = prompt + expected_tokens(prompt, 4) + [1, 2, 3]
    rig.submit(make_call("one", prompt, salt="t1", session="s"))
    rig.rest()
    assert rig.engine.load("a").cached_sessions == 1
    rig.submit(make_call("two", follow, salt="t1"), make_call("other", prompt, salt="t2"))
    rig.rest()
    assert rig.steps("two")[0].cached_tokens == 100  # the 104th token's KV was never computed
    assert rig.steps("two")[0].cache_source == "device"
    assert rig.steps("other")[0].cached_tokens == 0
    rig.submit(make_call("b", prompt, model="b"))
    rig.rest()
    assert rig.engine.load("a").kv_used_tokens == rig.engine.load("a").cached_sessions == 0
    assert rig.engine.load("a").kv_epoch == 1
    rig.submit(make_call("three", follow, salt="t1"))
    rig.rest()
    assert rig.steps("three")[0].cached_tokens == 0
    assert [r.timings[0].target for r in rig.of(Switched)] == ["a", "b", "a"]


def test_a_switch_retracts_and_the_call_goes_on_with_the_same_tokens() -> None:
    rig = Rig(slot_ms=50, drain_ms=20)
    rig.submit(make_call("long", list(range(50)), new=60), make_call("b", [1, 2], model="b", new=60))
    rig.rest()
    assert sum(r.timings[0].retracted for r in rig.of(Switched)) >= 2
    for rid, ids in (("long", list(range(50))), ("b", [1, 2])):
        assert rig.tokens(rid) == expected_tokens(ids, 60)
        last = rig.steps(rid)[-1]
        assert last.prefilled_tokens == len(ids)
        assert last.recomputed_tokens > 0
    assert rig.of(Status)[-1].prefilled_tokens == 52


def test_leaks_are_named() -> None:
    rig = Rig(models=("a",))
    rig.submit(make_call("r", [1, 2, 3]))
    rig.rest()
    rig.engine.check_idle()
    rig.engine._pools["a"]._own += 1
    with pytest.raises(EngineError, match="a: 1 rows"):
        rig.engine.check_idle()


@st.composite
def sessions(draw: st.DrawFn) -> list[tuple[str, list[int], int]]:
    """(model, prompt, new tokens); prompts share beginnings."""
    out = []
    for _ in range(draw(st.integers(1, 12))):
        base = [draw(st.integers(0, 2))] * draw(st.integers(1, 300))
        own = draw(st.lists(st.integers(0, 3), min_size=1, max_size=40))
        out.append((draw(st.sampled_from("ab")), base + own, draw(st.integers(1, 300))))
    return out


@given(calls=sessions(), gaps=st.lists(st.integers(0, 400), min_size=12, max_size=12), data=st.data())
@settings(max_examples=40, deadline=None)
def test_under_kv_pressure_nothing_is_lost_or_leaked(calls, gaps: list[int], data: st.DataObject) -> None:
    """1024 rows for up to 12 calls of up to 640: eviction, retraction, switches and aborts."""
    rig = Rig(kv_capacity_tokens=1024, max_running=6, slot_ms=300)
    aborted = set()
    for i, (model, prompt, new) in enumerate(calls):
        rig.submit(make_call(f"r{i}", prompt, model, new))
        rig.until(rig.ms + gaps[i])
        if data.draw(st.integers(0, 9)) == 0:
            victim = data.draw(st.integers(0, i))
            aborted.add(f"r{victim}")
            rig.abort(f"r{victim}")
        for name in "ab":
            load = rig.engine.load(name)
            assert load.kv_used_tokens <= 1024
            assert load.running <= 6
    rig.rest()
    ends = rig.finished()
    for i, (_, prompt, new) in enumerate(calls):
        rid = f"r{i}"
        if ends[rid] == "abort":
            assert rid in aborted
            assert rig.tokens(rid) == expected_tokens(prompt, len(rig.tokens(rid)))
            continue
        assert ends[rid] == "length"
        assert rig.tokens(rid) == expected_tokens(prompt, new)
        last = rig.steps(rid)[-1]
        assert last.cached_tokens + last.prefilled_tokens == len(prompt)
    rig.engine.check_idle()
    assert rig.driver.status().idle_checked >= 1


def test_two_runs_are_the_same_to_the_report() -> None:
    def run() -> list:
        rig = Rig(kv_capacity_tokens=1024, slot_ms=100)
        for i in range(30):
            rig.submit(make_call(f"r{i}", [i % 5] * (20 + 9 * i), "ab"[i % 2], 30))
            rig.until(rig.ms + 13 * (i % 4))
        rig.rest()
        return [rig.at, rig.reports]

    assert run() == run()
