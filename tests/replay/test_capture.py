"""Capture as a pure machine: what becomes of events and completions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from talaria_common.wire import Completion, Event, Fence, ForwardHead, Placement
from talaria_replay.capture import MAX_OPEN, Capture
from talaria_replay.trace import read, write


def routed(rid: str, waited_ms: float = 0.0) -> Event:
    return Event(kind="route", source="router-0", at_ms=0, data={"rid": rid, "waited_ms": waited_ms})


def completion(rid: str, **changes: Any) -> Completion:
    base: dict[str, Any] = {
        "iid": "i", "epoch": "e", "rid": rid, "attempt": 0, "router": "r", "seq": 1, "partition": 0, "tenant": "t",
        "session": "0123456789abcdef0123", "model": "m", "ok": True, "prompt_tokens": 100, "completion_tokens": 10, "at_ms": 0,
    }  # fmt: skip
    return Completion(**(base | changes))


def test_gaps_and_reuse(tmp_path: Path) -> None:
    it = Capture()
    calls = []
    it.routed(10.0, routed("a"))
    calls.append(it.completed(12.0, completion("a")))
    it.routed(12.5, routed("b", waited_ms=100.0))
    it.routed(13.0, routed("b"))  # a second attempt
    calls.append(it.completed(14.0, completion("b", prompt_tokens=150)))
    it.routed(15.0, routed("c"))
    calls.append(it.completed(16.0, completion("c", prompt_tokens=80, cached_tokens=48)))
    assert [c.call for c in calls if c] == [0, 1, 2]
    assert [c.gap_s for c in calls if c] == [None, 0.4, 1.0]
    assert [c.reusable_tokens for c in calls if c] == [0, 110, 48]
    write(tmp_path / "t.jsonl", [c for c in calls if c])
    assert read(tmp_path / "t.jsonl") == calls


def test_failures_are_left_out_and_counted() -> None:
    it = Capture()
    assert it.completed(1.0, completion("a", ok=False)) is None
    late = it.completed(2.0, completion("b"))
    assert late is not None
    assert late.gap_source == "none"
    assert (it.failed, it.unseen) == (1, 1)


def test_a_call_that_is_placed_again_has_waited_since_it_asked_first() -> None:
    it = Capture()
    it.routed(10.0, routed("a"))
    it.completed(12.0, completion("a"))
    it.routed(12.5, routed("b"))
    assert it.completed(20.0, completion("b", ok=False)) is None
    it.routed(20.1, routed("b"))
    again = it.completed(30.0, completion("b", attempt=1))
    assert again is not None
    assert (again.gap_s, it.failed, it.unseen) == (0.5, 0, 0)
    it.routed(31.0, routed("c"))
    it.completed(32.0, completion("c", ok=False))
    it.completed(33.0, completion("c", ok=False, attempt=1))
    assert it.failed == 1, "calls, not attempts"


def test_a_failed_call_s_time_is_no_gap() -> None:
    """Tools for 0.5 s, a call that fails after 7.5 s, and 2 s until the client tries anew."""
    it = Capture()
    it.routed(10.0, routed("a"))
    it.completed(12.0, completion("a"))
    it.routed(12.5, routed("b"))
    it.completed(15.0, completion("b", ok=False))
    it.completed(20.0, completion("b", ok=False, attempt=1))
    it.routed(22.0, routed("c"))
    again = it.completed(23.0, completion("c"))
    it.routed(24.0, routed("d"))
    after = it.completed(25.0, completion("d"))
    assert again is not None
    assert after is not None
    assert (again.gap_s, after.gap_s) == (2.5, 1.0)


def test_a_forward_seen_before_its_route_event_loses_no_wait() -> None:
    it = Capture()
    it.routed(10.0, routed("a"))
    it.completed(12.0, completion("a"))
    head = ForwardHead(
        placement=Placement(
            iid="i",
            fence=Fence(partition=0, owner_rev=1, rid="b", attempt=0),
            router="r",
            seq=2,
            accept_by_ms=0,
            deadline_ms=0,
        ),
        endpoint="chat",
        api="api",
        api_epoch="e",
        tenant="t",
        session="s",
        model="m",
    )
    it.forwarded(15.0, head, b'{"messages": [{"role": "user", "content": "x"}]}')
    it.routed(15.1, routed("b", waited_ms=2100.0))
    it.routed(16.0, routed("b", waited_ms=9000.0))
    call = it.completed(17.0, completion("b"))
    assert call is not None
    assert (call.gap_s, len(call.messages or ())) == (1.0, 1)


def test_one_session_on_two_models_is_two_sessions() -> None:
    it = Capture()
    names = {
        it.completed(1.0, completion(rid, **c)).session
        for rid, c in (("a", {}), ("b", {"model": "n"}), ("c", {"tenant": "u"}))
    }  # type: ignore[union-attr]
    assert len(names) == 3


def test_lost_completions_do_not_fill_the_memory() -> None:
    it = Capture()
    for n in range(MAX_OPEN + 10):
        it.routed(0.0, routed(str(n)))
    assert len(it._open) == MAX_OPEN
