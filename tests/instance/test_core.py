"""The instance core's promises, one by one."""

import pytest

from talaria_common.errors import (
    DeadlineError,
    EngineError,
    InstanceLostError,
    ModelNotFoundError,
    OverloadedError,
    UnavailableError,
)
from talaria_common.wire import Completion, ControlRequest, SeenPlacements, Snapshot, TokenBatch
from talaria_common.wire.error import info_of
from talaria_gpu.engine.contract import ModelLoad, Staged, StepResult, StepTokens, SwitchTiming
from talaria_gpu.engine.ipc import Close, Closed, Fatal, Open, Opened, Progress, Refused, SlotEnded, Stepped, Switched
from talaria_instance import messages as m


@pytest.fixture
def key(build):
    return m.CallKey(build.rid(1), 0)


def test_a_call_from_forward_to_completion(rig, build, key):
    assert rig.forward(key.rid, seq=3, is_continuation=True).accepted
    call = rig.engine_calls[key.engine_rid]
    assert list(call.input_ids) == build.ids("user: hi\nassistant: ")
    assert call.sampling.max_new_tokens == 256 - len(call.input_ids)  # the rest of the context
    assert call.sampling.stop_token_ids == (2,)
    assert (call.salt, call.is_continuation) == ("local", True)
    rig.now += 0.5
    rig.step(
        StepTokens(rid=key.engine_rid, token_ids=build.ids("he"), cached_tokens=16, cache_source="device"),
        kind="prefill",
        wall_ms=100.0,
    )
    rig.now += 1.0
    rig.give(key, "llo", finished="length")
    rig.check_promises()
    first, last = rig.frames[key]
    assert (first.kind, first.text, first.cache_source, first.usage) == ("delta", "he", "device", None)
    assert (last.kind, last.text, last.finish_reason, last.cache_source) == ("final", "llo", "length", "none")
    assert (last.usage.prompt_tokens, last.usage.completion_tokens, last.usage.cached_tokens) == (20, 5, 16)
    (done,) = rig.completions[key]
    assert done.ok
    assert (done.router, done.router_epoch, done.seq, done.partition) == ("router-0", "r0", 3, 7)
    assert (done.kv_tokens, done.prompt_bytes, done.cache_source) == (24, 2, "device")
    assert (done.ttft_ms, done.prefill_ms, done.queue_ms, done.total_ms) == pytest.approx(
        (500, 100, 400, 1500), abs=0.1
    )
    assert done.prefix_handle
    assert [e["accepted"] for e in rig.events("forward")] == [True]
    assert [e["finish"] for e in rig.events("completion")] == ["length"]


def test_an_answer_that_nobody_reads_as_it_grows_is_one_frame(rig, build, key):
    rig.forward(key.rid, stream=False)
    rig.step(StepTokens(rid=key.engine_rid, token_ids=build.ids("he"), cached_tokens=16, cache_source="device"))
    rig.give(key, "l")
    assert rig.frames[key] == []
    rig.give(key, "lo", finished="length")
    rig.check_promises()
    (only,) = rig.frames[key]
    assert (only.kind, only.seq, only.text, only.token_ids) == ("final", 0, "hello", build.ids("hello"))
    assert (only.cache_source, only.usage.completion_tokens) == ("device", 5)


def stepped(key, tokens, kind="decode", wall_ms=1.0, **kw):
    step = StepTokens(rid=key.engine_rid, token_ids=tokens, **kw)
    return Stepped(model="alpha", result=StepResult(kind=kind, tokens=[step], wall_ms=wall_ms))


def test_steps_that_came_together_are_one_frame(rig, key, build):
    rig.forward(key.rid)
    rig.said(
        stepped(key, build.ids("h"), kind="prefill", wall_ms=7.0, cached_tokens=4, cache_source="device"),
        stepped(key, build.ids("e")),
        stepped(key, build.ids("llo")),
    )
    (first,) = rig.frames[key]
    assert (first.kind, first.seq, first.text, first.token_ids) == ("delta", 0, "hello", build.ids("hello"))
    rig.said(stepped(key, build.ids(" ")), stepped(key, build.ids("you"), finished="length"))
    rig.check_promises()
    last = rig.frames[key][-1]
    assert (last.kind, last.seq, last.text, last.usage.completion_tokens) == ("final", 1, " you", 9)
    (done,) = rig.completions[key]
    assert done.prefill_ms == 7.0


def test_steps_with_log_probabilities_stay_apart(rig, key, build):
    rig.forward(key.rid, data=build.body(logprobs=True, top_logprobs=1))
    one, two = build.ids("h"), build.ids("i")
    rig.said(
        stepped(key, one, logprobs=[-0.5], top=[[(one[0], -0.5)]]),
        stepped(key, two, logprobs=[-0.25], top=[[(two[0], -0.25)]]),
    )
    assert [(f.text, f.logprobs[0].logprob) for f in rig.frames[key]] == [("h", -0.5), ("i", -0.25)]


def test_steps_before_a_fatal_report_count_and_those_after_it_do_not(rig, key, build):
    rig.forward(key.rid)
    rig.said(stepped(key, build.ids("a")), Fatal(message="addresses moved"), stepped(key, build.ids("b")))
    rig.check_promises()
    assert [(f.kind, f.text) for f in rig.frames[key]] == [("delta", "a"), ("error", "")]


def test_it_can_still_move_after_tokens_were_made(rig, key):
    rig.forward(key.rid, stream=False)
    rig.give(key, "x")
    rig.give(key, "", finished="error")
    (only,) = rig.frames[key]
    assert (only.kind, only.retryable) == ("error", True)


def test_the_completion_leaves_before_the_final_frame(rig, key):
    rig.forward(key.rid)
    effects = rig.give(key, "x", finished="stop")
    kinds = [type(e.message) for e in effects if isinstance(e, m.Publish)]
    assert kinds.index(Completion) < kinds.index(TokenBatch)


def test_one_batch_per_api_and_step(rig, build):
    keys = [m.CallKey(build.rid(n), 0) for n in range(4)]
    for n, key in enumerate(keys):
        rig.forward(key.rid, api=f"api-{n % 2}", seq=n + 1)
    effects = rig.step(*(StepTokens(rid=k.engine_rid, token_ids=build.ids("a")) for k in keys))
    batches = {e.subject: e.message for e in effects if isinstance(e, m.Publish) and isinstance(e.message, TokenBatch)}
    assert {s: [f.rid for f in b.frames] for s, b in batches.items()} == {
        "talaria.v1.tokens.api-0": [keys[0].rid, keys[2].rid],
        "talaria.v1.tokens.api-1": [keys[1].rid, keys[3].rid],
    }


def test_each_heartbeat_names_the_living_per_api(rig, build):
    for n in range(3):
        rig.forward(build.rid(n), api=f"api-{n % 2}", seq=n + 1)
    effects = rig.tell(m.Tick())
    alive = {
        e.subject[-5:]: e.message.alive
        for e in effects
        if isinstance(e, m.Publish) and isinstance(e.message, TokenBatch)
    }
    assert alive == {"api-0": [build.rid(0), build.rid(2)], "api-1": [build.rid(1)]}
    assert isinstance(rig.snapshot, Snapshot)


# --- what is refused


@pytest.mark.parametrize(
    ("field", "error", "retryable"),
    [
        ({"model": "gamma"}, ModelNotFoundError, True),
        ({"iid": "hot-0"}, UnavailableError, True),
        ({"deadline_s": -3}, DeadlineError, False),
        ({"accept_s": -3}, UnavailableError, True),
    ],
)
def test_a_forward_that_is_out_of_order(rig, field, error, retryable):
    reply = rig.forward(**field)
    assert not reply.accepted
    assert (reply.error.code, reply.retryable) == (error.code, retryable)
    assert rig.core.calls == {}
    assert rig.events("forward")[-1]["code"] == error.code


def test_deadlines_forgive_the_stated_skew(rig):
    assert rig.forward(deadline_s=-1.9, accept_s=-1.9).accepted


def test_the_fence_never_goes_back(rig, build):
    assert rig.forward(build.rid(1), rev=5).accepted
    reply = rig.forward(build.rid(2), rev=4)
    assert (reply.accepted, reply.retryable) == (False, True)
    assert "fenced" in reply.error.message
    assert rig.forward(build.rid(3), rev=4, partition=8).accepted  # compared within its partition only
    assert rig.forward(build.rid(4), rev=6).accepted


def test_repeats_and_older_attempts_are_refused(rig, build):
    assert rig.forward(build.rid(1), 1).accepted
    assert not rig.forward(build.rid(1), 1).accepted
    assert not rig.forward(build.rid(1), 0).accepted
    assert len(rig.core.calls) == 1


def test_a_newer_attempt_ends_the_older_one(rig, build):
    old, new = m.CallKey(build.rid(1), 0), m.CallKey(build.rid(1), 1)
    rig.forward(*old)
    rig.forward(*new)
    assert list(rig.core.calls) == [new]
    assert rig.aborted == [old.engine_rid]
    assert rig.frames[old][-1].finish_reason == "abort"
    rig.check_promises()


def test_overload_says_when_to_come_back(build):
    rig = build.Rig(max_queued=2)
    rig.forward(build.rid(1))
    rig.forward(build.rid(2))
    reply = rig.forward(build.rid(3))
    assert (reply.error.code, reply.retryable) == (OverloadedError.code, True)
    assert reply.error.retry_after_s >= 1
    rig.give(m.CallKey(build.rid(1), 0), "x")  # past its first token it waits no more
    assert rig.forward(build.rid(4)).accepted


def test_nothing_is_taken_before_the_engine_is_ready(build):
    rig = build.Rig(ready=False)
    reply = rig.forward(build.rid(1))
    assert (reply.accepted, reply.retryable, reply.error.code) == (False, True, "unavailable")
    rig.tell(m.EngineStarting(0))
    rig.said(Progress(message="loading alpha"))
    assert "loading alpha" in rig.forward(build.rid(2)).error.message
    rig.engine_ready()
    assert rig.forward(build.rid(3)).accepted


def test_what_does_not_fit_the_context(rig, build, key):
    data = build.body(messages=[{"role": "user", "content": "x" * 300}])
    assert rig.forward(key.rid, data=data).accepted
    (frame,) = rig.frames[key]
    assert (frame.kind, frame.error.code, frame.error.param, frame.retryable) == (
        "error",
        "context_length_exceeded",
        "messages",
        False,
    )
    other = m.CallKey(build.rid(2), 0)
    rig.forward(other.rid, data=build.body(max_completion_tokens=250))
    assert rig.frames[other][0].error.param == "max_completion_tokens"
    assert rig.engine_calls == {}
    rig.check_promises()


# --- how calls end


def test_a_cancel_aborts_at_once_and_only_its_call(rig, build):
    keys = [m.CallKey(build.rid(n), 0) for n in (1, 0x11)]
    for key in keys:
        rig.forward(key.rid)
    rig.give(keys[0], "x")
    effects = rig.cancel(keys[0])
    assert rig.aborted == [keys[0].engine_rid]
    assert any(isinstance(e, m.Tell) for e in effects)
    assert rig.frames[keys[0]][-1].finish_reason == "abort"
    assert not rig.completions[keys[0]][0].ok
    rig.give(keys[0], "late")  # the step that was under way
    assert list(rig.core.calls) == [keys[1]]
    rig.check_promises()


def test_a_cancel_while_tokenising(build, key):
    rig = build.Rig(auto_prepare=False)
    rig.forward(key.rid)
    rig.cancel(key)
    rig.prepare(key)
    assert rig.engine_calls == {}
    assert rig.aborted == []
    assert len(rig.completions[key]) == 1


def test_a_cancel_that_overtakes_its_forward(rig, key):
    rig.cancel(key)
    reply = rig.forward(key.rid)
    assert (reply.accepted, reply.retryable) == (False, False)
    rig.cancel(m.CallKey("f" * 32, 0))
    rig.now += 60
    assert rig.forward("f" * 32).accepted  # not remembered for ever


def test_stop_strings_end_the_output_before_them(rig, build, key):
    rig.forward(key.rid, data=build.body(stop=["END", "\n\n"]))
    rig.give(key, "one E")
    rig.give(key, "ND two")
    assert rig.text(key) == "one "
    assert rig.frames[key][-1].finish_reason == "stop"
    assert rig.aborted == [key.engine_rid]
    assert rig.completions[key][0].ok
    rig.give(key, "more")
    rig.check_promises()


def test_a_stop_string_in_the_last_step_needs_no_abort(rig, build, key):
    rig.forward(key.rid, data=build.body(stop="b"))
    rig.give(key, "ab", finished="length")
    assert (rig.text(key), rig.frames[key][-1].finish_reason, rig.aborted) == ("a", "stop", [])


def test_held_back_text_comes_out_at_the_end(rig, build, key):
    rig.forward(key.rid, data=build.body(stop="END"))
    rig.give(key, "the EN")
    assert rig.text(key) == "the "
    rig.give(key, "", finished="stop")
    assert rig.text(key) == "the EN"


def test_logprobs_and_token_ids(rig, build, key):
    rig.forward(key.rid, data=build.body(logprobs=True, top_logprobs=1, return_token_ids=True))
    assert rig.engine_calls[key.engine_rid].sampling.logprobs == 1
    (a, b) = build.ids("ab")
    rig.step(StepTokens(rid=key.engine_rid, token_ids=[a], logprobs=[-0.5], top=[[(b, -0.7)]]))
    rig.give(key, "c", finished="length", logprobs=[-0.1])
    first, last = rig.frames[key]
    assert first.prompt_token_ids == build.ids("user: hi\nassistant: ")
    assert last.prompt_token_ids == []
    (entry,) = first.logprobs
    assert (entry.token, entry.bytes, entry.logprob) == ("a", [97], -0.5)
    assert [(t.token, t.logprob) for t in entry.top] == [("b", -0.7)]


def test_impossible_token_has_a_number_that_json_can_say(rig, build, key):
    rig.forward(key.rid, data=build.body(logprobs=True, top_logprobs=1))
    (a, b) = build.ids("ab")
    rig.step(StepTokens(rid=key.engine_rid, token_ids=[a], logprobs=[-0.5], top=[[(b, float("-inf"))]]))
    rig.give(key, "c", finished="length", logprobs=[-0.1])
    first, _ = rig.frames[key]
    assert first.logprobs[0].top[0].logprob == -9999.0


@pytest.mark.parametrize(
    ("finished", "error", "retryable"),
    [("error", EngineError, True), ("abort", EngineError, True), ("deadline", DeadlineError, False)],
)
def test_ends_that_are_no_answers(rig, key, finished, error, retryable):
    rig.forward(key.rid)
    rig.give(key, finished=finished, message="out of rows")
    assert rig.aborted == []  # the engine is rid of it already
    (frame,) = rig.frames[key]
    assert (frame.error.code, frame.retryable) == (error.code, retryable)
    rig.check_promises()


def test_a_refusal_of_the_engine(rig, key):
    rig.forward(key.rid)
    rig.said(Refused(rid=key.engine_rid, error=info_of(OverloadedError("full"))))
    assert (rig.frames[key][0].error.code, rig.frames[key][0].retryable) == ("overloaded", True)


def test_a_model_that_was_closed_under_a_call_is_asked_for_elsewhere(rig, key):
    """Its switch failed while the call was on its way to the engine: other instances may have it."""
    rig.forward(key.rid)
    rig.said(Refused(rid=key.engine_rid, error=info_of(ModelNotFoundError("m is not open here"))))
    assert (rig.frames[key][0].error.code, rig.frames[key][0].retryable) == ("unavailable", True)


def test_an_owner_revision_from_the_future_fences_nobody(rig, build):
    reply = rig.forward(build.rid(1), rev=2**53)
    assert (reply.accepted, reply.retryable, reply.error.code) == (False, False, "invalid_request")
    assert rig.forward(build.rid(2), rev=round(rig.now * 1000)).accepted


def test_a_deadline_that_passes_here(rig, key):
    rig.forward(key.rid, deadline_s=5)
    rig.now += 6.5
    rig.tell(m.Tick())
    assert key in rig.core.calls  # within the tolerated skew
    rig.now += 1
    rig.tell(m.Tick())
    assert rig.frames[key][0].error.code == "deadline_exceeded"
    assert rig.aborted == [key.engine_rid]
    rig.check_promises()


# --- the engine's life


def test_an_engine_that_dies(rig, build):
    before, after = m.CallKey(build.rid(1), 0), m.CallKey(build.rid(2), 0)
    rig.forward(before.rid)
    rig.forward(after.rid)
    rig.give(after, "x")
    effects = rig.engine_dies()
    assert [(rig.frames[k][-1].error.code, rig.frames[k][-1].retryable) for k in (before, after)] == [
        (InstanceLostError.code, True),
        (InstanceLostError.code, False),
    ]
    assert (rig.snapshot.status, rig.snapshot.engine_restarts) == ("failed", 1)
    assert "SIGKILL" in rig.snapshot.reason
    assert [e for e in effects if isinstance(e, m.StartEngine)] == [m.StartEngine(1, 0.5)]
    assert rig.events("health")[-1]["status"] == "failed"
    assert rig.aborted == []
    rig.check_promises()
    rig.engine_ready()
    assert rig.snapshot.status == "ready"
    assert rig.forward(build.rid(3)).accepted


def test_back_off_grows_and_is_forgiven_after_a_while(rig):
    delays = []
    for _ in range(8):
        effects = rig.engine_dies()
        delays += [e.delay_s for e in effects if isinstance(e, m.StartEngine)]
        rig.tell(m.EngineStarting(rig.core.engine.generation))
    assert delays == [0.5, 1, 2, 4, 8, 16, 30, 30]
    rig.engine_ready()
    rig.now += 61
    assert [e.delay_s for e in rig.engine_dies() if isinstance(e, m.StartEngine)] == [0.5]


def test_kv_epochs_never_fall(rig, key):
    rig.status(kv_epoch=4)
    assert rig.core.engine.kv_epoch("alpha") == 4
    rig.engine_dies()
    assert rig.core.engine.kv_epoch("alpha") == 5
    rig.engine_ready()
    rig.status(kv_epoch=0)
    assert rig.core.engine.kv_epoch("alpha") == 5
    rig.tell(m.Tick())
    assert {s.name: s.kv_epoch for s in rig.snapshot.models} == {"alpha": 5, "beta": 5}


def test_a_silent_engine_is_killed_but_not_too_early(build, key):
    rig = build.Rig(engine_hang_s=30)
    rig.forward(key.rid, deadline_s=600)
    for _ in range(59):
        rig.now += 0.5
        assert not any(isinstance(e, m.KillEngine) for e in rig.tell(m.Tick()))
    rig.status()  # a sign of life
    for _ in range(60):
        rig.now += 0.5
        rig.tell(m.Tick())
    assert key in rig.core.calls
    rig.now += 0.5
    effects = rig.tell(m.Tick())
    assert [e for e in effects if isinstance(e, m.KillEngine)] == [m.KillEngine(0)]
    assert rig.frames[key][-1].error.code == "instance_lost"
    assert "silent" in rig.snapshot.reason
    rig.tell(m.EngineExited(0, "killed by SIGKILL"))  # the exit that the kill led to
    assert rig.core.engine.restarts == 1


def test_a_long_step_is_no_hang_but_a_busy_loop_is_one_at_last(build):
    def seconds_until_killed(share):
        rig, cpu_s = build.Rig(engine_hang_s=30), 0.0
        rig.tell(m.Tick(cpu_s))
        for n in range(1000):
            rig.now += 0.5
            cpu_s += 0.5 * share
            if any(isinstance(e, m.KillEngine) for e in rig.tell(m.Tick(cpu_s))):
                return (n + 1) / 2
        return None

    assert seconds_until_killed(0.0) == 30.5  # stopped or deadlocked
    assert seconds_until_killed(0.5) == 300.5  # it computes, and yet never comes back


def test_an_engine_that_has_not_been_started_is_not_silent(build):
    rig = build.Rig(ready=False)
    assert not any(isinstance(e, m.KillEngine) for e in rig.tell(m.Tick()))
    rig.tell(m.EngineStarting(0))
    rig.engine_dies()
    rig.now += 1000
    assert not any(isinstance(e, m.KillEngine) for e in rig.tell(m.Tick()))


def test_our_own_stall_is_no_hang_of_the_engine(rig):
    rig.tell(m.Tick())
    rig.now += 300
    assert not any(isinstance(e, m.KillEngine) for e in rig.tell(m.Tick()))


def test_a_fatal_report_and_late_reports(rig, key):
    rig.forward(key.rid)
    effects = rig.said(Fatal(message="addresses moved"))
    assert m.KillEngine(0) in effects
    assert rig.snapshot.reason == "addresses moved"
    rig.tell(m.EngineSaid(0, [Progress(message="ghost")]))
    assert rig.core.reason == "addresses moved"


def test_switches_and_rounds_become_events(rig):
    timing = SwitchTiming(
        source="alpha", target="beta", phases_ms=(1, 2, 3, 4, 5), total_ms=15, weight_bytes=9, h2d_bytes=9
    )
    rig.said(Switched(timings=[timing]))
    rig.said(
        SlotEnded(
            model="beta",
            wall_ms=10,
            active_ms=8,
            switch_ms=2,
            prefills=1,
            decodes=2,
            admitted=1,
            deferred=0,
            retracted=0,
            reason="budget",
        )
    )
    (switch,), (slot,) = rig.events("switch"), rig.events("round")
    assert (switch["target"], switch["total_ms"], switch["open_ms"], switch["publish_ms"]) == ("beta", 15, 2, 5)
    assert (slot["model"], slot["wall_ms"], slot["reason"]) == ("beta", 10, "budget")
    assert not any(isinstance(v, list | dict | tuple) for v in (*switch.values(), *slot.values()))


# --- snapshots and control


def test_snapshots_count_exactly_what_was_seen(rig, build):
    for seq in (1, 2, 5):
        rig.forward(build.rid(seq), seq=seq)
    rig.forward(build.rid(9), seq=1, router_epoch="r1", model="gamma")  # refused, but seen
    rig.tell(m.Tick())
    assert rig.snapshot.seen == {
        "router-0/r0": SeenPlacements(upto=5, missing=(3, 4)),
        "router-0/r1": SeenPlacements(upto=1),
    }
    assert sum(s.queued for s in rig.snapshot.models) == 3
    rig.forward(build.rid(4), seq=4)
    rig.tell(m.Tick())
    assert rig.snapshot.seen["router-0/r0"].missing == (3,)
    rig.now += 31
    rig.tell(m.Tick())
    assert rig.snapshot.seen["router-0/r0"].missing == ()


def test_a_snapshot_tells_what_the_host_keeps(rig):
    load = ModelLoad(
        waiting=0,
        running=0,
        waiting_tokens=0,
        kv_used_tokens=0,
        kv_epoch=0,
        host_kv_tokens=640,
        restore_ms_per_token=0.25,
    )
    rig.status(loads=dict.fromkeys(("alpha", "beta"), load))
    rig.tell(m.Tick())
    for model in rig.snapshot.models:
        assert (model.host_kv_tokens, model.restore_ms_per_token) == (640, 0.25)


def test_a_snapshot_tells_what_calls_hold_and_what_is_staged(rig, build, key):
    """Of the active model the engine knows; of one that is not, its suspended calls come back with what they had."""
    load = ModelLoad(waiting=0, running=1, waiting_tokens=0, kv_used_tokens=500, kv_epoch=0, kv_held_tokens=120)
    rig.forward(key.rid)
    rig.forward(build.rid(2), seq=2)
    rig.give(key, "xy")
    both = dict.fromkeys(("alpha", "beta"), load)
    rig.status(active="alpha", loads=both, staged=Staged("beta", 4), switch_now_ms={"beta": 60.0})
    rig.tell(m.Tick())
    alpha, beta = rig.snapshot.models
    assert (alpha.kv_held_tokens, alpha.staged, alpha.switch_now_ms) == (120, 0.0, 0.0)
    assert (beta.kv_held_tokens, beta.staged, beta.switch_now_ms) == (0, 0.4, 60.0)
    rig.status(active="beta", loads=both)
    rig.tell(m.Tick())
    assert [model.kv_held_tokens for model in rig.snapshot.models] == [22, 120], "a prompt of 20 and two tokens"


def test_a_snapshot_in_full(rig, build, key):
    rig.forward(key.rid)
    rig.forward(build.rid(2), seq=2)
    rig.give(key, "x")
    rig.status(
        active="beta",
        kv_epoch=3,
        switches=4,
        prefilled_tokens=20,
        switch_ms={"beta": 7.0},
        decode_step_ms={"alpha": 2.0},
        prefill_ms_per_token={"alpha": 1.0},
        slot_remaining_ms=12.0,
    )
    shot = rig.snapshot
    assert (shot.active_model, shot.switches, shot.prefilled_tokens, shot.round_remaining_ms) == ("beta", 4, 20, 12.0)
    assert (shot.kv_occupancy, shot.buffer_bytes, shot.max_queued) == (0.25, 5000, 64)
    alpha, beta = shot.models
    assert (alpha.state, alpha.queued, alpha.running, alpha.queued_tokens) == ("host", 1, 1, 20)
    assert (beta.state, beta.switch_ms, beta.kv_epoch) == ("active", 7.0, 3)
    versions = [s.version for s in rig.published(Snapshot)]
    assert versions == list(range(1, len(versions) + 1))


def test_the_queue_counts_of_returning_calls_what_they_usually_compute(rig, build):
    def returning(n):
        key = m.CallKey(build.rid(n), 0)
        assert rig.forward(key.rid, seq=n, is_continuation=True).accepted
        rig.tell(m.Tick())
        return key, rig.snapshot.models[0].queued_tokens

    first, counted = returning(1)
    assert counted == 20, "nothing is known yet"
    rig.give(first, "x", cached_tokens=15)
    second, counted = returning(2)
    assert counted == 5
    rig.give(second, "x", cached_tokens=20)
    assert returning(3)[1] == 4
    rig.forward(build.rid(4), seq=4)  # a session's first call
    rig.tell(m.Tick())
    assert rig.snapshot.models[0].queued_tokens == 24


def test_calls_that_will_miss_their_deadline_are_counted(rig, key):
    rig.forward(key.rid, deadline_s=10)
    rig.status(prefill_ms_per_token={"alpha": 1000.0})
    assert rig.snapshot.deadline_risk == 1


def test_what_the_scheduler_foresees_is_in_the_snapshot(rig, key):
    """It knows of queues, slots and T_TTFT, and so of more calls at risk than have too little time for themselves."""
    rig.forward(key.rid, deadline_s=10)
    rig.status(prefill_ms_per_token={"alpha": 1000.0}, at_risk=3, round_planned_ms=12_000.0, infeasible="ttft")
    shot = rig.snapshot
    assert (shot.deadline_risk, shot.round_planned_ms, shot.infeasible) == (3, 12_000.0, "ttft")


def control(rig, verb, **kw):
    effects = rig.tell(m.Control("h", verb, ControlRequest(**kw)))
    (answer,) = (e.message for e in effects if isinstance(e, m.Answer))
    return answer


def test_drain_and_resume(rig, build, key):
    rig.forward(key.rid)
    reply = control(rig, "drain")
    assert (reply.ok, reply.status) == (True, "draining")
    assert rig.snapshot.status == "draining"
    assert rig.forward(build.rid(2)).retryable
    assert not control(rig, "health").ok
    rig.give(key, "done", finished="stop")
    assert rig.completions[key][0].ok
    assert (control(rig, "resume").status, rig.snapshot.status) == ("ready", "ready")
    assert rig.forward(build.rid(3)).accepted


def test_health_open_and_close(rig, build):
    assert control(rig, "health").ok
    assert control(rig, "open", model="alpha").ok
    assert control(rig, "open", model="gamma").error.code == "model_not_found"
    assert control(rig, "open").error.param == "model"
    late = round((rig.now - 3) * 1000)
    assert control(rig, "drain", deadline_ms=late).error.code == "deadline_exceeded"
    assert rig.core.status == "ready"
    starting = build.Rig(ready=False)
    assert not control(starting, "health").ok
    assert control(starting, "open", model="alpha").error.code == "unavailable"


def states(rig):
    return {model.name: model.state for model in rig.snapshot.models}


def test_a_model_is_closed_and_opened_again(rig, build, key):
    rig.forward(key.rid)
    assert control(rig, "close", model="alpha").error.code == "unavailable"
    rig.give(key, "done", finished="stop")
    info, epoch = rig.core.engine.infos["alpha"], rig.core.engine.kv_epoch("alpha")
    effects = rig.tell(m.Control("h", "close", ControlRequest(model="alpha")))
    assert [e.command for e in effects if isinstance(e, m.Tell)] == [Close(model="alpha")]
    rig.said(Closed(model="alpha"))
    assert states(rig)["alpha"] == "cold"
    assert rig.core.engine.kv_epoch("alpha") > epoch
    refused = rig.forward(build.rid(5))
    assert (refused.accepted, refused.retryable) == (False, True)
    effects = rig.tell(m.Control("h", "open", ControlRequest(model="alpha")))
    assert [e.command for e in effects if isinstance(e, m.Tell)] == [Open(model="alpha")]
    rig.tell(m.Tick())
    assert states(rig)["alpha"] == "loading"
    rig.said(Opened(info=info))
    assert states(rig)["alpha"] == "host"
    assert rig.forward(build.rid(6)).accepted


def test_a_model_that_cannot_be_switched_to_is_failed_until_it_is_opened(rig):
    info = rig.core.engine.infos["alpha"]
    rig.said(Closed(model="alpha", error="its image is damaged"))
    assert states(rig) == {"alpha": "failed", "beta": "host"}
    assert rig.core.status == "ready"
    rig.said(Opened(info=info))
    assert states(rig)["alpha"] == "host"


def test_a_hot_instance_pins_its_model(build):
    hot = build.Rig()
    hot.core.settings = hot.settings.model_copy(update={"pool": "hot"})
    assert control(hot, "close", model="alpha").error.code == "unsupported_parameter"


def test_shutdown_lets_calls_finish_then_ends_them(rig, build):
    keys = [m.CallKey(build.rid(n), 0) for n in range(3)]
    for n, key in enumerate(keys):
        rig.forward(key.rid, seq=n + 1)
    rig.give(keys[2], "x")
    rig.tell(m.Shutdown())
    assert (rig.snapshot.status, rig.snapshot.reason) == ("draining", "shutting down")
    assert not rig.forward(build.rid(9)).accepted
    assert control(rig, "resume").status == "draining"
    rig.give(keys[0], "ok", finished="stop")
    rig.tell(m.Shutdown(now=True))
    assert rig.core.calls == {}
    assert rig.frames[keys[0]][-1].kind == "final"
    assert [(rig.frames[k][-1].error.code, rig.frames[k][-1].retryable) for k in keys[1:]] == [
        ("unavailable", True),
        ("instance_lost", False),
    ]
    assert not any(isinstance(e, m.StartEngine) for e in rig.engine_dies("exited with status 0"))
    rig.check_promises()
