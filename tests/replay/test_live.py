"""Replay against a plain server: the loop, the bodies, refusals, results on disk."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from talaria_replay.generate import SHAPES, generate
from talaria_replay.live import results
from talaria_replay.live.prompts import Conversation, Rate, digest
from talaria_replay.live.run import Plan, Replay, ReplayError, prepare
from talaria_replay.measure import CallRecord, same_bodies
from talaria_replay.trace import Call, sessions
from tests.replay.plain_server import FRAME, count, plain_server
from tests.support.waiting import until


def trace_of(n: int = 3, depth: int = 4, gap_s: float = 0.01) -> list[Call]:
    out = []
    for s in range(n):
        context = 0
        for k in range(depth):
            prompt = context + 200 + 10 * s
            out.append(
                Call(
                    session=f"s{s}",
                    call=k,
                    model="m",
                    prompt_tokens=prompt,
                    completion_tokens=5,
                    reusable_tokens=context,
                    gap_s=gap_s if k else None,
                    gap_source="recorded" if k else "none",
                )
            )
            context = prompt + 5
    return out


def names(folder: Path) -> list[str]:
    return [p.name for p in folder.iterdir()]


async def test_sessions_are_replayed_as_recorded() -> None:
    async with plain_server() as server:
        calls = prepare(trace_of(), Plan(server.url))
        done = await Replay(Plan(server.url), calls).run()
    assert done.complete
    assert done.summary["calls"] == 12
    assert done.summary["failed_calls"] == 0
    assert done.summary["sct_s"]["n"] == 3
    for r in done.calls:
        assert r.prompt_tokens == pytest.approx(r.wanted_prompt_tokens, abs=2)
        assert r.completion_tokens == 5
        assert r.intended_s <= r.sent_s <= r.first_s <= r.done_s
    for name in ("s0", "s1", "s2"):
        mine = sorted((r for r in done.calls if r.session == name), key=lambda r: r.call)
        for a, b in pairwise(mine):
            assert b.intended_s == pytest.approx(a.done_s + 0.01, abs=1e-5)
    measured = server.bodies[2:]
    assert {b["temperature"] for b in measured} == {0}
    assert {b["ignore_eos"] for b in measured} == {True}
    by_session = [
        [b["messages"] for b, h in zip(server.bodies, server.headers, strict=True) if h["x-talaria-session-id"] == s]
        for s in ("s0", "s1", "s2")
    ]
    for bodies in by_session:
        assert len(bodies) == 4
        for a, b in pairwise(bodies):
            assert b[: len(a)] == a
            assert b[len(a)] == {"role": "assistant", "content": "xxxxx"}


async def test_same_bodies_in_every_run_but_for_another_salt() -> None:
    async with plain_server() as server:
        runs = [
            await Replay(plan, prepare(trace_of(), plan)).run()
            for plan in (Plan(server.url), Plan(server.url), Plan(server.url, salt="b"))
        ]
    assert same_bodies(runs[0].calls, runs[1].calls) == 1.0
    assert same_bodies(runs[0].calls, runs[2].calls) == 0.0


async def test_same_bodies_whatever_the_order_of_the_answers() -> None:
    """Two sessions of one model: in each run another one is answered in full before the other."""

    async def run(first: str) -> results.Results:
        over = asyncio.Event()

        async def hold(session: str) -> None:
            if session in {"s0", "s1"} and session != first:
                await over.wait()

        def on_call(r: CallRecord) -> None:
            if (r.session, r.call) == (first, 3):
                over.set()

        async with plain_server(hold=hold) as server:
            return await Replay(Plan(server.url), trace_of(n=2), on_call=on_call).run()

    assert same_bodies((await run("s0")).calls, (await run("s1")).calls) == 1.0


async def test_a_body_is_made_before_its_call_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    made: dict[str, float] = {}

    def seen(messages: list[dict[str, Any]]) -> str:
        name = digest(messages)
        made[name] = time.monotonic()
        return name

    monkeypatch.setattr("talaria_replay.live.run.digest", seen)
    async with plain_server() as server:
        replay = Replay(Plan(server.url), trace_of(depth=2, gap_s=0.5))
        done = await replay.run()
    assert len(made) == len(done.calls) == 6
    for r in done.calls:
        assert made[r.body] <= replay._start + r.intended_s
    assert {r.intended_s for r in done.calls if not r.call} == {0.0}


async def test_calls_go_on_while_a_result_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    all_made = threading.Event()
    write, calls = results.write, 0

    def slow(path: Path, version: results.Results) -> None:
        assert all_made.wait(30)
        write(path, version)

    def on_call(_: CallRecord) -> None:
        nonlocal calls
        calls += 1
        if calls == 12:
            all_made.set()

    monkeypatch.setattr(results, "write", slow)
    async with plain_server() as server:
        done = await Replay(Plan(server.url), trace_of(), out=tmp_path / "r.json", on_call=on_call).run()
    assert results.read(tmp_path / "r.json") == done


async def test_a_session_s_calls_share_a_connection() -> None:
    async with plain_server() as server:
        await Replay(Plan(server.url), trace_of(n=1)).run()
        assert len(server.bodies) == 2 + 4
        assert server.connections == 1


async def test_a_connection_that_the_server_has_just_closed_loses_no_call() -> None:
    lost = ["s0"]

    async def hold(session: str) -> None:
        if session in lost:
            lost.remove(session)
            raise ConnectionResetError  # the server closes it, without a byte

    async with plain_server(hold=hold) as server:
        done = await Replay(Plan(server.url), trace_of(n=1)).run()
        assert server.connections == 2
    assert done.complete
    assert [r.retries for r in done.calls] == [1, 0, 0, 0]


async def test_a_new_connection_that_the_server_closes_fails_the_call() -> None:
    async def hold(_: str) -> None:
        raise ConnectionResetError

    async with plain_server(hold=hold) as server:
        with pytest.raises(ReplayError, match="Server disconnected without sending a response"):
            await Replay(Plan(server.url), trace_of(n=1)).run()
        assert server.connections == 1


async def test_sessions_start_apart() -> None:
    async with plain_server() as server:
        done = await Replay(Plan(server.url, stagger_s=0.1), trace_of(depth=1)).run()
    starts = {r.session: r.intended_s for r in done.calls}
    assert starts == pytest.approx({"s0": 0.0, "s1": 0.1, "s2": 0.2}, abs=1e-5)


async def test_the_next_of_concurrent_sessions_waits_for_an_end_only() -> None:
    """The second lane would start after 100 s: the first takes all sessions before, each when the last has ended."""
    async with plain_server() as server:
        done = await Replay(Plan(server.url, stagger_s=100.0, concurrent=2), trace_of(n=4, depth=2)).run()
    assert done.complete
    for a, b in pairwise(done.calls):
        assert a.done_s <= b.intended_s
    assert done.wall_s < 100.0


async def test_what_the_warm_up_waits_for_is_said_once() -> None:
    def refuse(n: int, _body: dict[str, Any]) -> tuple[int, str, str] | None:
        return (503, "retry-after: 0.05\r\n", '{"error": {"message": "still loading"}}') if n < 3 else None

    said: list[str] = []
    async with plain_server(refuse=refuse) as server:
        await Replay(Plan(server.url), trace_of(n=1, depth=1), on_wait=said.append).run()
    assert said == ["warm-up of 'm' waits, 600 s at most: HTTP 503: still loading"]


async def test_plain_sends_nothing_of_ours_and_lives_without_usage() -> None:
    async with plain_server() as server:
        server.usage = False
        plan = Plan(server.url + "/v1", plain=True, model_map={"*": "other"}, scale=0.5, max_calls=2, max_sessions=1)
        done = await Replay(plan, prepare(trace_of(), plan)).run()
    assert done.summary["calls"] == 2
    assert done.summary["failed_calls"] == 0
    for body, headers in zip(server.bodies, server.headers, strict=True):
        assert set(body) == {"model", "messages", "max_tokens", "temperature", "stream", "stream_options"}
        assert body["model"] == "other"
        assert not [h for h in headers if h.startswith("x-talaria")]
    assert [r.completion_tokens for r in done.calls] == [2, 2]


async def test_refusals_are_waited_out_and_count_in_the_schedule_aware_ttft_only() -> None:
    def refuse(n: int, _body: dict[str, Any]) -> tuple[int, str, str] | None:
        return (429, "retry-after: 0.2\r\n", '{"error": {"message": "full"}}') if n == 2 else None

    async with plain_server(refuse=refuse) as server:
        plan = Plan(server.url, max_sessions=1, max_calls=1)
        done = await Replay(plan, prepare(trace_of(), plan)).run()
    (r,) = done.calls
    assert r.retries == 1
    assert r.ttft_s >= 0.2
    assert r.local_ttft_s < r.ttft_s - 0.19


async def test_a_failed_call_ends_its_session_and_no_other() -> None:
    def refuse(_n: int, body: dict[str, Any]) -> tuple[int, str, str] | None:
        broken = body["model"] == "bad" and len(body["messages"]) == 3
        return (400, "", '{"error": {"message": "broken on purpose"}}') if broken else None

    calls = [
        c if c.session != "s1" else Call(**{f: getattr(c, f) for f in c.__struct_fields__} | {"model": "bad"})
        for c in trace_of()
    ]
    async with plain_server(refuse=refuse) as server:
        done = await Replay(Plan(server.url), calls).run()
    assert done.summary["failed_calls"] == 1
    assert done.summary["failed_sessions"] == 1
    assert done.summary["calls"] == 4 + 2 + 4
    assert [r.error for r in done.calls if r.error] == ["HTTP 400: broken on purpose"]


async def test_a_run_with_failed_sessions_is_not_complete_and_is_resumed(tmp_path: Path) -> None:
    ill = True

    def refuse(n: int, body: dict[str, Any]) -> tuple[int, str, str] | None:
        return (500, "", "") if ill and n >= 2 + 4 and len(body["messages"]) > 1 else None  # s0 is answered

    out = tmp_path / "r.json"
    async with plain_server(refuse=refuse) as server:
        plan = Plan(server.url, concurrent=1)
        done = await Replay(plan, trace_of(), out=out).run()
        assert not done.complete
        assert (done.summary["failed_sessions"], done.summary["calls_not_made"]) == (2, 4)
        assert results.read(out) == done
        ill = False
        resumed = await Replay(plan, trace_of(), out=out, resume=True).run()
    assert resumed.complete
    assert (resumed.runs, len(resumed.calls), resumed.summary["calls_not_made"]) == (2, 12, 0)
    again = [r for r in resumed.calls if r.session != "s0"]
    assert min(r.intended_s for r in again) >= done.wall_s >= max(r.done_s for r in done.calls)
    assert resumed.wall_s >= resumed.summary["wall_s"] > done.wall_s
    assert same_bodies(done.calls, again) == 0.0, "no cache of the first run helps the second"
    ids = {h["x-talaria-session-id"] for h in server.headers}
    assert ids == {f"{s}{run}" for s in ("s0", "s1", "s2", "warm-up-m") for run in ("", "/run-2")} - {"s0/run-2"}
    assert len(resumed.notes) == 2


async def test_a_resumed_run_says_what_is_true_of_it(tmp_path: Path) -> None:
    """Three runs: no session of the first is kept, one of the second is; each note is said once."""
    answered = 0

    def refuse(n: int, body: dict[str, Any]) -> tuple[int, str, str] | None:
        return (500, "", "") if n >= answered and len(body["messages"]) > 1 else None

    out = tmp_path / "r.json"
    async with plain_server(refuse=refuse) as server:
        plan = Plan(server.url, concurrent=1)
        first = await Replay(plan, trace_of(), out=out).run()
        answered = len(server.bodies) + 2 + 4
        second = await Replay(plan, trace_of(), out=out, resume=True).run()
        notes = list(second.notes)
        answered = 1 << 20
        third = await Replay(plan, trace_of(), out=out, resume=True).run()
    assert not first.notes
    assert [n.split(",")[0] for n in notes] == ["sessions run again had other texts and ids"]
    assert min(r.intended_s for r in second.calls) == 0.0
    assert second.summary["wall_s"] == pytest.approx(max(r.done_s for r in second.calls), abs=1e-4)
    assert third.notes == [*notes, "sessions of several runs: not all of them met the same load"]
    assert third.runs == 3


async def test_a_disk_that_stays_full_is_an_error_in_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_path: Path, _version: results.Results) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(results, "write", full)
    async with plain_server() as server:
        replay = Replay(Plan(server.url), trace_of(), out=tmp_path / "r.json")
        with pytest.raises(OSError, match="No space left"):
            await replay.run()
    assert not names(tmp_path)
    assert replay.results.complete, "what was measured is there"


async def test_a_version_that_cannot_be_written_is_made_good_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, versions = results.write, 0

    def full_once(path: Path, version: results.Results) -> None:
        nonlocal versions
        versions += 1
        if versions == 1:
            raise OSError(28, "No space left on device")
        write(path, version)

    async def hold(session: str) -> None:
        if session == "s0":
            await until(lambda: replay._saver and replay._saver._last and replay._saver._last.done())

    monkeypatch.setattr(results, "write", full_once)
    said: list[str] = []
    async with plain_server(hold=hold) as server:
        replay = Replay(Plan(server.url), trace_of(n=1), out=tmp_path / "r.json", on_wait=said.append)
        done = await replay.run()
    assert done.complete
    assert results.read(tmp_path / "r.json") == done
    assert said == [
        "the result file is not written, and tried again when a session ends: [Errno 28] No space left on device"
    ]


async def test_a_result_that_cannot_be_written_is_said_before_the_warm_up(tmp_path: Path) -> None:
    async with plain_server() as server:
        with pytest.raises(OSError, match="is a folder"):
            await Replay(Plan(server.url), trace_of(), out=tmp_path).run()
        assert not server.bodies


async def test_a_server_that_is_not_there_is_said_before_the_window() -> None:
    async with plain_server() as server:
        url = server.url
    with pytest.raises(ReplayError, match="warm-up call for 'm' failed"):
        await Replay(Plan(url), trace_of()).run()


async def test_a_stopped_run_is_incomplete_and_resumes_by_session(tmp_path: Path) -> None:
    out = tmp_path / "r.json"
    stopped = asyncio.Event()
    # s0 ends soon, the others wait in their gaps for ever: stopping hits them in the middle.
    calls = [
        c
        if c.session == "s0" or not c.call
        else Call(**{f: getattr(c, f) for f in c.__struct_fields__} | {"gap_s": 9.0})
        for c in trace_of()
    ]
    async with plain_server() as server:
        first = Replay(
            Plan(server.url),
            calls,
            out=out,
            on_call=lambda r: stopped.set() if (r.session, r.call) == ("s0", 3) else None,
        )
        task = asyncio.create_task(first.run())
        await stopped.wait()
        await until(lambda: out.exists() and results.read(out).calls)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        half = results.read(out)
        assert not half.complete
        assert {r.session for r in half.calls} == {"s0"}
        assert names(tmp_path) == [out.name]
        assert out.stat().st_mode & 0o777 == 0o644

        with pytest.raises(results.ResultError, match="another gap_cap_s"):
            Replay(Plan(server.url, gap_cap_s=0.01), calls, out=out, resume=True)
        plan = json.loads(out.read_text())["plan"]
        out.write_text(out.read_text().replace('"gap_cap_s": 10.0', '"gap_cap_s": 0.01').replace(plan["trace"], "t"))
        with pytest.raises(results.ResultError, match="another trace"):
            Replay(Plan(server.url, gap_cap_s=0.01), calls, out=out, resume=True)
        quick = Plan(server.url, gap_cap_s=0.01)
        capped = prepare(calls, quick)
        out.write_text(out.read_text().replace('"trace": "t"', f'"trace": "{quick.record(capped)["trace"]}"'))
        second = Replay(quick, capped, out=out, resume=True)
        assert second.calls_to_make == 8
        done = await second.run()
    assert done.complete
    assert done.runs == 2
    assert len(done.calls) == 12
    assert results.read(out) == done
    with pytest.raises(results.ResultError, match="complete"):
        Replay(quick, capped, out=out, resume=True)


def test_what_is_no_result_is_refused(tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text('{"kind": "talaria-replay-2", "plan"')
    with pytest.raises(results.ResultError, match=r"r\.json"):
        results.read(tmp_path / "r.json")
    (tmp_path / "r.json").write_text('{"kind": "talaria-replay-1", "plan": {}}')
    with pytest.raises(results.ResultError, match=r"kind: expected 'talaria-replay-2', got 'talaria-replay-1'"):
        results.read(tmp_path / "r.json")


@given(
    st.sampled_from(sorted(SHAPES)),
    st.integers(0, 1000),
    st.sampled_from([1.0, 2.5, 4.7]),
    st.sampled_from([None, 3000]),
)
@settings(max_examples=25, deadline=None)
def test_made_prompts_have_the_trace_s_lengths_and_prefixes(
    shape: str, seed: int, per_token: float, limit: int | None
) -> None:
    """Whatever the server's tokenizer: lengths follow the trace, and what is to be reused is a prefix."""

    def tokens(messages: list[dict[str, Any]]) -> int:
        return 3 + sum(FRAME + round(len(m["content"]) / per_token) for m in messages)

    rate = Rate()
    rate.probed((400, 3 + FRAME + round(400 / per_token)), (2000, 3 + FRAME + round(2000 / per_token)))
    calls = list(generate(shape, sessions=1, models=["m"], seed=seed, max_calls=12, max_context_tokens=limit))
    talk = Conversation(rate)
    before: list[dict[str, Any]] = []
    for call in calls:
        messages = talk.next(call)
        assert all(m["content"] for m in messages)
        assert [m["role"] for m in messages] == [("user", "assistant")[i % 2] for i in range(len(messages))]
        real = tokens(messages)
        assert real == pytest.approx(call.prompt_tokens, rel=0.06, abs=4 * FRAME + 4)
        shared = 0
        for a, b in zip(before, messages, strict=False):
            if a["role"] == b["role"] and b["content"].startswith(a["content"]):
                shared += FRAME + round(len(a["content"]) / per_token)
            else:
                same = next(
                    (i for i, (x, y) in enumerate(zip(a["content"], b["content"], strict=False)) if x != y), 10**9
                )
                shared += round(min(same, len(a["content"]), len(b["content"])) / per_token)
                break
        assert shared >= 0.9 * call.reusable_tokens - 6 * FRAME
        answer = "y" * max(1, round(call.completion_tokens * per_token))
        before = [*messages, {"role": "assistant", "content": answer}]
        talk.answered(answer, real, call.completion_tokens)


async def test_messages_of_tool_calls_have_no_content() -> None:
    recorded = [
        {"role": "user", "content": "look"},
        {"role": "assistant", "tool_calls": [{"id": "1", "type": "function"}]},
        {"role": "tool", "tool_call_id": "1", "content": None},
    ]
    call = Call(session="s", call=0, model="m", prompt_tokens=9, completion_tokens=1, messages=recorded)
    async with plain_server() as server:
        done = await Replay(Plan(server.url), [call]).run()
    assert done.complete
    assert server.bodies[-1]["messages"] == recorded
    assert digest(recorded) != digest([recorded[0], {"role": "assistant"}, recorded[2]])


def test_recorded_texts_are_sent_as_they_are() -> None:
    talk = Conversation(Rate())
    recorded = [{"role": "user", "content": "hello"}]
    call = Call(session="s", call=0, model="m", prompt_tokens=9, completion_tokens=1, messages=recorded)
    assert talk.next(call) is recorded


def test_what_changes_made_texts_is_refused_for_recorded_ones() -> None:
    """Roles that a server may not know, such as `tool`, are left out with --made-texts, too."""
    messages = [{"role": "tool", "content": "hello"}]
    calls = [Call(session="s", call=0, model="m", prompt_tokens=90, completion_tokens=1, messages=messages)]
    for plan in (Plan("", scale=0.5), Plan("", salt="b")):
        with pytest.raises(ReplayError, match="1 of 1 calls have recorded ones"):
            prepare(calls, plan)
        (made,) = prepare(calls, replace(plan, made_texts=True))
        assert made.messages is None
        assert [m["role"] for m in Conversation(Rate(), plan.salt).next(made)] == ["user"]
    assert prepare(calls, Plan(""))[0].messages == messages


def test_preparing_keeps_a_trace_valid() -> None:
    calls = list(generate("paper", sessions=5, models=["a", "b"], seed=3))
    made = prepare(calls, Plan("", {"a": "x"}, scale=0.01, max_calls=7, max_sessions=4, gap_cap_s=0.2))
    assert {c.model for c in made} == {"x", "b"}
    assert len(sessions(made)) == 4
    assert max(c.call for c in made) <= 6
    assert max(c.gap_s or 0 for c in made) <= 0.2
    last: dict[str, Call] = {}
    for c in made:
        before = last.get(c.session)
        assert c.reusable_tokens <= (before.prompt_tokens + before.completion_tokens if before else 0)
        last[c.session] = c
    assert count([{"content": ""}]) == 3 + FRAME
