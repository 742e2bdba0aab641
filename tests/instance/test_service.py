"""The service on both buses with the sim engine in its own process: what an api, a router and telemetry see."""

import asyncio
import contextlib
import os
import signal

import msgspec
import pytest

from talaria_common import subjects
from talaria_common.errors import NoRespondersError
from talaria_common.wire import FORWARD_HEADER, ForwardReply, Presence, decode, encode
from talaria_gpu.engine.sim import expected_text
from talaria_gpu.text import ByteTokenizer
from talaria_instance.claim import TwinError
from tests.instance.double import IID, Api, Running, alive, write_config
from tests.support.waiting import until


def answer_to(content, count):
    return expected_text(ByteTokenizer().encode(f"user: {content}\nassistant: "), count)


@contextlib.asynccontextmanager
async def running(connect, directory, **config):
    ours, theirs = await connect(), await connect()
    api = await Api(theirs).listen()
    instance = Running(ours, write_config(directory, **config))
    try:
        await api.ready()
        yield api, instance
    finally:
        await instance.stop()


@pytest.fixture
async def pair(connect, tmp_path):
    async with running(connect, tmp_path) as it:
        yield it


async def test_a_call_is_answered(pair):
    api, instance = pair
    rid = await api.call("hello", max_tokens=12, return_token_ids=True)
    frames = await api.end_of(rid)
    assert api.text(rid) == answer_to("hello", 12)
    assert frames[0].prompt_token_ids == ByteTokenizer().encode("user: hello\nassistant: ")
    assert [t for f in frames for t in f.token_ids] == ByteTokenizer().encode(api.text(rid))
    assert (frames[-1].finish_reason, frames[-1].usage.completion_tokens) == ("length", 12)
    done = api.completion(rid)
    assert (done.ok, done.prompt_tokens, done.completion_tokens) == (True, 23, 12)
    assert 0 < done.ttft_ms <= done.total_ms
    await until(lambda: {e.kind for e in api.events} >= {"forward", "completion", "health", "switch"})
    assert instance.registry.get_sample_value("talaria_instance_forwards_total", {"result": "accepted"}) == 1
    labels = {"model": "alpha", "finish": "length"}
    assert instance.registry.get_sample_value("talaria_instance_calls_total", labels) == 1
    assert instance.registry.get_sample_value("talaria_instance_tokenise_seconds_count", {"where": "loop"}) == 1
    for spent in ("engine", "scheduler"):  # with the next heartbeats
        await until(lambda s=spent: instance.registry.get_sample_value(f"talaria_instance_{s}_seconds") > 0)


async def test_concurrent_calls_of_two_models_stay_apart(pair):
    api, _ = pair
    names = [f"call {n}" for n in range(12)]
    rids = [await api.call(n, model=("alpha", "beta")[i % 2], max_tokens=20) for i, n in enumerate(names)]
    for name, rid in zip(names, rids, strict=True):
        await api.end_of(rid)
        assert api.text(rid) == answer_to(name, 20)
    shared = [b for b in api.batches if len(b.frames) > 1]
    assert shared, "the calls of one step share a batch"
    await until(lambda: api.snapshots[-1].switches >= 2)
    total = sum(c.prompt_tokens - c.cached_tokens for c in api.completions)
    await until(lambda: api.snapshots[-1].prefilled_tokens == total)


async def test_a_returning_session_finds_its_prefix(pair):
    api, _ = pair
    first = await api.call("x" * 200, max_tokens=4)
    await api.end_of(first)
    second = await api.call("x" * 200 + " and more", max_tokens=4)
    frames = await api.end_of(second)
    assert frames[-1].usage.cached_tokens >= 192
    assert (frames[0].cache_source, api.completion(second).cache_source) == ("device", "device")


async def test_stop_strings_end_the_engine_call_too(pair):
    api, _ = pair
    text = answer_to("s", 400)
    stop = text[40:46]
    rid = await api.call("s", max_tokens=400, stop=[stop])
    frames = await api.end_of(rid)
    assert api.text(rid) == text[: text.index(stop)]
    assert frames[-1].finish_reason == "stop"
    await until(lambda: sum(m.running + m.queued for m in api.snapshots[-1].models) == 0)


async def test_a_cancel_frees_the_slot(pair):
    api, _ = pair
    rid = await api.call(max_tokens=100_000)
    await api.first_token(rid)
    await until(lambda: any(rid in (b.alive or []) for b in api.batches))
    await api.cancel(rid)
    frames = await api.end_of(rid)
    assert frames[-1].finish_reason == "abort"
    have = len(api.batches)
    other = await api.call("next", max_tokens=5)
    await api.end_of(other)
    assert rid not in {f.rid for b in api.batches[have:] for f in b.frames}
    assert not api.completion(rid).ok


async def test_what_is_refused(pair):
    api, _ = pair
    late = await api.send(api.place(deadline_s=-10), b"{}")
    assert (late.accepted, late.error.code) == (False, "deadline_exceeded")
    head = api.place(rev=5)
    assert (await api.send(head, b"{}")).accepted  # an unusable body is found after acceptance
    frames = await api.end_of(head.placement.fence.rid)
    assert frames[0].error.code == "invalid_request"
    assert not (await api.send(head, b"{}")).accepted  # a repeat
    assert not (await api.send(api.place(rev=4), b"{}")).accepted  # fenced
    bare = await api.bus.request(subjects.forward(IID), b"{}", headers={FORWARD_HEADER: "{}"}, timeout_s=5)
    assert decode(bare.data, ForwardReply).error.code == "invalid_request"
    await api.bus.publish(subjects.cancel(IID), b"no json")
    assert (await api.control("health")).ok
    answer = await api.bus.request(subjects.control(IID, "drain"), b"[]", timeout_s=5)
    assert b"invalid_request" in answer.data


async def test_drain_and_resume(pair):
    api, _ = pair
    rid = await api.call(max_tokens=60)
    assert (await api.control("drain")).status == "draining"
    reply = await api.send(api.place(), b"{}")
    assert (reply.accepted, reply.retryable) == (False, True)
    await api.end_of(rid)
    assert api.completion(rid).ok
    assert (await api.control("resume")).status == "ready"
    await api.end_of(await api.call(max_tokens=3))


async def test_presence(connect, tmp_path):
    async with running(connect, tmp_path) as (api, instance):
        bucket = await api.bus.kv(subjects.KV_INSTANCES)
        record = await written(bucket)
        assert (record.epoch, record.models, record.pid) == (
            instance.service.core.epoch,
            ("alpha", "beta"),
            os.getpid(),
        )
    assert await bucket.get(IID) is None


async def test_a_second_process_of_the_same_id_does_not_start(connect, pair, tmp_path, monkeypatch):
    monkeypatch.setattr("talaria_instance.claim.ASK_S", 20.0)
    api, instance = pair
    twin = Running(await connect(), write_config(tmp_path))
    with pytest.raises(TwinError, match=instance.service.core.epoch):
        await twin.stop()
    await api.end_of(await api.call(max_tokens=3))


async def written(bucket):
    """Our entry in the presence bucket, once it is there."""
    async with asyncio.timeout(20):
        while (entry := await bucket.get(IID)) is None:
            await asyncio.sleep(0.02)
    return decode(entry.value, Presence)


async def comes(bucket, record):
    """Wait until `record` stands in the bucket."""
    watch = await bucket.watch()
    async with asyncio.timeout(10):
        async for key, entry in watch:
            if key == IID and entry is not None and decode(entry.value, Presence) == record:
                break
    await watch.stop()


async def test_presence_that_is_overwritten(connect, tmp_path):
    api = await Api(await connect()).listen()
    instance = Running(await connect(), write_config(tmp_path))
    await api.ready()
    bucket = await api.bus.kv(subjects.KV_INSTANCES)
    mine = await written(bucket)
    await bucket.put(IID, encode(msgspec.structs.replace(mine, epoch="dead", started_ms=mine.started_ms - 1)))
    await comes(bucket, mine)
    await bucket.delete(IID)  # an earlier life took its entry away, late
    await comes(bucket, mine)
    later = msgspec.structs.replace(mine, epoch="next", started_ms=mine.started_ms + 1)
    await bucket.put(IID, encode(later))
    with pytest.raises(TwinError, match="started again"):
        await instance.wait()
    assert decode((await bucket.get(IID)).value, Presence) == later


async def test_calls_of_an_api_that_is_gone_end(connect, tmp_path, monkeypatch):
    monkeypatch.setattr("talaria_instance.service.ORPHANS_EVERY_S", 0.05)
    async with running(connect, tmp_path) as (api, instance):
        gone = await Api(await connect(), "api-1").listen()
        theirs, ours = await gone.call(max_tokens=100_000), await api.call(max_tokens=100_000)
        await gone.first_token(theirs)
        await gone.bus.close()
        await until(lambda: [c for c in api.completions if c.rid == theirs and not c.ok], what="the orphan's end")
        assert {key.rid for key in instance.service.core.calls} == {ours}
        await api.cancel(ours)
        await api.end_of(ours)


async def test_an_engine_killed_mid_stream(pair):
    api, instance = pair
    pid, epoch = instance.engine_pid, instance.service.core.epoch
    streaming = await api.call(max_tokens=100_000)
    await api.first_token(streaming)
    waiting = await api.call("w", model="beta", max_tokens=5)  # alpha's slot lasts for seconds yet
    os.kill(pid, signal.SIGKILL)
    lost, moved = await api.end_of(streaming), await api.end_of(waiting)
    assert (lost[-1].error.code, lost[-1].retryable) == ("instance_lost", False)
    assert (moved[-1].error.code, moved[-1].retryable, len(moved)) == ("instance_lost", True, 1)
    await api.ready()
    shot = api.snapshots[-1]
    assert (shot.epoch, shot.engine_restarts) == (epoch, 1)
    assert any(s.status == "failed" and "SIGKILL" in s.reason for s in api.snapshots)
    assert all(m.kv_epoch > 0 for m in shot.models)
    assert instance.engine_pid != pid
    assert {e.data["status"] for e in api.events if e.kind == "health"} >= {"failed", "starting", "ready"}
    rid = await api.call("again", rid=waiting, attempt=1, model="beta", max_tokens=5)
    await until(lambda: [f for f in api.frames[rid] if f.attempt == 1 and f.kind == "final"])


async def test_a_stopped_engine_is_found_out(connect, tmp_path):
    async with running(connect, tmp_path, hang_s=5.0) as (api, instance):
        rid = await api.call(max_tokens=100_000)
        await api.first_token(rid)
        pid = instance.engine_pid
        os.kill(pid, signal.SIGSTOP)
        frames = await api.end_of(rid)
        assert frames[-1].error.code == "instance_lost"
        assert "silent" in frames[-1].error.message
        await until(lambda: not alive(pid), what="the end of the stopped engine")
        await api.ready()
        await api.end_of(await api.call(max_tokens=3))


async def test_stopping_lets_calls_finish(connect, tmp_path):
    ours, theirs = await connect(), await connect()
    api = await Api(theirs).listen()
    instance = Running(ours, write_config(tmp_path))
    await api.ready()
    pid = instance.engine_pid
    rid = await api.call(max_tokens=100)
    await api.first_token(rid)
    await instance.stop()
    assert (await api.end_of(rid))[-1].finish_reason == "length"
    assert api.snapshots[-1].status == "draining"
    assert not alive(pid)
    with pytest.raises(NoRespondersError):
        await api.send(api.place(), b"{}")


async def test_stopping_has_an_end(connect, tmp_path):
    ours, theirs = await connect(), await connect()
    api = await Api(theirs).listen()
    instance = Running(ours, write_config(tmp_path, shutdown_s=0.3))
    await api.ready()
    rid = await api.call(max_tokens=100_000)
    await api.first_token(rid)
    await instance.stop()
    assert (await api.end_of(rid))[-1].error.code == "instance_lost"


async def test_a_big_body_is_tokenised_beside_the_loop(pair):
    api, instance = pair
    content = "x" * 200_000
    rid = await api.call(content, max_tokens=3)
    frames = await api.end_of(rid)
    assert frames[-1].usage.prompt_tokens == 200_000 + len("user: \nassistant: ")
    cancelled = await api.call(content + "y", max_tokens=3)
    await api.cancel(cancelled)
    await api.end_of(cancelled)
    assert msgspec.json.decode(encode(api.completion(cancelled)))["iid"] == IID
    await asyncio.sleep(0)
    assert instance.service.core.calls == {}
