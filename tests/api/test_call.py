"""The core of one call, event by event: places, deaths before and after the first token, and one end for each."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from talaria_api.call import Call
from talaria_api.errors import ClientGoneError, SlowClientError
from talaria_api.messages import (
    Absent,
    Answered,
    Arrived,
    Ask,
    Begin,
    ClientGone,
    Effect,
    Emit,
    Event,
    Facts,
    Finish,
    Forward,
    ForwardFailed,
    Gone,
    Limits,
    Replaced,
    Routed,
    RouteFailed,
    SendCancel,
    SlowClient,
    Tick,
)
from talaria_api.peers import Peers
from talaria_common.errors import (
    BusError,
    BusTimeoutError,
    ContextLengthError,
    DeadlineError,
    EngineError,
    InstanceLostError,
    ModelNotFoundError,
    NoRespondersError,
    OverloadedError,
    PayloadTooLargeError,
    TalariaError,
    UnavailableError,
)
from talaria_common.ids import partition_of
from talaria_common.wire import ForwardReply, Frame, RouteReply, Usage
from talaria_common.wire.error import ErrorInfo
from tests.api.doubles import place, refuse

T0 = 1_700_000_000.0
LIMITS = Limits(route_timeout_s=1.0, route_give_up_s=30.0, accept_timeout_s=2.0, alive_grace_s=1.0, max_attempts=3)
RID = "0" * 32


class Story:
    """A call, its clock and everything it has asked for."""

    def __init__(self, *, deadline_s: float = 60.0, limits: Limits = LIMITS) -> None:
        self.now = T0
        self.peers = Peers(silence_s=2.0, outage_s=10.0)
        facts = Facts(
            rid=RID,
            endpoint="chat",
            api="api-0-e",
            api_epoch="e",
            tenant="t",
            session="s",
            session_source="header",
            model="m",
            prompt_bytes=10,
            max_tokens=5,
            stream=True,
            deadline=T0 + deadline_s,
        )
        self.call = Call(facts, limits, self.peers)
        self.effects: list[Effect] = []
        self.last: list[Effect] = []
        self.tell(Begin())

    def tell(self, event: Event) -> list[Effect]:
        self.last = self.call.handle(self.now, event)
        self.effects += self.last
        return self.last

    def later(self, seconds: float) -> list[Effect]:
        self.now += seconds
        return self.tell(Tick())

    # --- what others do

    def placed(self, iid: str = "i-0") -> list[Effect]:
        return self.tell(Routed(self.call.attempt, place(self.asks[-1].request, iid)))

    def accepted(self, iid: str = "i-0", epoch: str = "e1") -> list[Effect]:
        self.placed(iid)
        self.peers.hear(self.now, iid, epoch)
        return self.tell(Answered(self.call.attempt, ForwardReply(accepted=True, epoch=epoch)))

    def frame(self, seq: int, kind: Any = "delta", *, iid: str = "i-0", epoch: str = "e1", **more: Any) -> list[Effect]:
        attempt = more.pop("attempt", self.call.attempt)
        if kind == "final":
            more = {"finish_reason": "stop", "usage": Usage(prompt_tokens=1, completion_tokens=1)} | more
        self.peers.hear(self.now, iid, epoch)
        return self.tell(Arrived(iid, epoch, Frame(rid=RID, attempt=attempt, seq=seq, kind=kind, **more)))

    # --- what it came to

    @property
    def asks(self) -> list[Ask]:
        return [e for e in self.effects if isinstance(e, Ask)]

    @property
    def emitted(self) -> list[int]:
        return [e.frame.seq for e in self.effects if isinstance(e, Emit)]

    @property
    def cancels(self) -> list[tuple[str, int, str]]:
        return [(e.iid, e.cancel.attempt, e.cancel.reason) for e in self.effects if isinstance(e, SendCancel)]

    @property
    def ends(self) -> list[TalariaError | None]:
        return [e.error for e in self.effects if isinstance(e, Finish)]

    @property
    def replaced(self) -> list[tuple[str, str]]:
        return [tuple(e) for e in self.effects if isinstance(e, Replaced)]

    def failed(self) -> TalariaError:
        [error] = self.ends
        assert error is not None
        return error


# --- the good way


def test_whole_way() -> None:
    s = Story()
    [ask] = s.last
    assert isinstance(ask, Ask)
    assert ask.partition == partition_of("t", "s", "m")
    assert (ask.request.rid, ask.request.attempt, ask.request.exclude) == (RID, 0, ())
    assert ask.request.deadline_ms == round((T0 + 60) * 1000)
    assert ask.timeout_s == 1.0
    [forward] = s.placed()
    assert isinstance(forward, Forward)
    assert forward.head.placement.iid == "i-0"
    assert forward.timeout_s == 2.0
    assert s.tell(Answered(0, ForwardReply(accepted=True, epoch="e1"))) == []
    s.frame(0)
    s.frame(1)
    s.frame(2, "final")
    assert s.emitted == [0, 1, 2]
    assert s.ends == [None]
    assert s.cancels == []


def test_nothing_has_an_effect_after_the_end() -> None:
    s = Story()
    s.accepted()
    s.frame(0, "final")
    for event in (Tick(), ClientGone(), Absent("i-0", "e1"), Gone("i-0", "e1"), Begin()):
        assert s.tell(event) == []
    assert s.frame(1) == []
    assert s.later(1000) == []


def test_frames_may_overtake_the_acceptance() -> None:
    s = Story()
    s.placed()
    s.frame(0)
    assert s.tell(Answered(0, ForwardReply(accepted=True, epoch="e1"))) == []
    s.frame(1, "final")
    assert s.emitted == [0, 1]
    assert s.ends == [None]


def test_placement_says_whether_the_session_continues() -> None:
    s = Story()
    [forward] = s.tell(Routed(0, place(s.asks[0].request, "i-0", continuation=True)))
    assert isinstance(forward, Forward)
    assert forward.head.is_continuation


# --- asking


def test_asks_again_while_nobody_answers_with_the_same_attempt() -> None:
    s = Story()
    for _ in range(5):
        s.now += 1.0
        [again] = s.tell(RouteFailed(0, BusTimeoutError("silence")))
        assert isinstance(again, Ask)
        assert again.request == s.asks[0].request
    s.accepted()
    s.frame(0, "final")
    assert s.ends == [None]


def test_gives_up_when_no_router_answers_for_long() -> None:
    s = Story()
    while not s.ends:
        s.now += 1.0
        s.tell(RouteFailed(0, BusTimeoutError("silence")))
    error = s.failed()
    assert isinstance(error, UnavailableError)
    assert "no router answered" in error.message
    assert s.now - T0 == pytest.approx(30, abs=1)


@pytest.mark.parametrize("error", [NoRespondersError("nobody"), BusError("away")])
def test_pauses_between_asks_when_refused_at_once(error: BusError) -> None:
    s = Story()
    pauses = []
    for _ in range(6):
        assert s.tell(RouteFailed(0, error)) == []
        began = s.now
        while not s.later(0.01):
            pass
        pauses.append(round(s.now - began, 2))
        assert isinstance(s.last[0], Ask)
    assert pauses == sorted(pauses)
    assert pauses[0] <= 0.06
    assert pauses[-1] <= 0.51


def test_not_owner_is_asked_again_after_a_pause() -> None:
    s = Story()
    assert s.tell(Routed(0, refuse("not_owner", "unavailable"))) == []
    [again] = s.later(0.05)
    assert isinstance(again, Ask)
    assert again.request.attempt == 0


def test_not_owner_for_ever_ends_with_the_deadline() -> None:
    s = Story(deadline_s=5)
    while not s.ends:
        if isinstance(s.last[-1] if s.last else None, Ask):
            s.tell(Routed(0, refuse("not_owner", "unavailable")))
        s.later(0.05)
    assert isinstance(s.failed(), DeadlineError)
    assert s.now - T0 == pytest.approx(5, abs=0.1)


def test_deadline_too_short_for_any_answer_blames_nobody() -> None:
    s = Story(deadline_s=1e-9)
    s.later(0.01)
    assert isinstance(s.failed(), DeadlineError)


def test_deadline_while_nobody_answers_names_the_router() -> None:
    s = Story(deadline_s=3)
    s.later(3)
    error = s.failed()
    assert error.status == 503
    assert "router" in error.message


@pytest.mark.parametrize(
    ("reason", "code", "kind"),
    [
        ("overloaded", "overloaded", OverloadedError),
        ("no_instance", "unavailable", UnavailableError),
        ("unknown_model", "model_not_found", ModelNotFoundError),
        ("expired", "deadline_exceeded", DeadlineError),
        ("overloaded", "a_code_of_a_newer_version", OverloadedError),
        ("no_instance", "a_code_of_a_newer_version", UnavailableError),
    ],
)
def test_verdicts(reason: str, code: str, kind: type[TalariaError]) -> None:
    s = Story()
    s.tell(Routed(0, refuse(reason, code, retry_after_s=2.5)))
    assert type(s.failed()) is kind
    assert s.failed().retry_after_s == 2.5


def test_empty_answer_of_a_router_is_an_error() -> None:
    s = Story()
    s.tell(Routed(0, RouteReply()))
    assert s.failed().status == 500


def test_late_answer_of_an_earlier_attempt_is_ignored() -> None:
    s = Story()
    s.placed()
    s.tell(ForwardFailed(0, BusTimeoutError("silence")))
    assert s.call.attempt == 1
    assert s.tell(Routed(0, place(s.asks[0].request, "i-0"))) == []
    assert s.tell(RouteFailed(0, BusTimeoutError("x"))) == []
    assert s.tell(Answered(0, ForwardReply(accepted=True, epoch="e1"))) == []
    assert s.tell(ForwardFailed(0, BusTimeoutError("x"))) == []


# --- before the first token


def move_rejected(s: Story) -> None:
    s.placed()
    error = ErrorInfo("overloaded", "full", retry_after_s=3)
    s.tell(Answered(0, ForwardReply(accepted=False, retryable=True, error=error)))


def move_no_accept(s: Story) -> None:
    s.placed()
    s.tell(ForwardFailed(0, BusTimeoutError("silence")))


def move_nobody(s: Story) -> None:
    s.placed()
    s.tell(ForwardFailed(0, NoRespondersError("nobody")))


def move_engine_error(s: Story) -> None:
    s.accepted()
    s.frame(0, "error", error=ErrorInfo("engine_error", "crashed"), retryable=True)


def move_silent(s: Story) -> None:
    s.accepted()
    s.later(2.0)
    assert s.call.attempt == 0
    s.later(0.1)


def move_restarted(s: Story) -> None:
    s.accepted()
    s.peers.hear(s.now, "i-0", "e2")
    s.later(0.05)


def move_forgotten(s: Story) -> None:
    s.accepted()
    s.now += 1.5
    s.peers.hear(s.now, "i-0", "e1")
    s.tell(Absent("i-0", "e1"))


def move_gone(s: Story) -> None:
    s.accepted()
    s.now += 1.5
    s.tell(Gone("i-0", "e1"))


def move_first_frame_lost(s: Story) -> None:
    s.accepted()
    s.frame(1)


def move_accepted_by_an_earlier_life(s: Story) -> None:
    s.peers.hear(s.now, "i-0", "e1")
    s.peers.hear(s.now, "i-0", "e2")
    s.placed()
    s.tell(Answered(0, ForwardReply(accepted=True, epoch="e1")))


MOVES = [
    (move_rejected, "rejected", False),
    (move_no_accept, "no_accept", True),
    (move_nobody, "no_accept", True),
    (move_engine_error, "engine", False),
    (move_silent, "silent", True),
    (move_restarted, "restarted", True),
    (move_forgotten, "forgotten", False),
    (move_gone, "gone", True),
    (move_first_frame_lost, "frames_lost", True),
    (move_accepted_by_an_earlier_life, "restarted", True),
]


@pytest.mark.parametrize(("move", "reason", "cancelled"), MOVES)
def test_placed_again_elsewhere_before_the_first_token(move: Any, reason: str, cancelled: bool) -> None:
    s = Story()
    move(s)
    assert s.replaced == [("i-0", reason)]
    assert s.cancels == ([("i-0", 0, "superseded")] if cancelled else [])
    ask = s.asks[-1]
    assert (ask.request.attempt, ask.request.exclude, ask.request.rid) == (1, ("i-0",), RID)
    assert s.call.placement is None
    s.accepted("i-1", "f1")
    s.frame(0, iid="i-1", epoch="f1")
    s.frame(1, "final", iid="i-1", epoch="f1")
    assert s.emitted == [0, 1]
    assert s.ends == [None]


def test_our_own_bus_failing_says_nothing_against_the_instance() -> None:
    s = Story()
    s.placed()
    s.tell(ForwardFailed(0, BusError("not connected")))
    [again] = s.later(0.1)
    assert isinstance(again, Ask)
    assert (again.request.attempt, again.request.exclude) == (1, ())


def test_attempts_are_bounded_and_the_last_reason_is_told() -> None:
    s = Story()
    for n in range(LIMITS.max_attempts):
        s.accepted(f"i-{n}", f"e{n}")
        s.later(2.1)
    assert isinstance(s.failed(), InstanceLostError)
    assert [a.request.exclude for a in s.asks] == [(), ("i-0",), ("i-0", "i-1")]


def test_full_everywhere_is_overloaded_not_unavailable() -> None:
    s = Story()
    move_rejected(s)
    s.tell(Routed(1, refuse("no_instance", "unavailable", "all are excluded")))
    assert isinstance(s.failed(), OverloadedError)
    assert s.failed().retry_after_s == 3


def test_no_instance_after_a_death_says_what_happened_before() -> None:
    s = Story()
    move_silent(s)
    s.tell(Routed(1, refuse("no_instance", "unavailable", "all are excluded")))
    assert s.failed().status == 503
    assert "i-0 went silent" in s.failed().message


def test_who_fell_silent_may_be_tried_again_later_and_who_was_full_may_not() -> None:
    silent, full = Story(), Story()
    move_silent(silent)
    assert silent.asks[-1].request.recovering == ("i-0",)
    move_rejected(full)
    assert (full.asks[-1].request.exclude, full.asks[-1].request.recovering) == (("i-0",), ())


def test_the_last_word_of_an_instance_counts() -> None:
    s = Story()
    move_silent(s)
    s.placed()
    full = ErrorInfo("overloaded", "full", retry_after_s=3)
    s.tell(Answered(1, ForwardReply(accepted=False, retryable=True, error=full)))
    assert s.call.attempt == 2
    assert (s.asks[-1].request.exclude, s.asks[-1].request.recovering) == (("i-0",), ())


@pytest.mark.parametrize("code", ["context_length_exceeded", "unsupported_parameter"])
def test_final_rejection_goes_to_the_client(code: str) -> None:
    s = Story()
    s.placed()
    s.tell(Answered(0, ForwardReply(accepted=False, error=ErrorInfo(code, "no", param="messages"))))
    assert s.failed().status == 400
    assert s.failed().param == "messages"
    assert s.replaced == []


def test_rejection_without_a_reason_is_an_error_of_ours() -> None:
    s = Story()
    s.placed()
    s.tell(Answered(0, ForwardReply(accepted=False)))
    assert isinstance(s.failed(), EngineError)


def test_too_large_for_the_bus_is_not_tried_elsewhere() -> None:
    s = Story()
    s.placed()
    s.tell(ForwardFailed(0, PayloadTooLargeError("9 MB")))
    assert s.failed().status == 413


def test_final_error_frame_before_the_first_token() -> None:
    s = Story()
    s.accepted()
    s.frame(0, "error", error=ErrorInfo("context_length_exceeded", "too long", param="messages"))
    assert isinstance(s.failed(), ContextLengthError)
    assert s.cancels == []


def test_aborted_final_is_a_failure() -> None:
    s = Story()
    s.accepted()
    s.frame(0, "final", finish_reason="abort")
    assert isinstance(s.failed(), EngineError)
    assert s.emitted == []


# --- after the first token


def die_error(s: Story) -> None:
    s.frame(1, "error", error=ErrorInfo("instance_lost", "crashed"), retryable=True)


def die_silent(s: Story) -> None:
    s.later(2.1)


def die_restarted(s: Story) -> None:
    s.peers.hear(s.now, "i-0", "e2")
    s.later(0.05)


def die_forgotten(s: Story) -> None:
    s.now += 1.5
    s.peers.hear(s.now, "i-0", "e1")
    s.tell(Absent("i-0", "e1"))


def die_gone(s: Story) -> None:
    s.now += 1.5
    s.tell(Gone("i-0", "e1"))


def die_gap(s: Story) -> None:
    s.frame(2)


@pytest.mark.parametrize("die", [die_error, die_silent, die_restarted, die_forgotten, die_gone, die_gap])
def test_a_death_after_the_first_token_ends_the_call(die: Any) -> None:
    s = Story()
    s.accepted()
    s.frame(0)
    die(s)
    assert isinstance(s.failed(), InstanceLostError)
    assert s.replaced == []
    assert len(s.asks) == 1
    assert s.call.tokens_made


def test_a_gap_cancels_what_still_decodes() -> None:
    s = Story()
    s.accepted()
    s.frame(0)
    s.frame(2)
    assert s.cancels == [("i-0", 0, "superseded")]
    assert "frames 1 to 1" in s.failed().message


# --- what must not end a call


def test_late_frames_of_an_earlier_attempt_or_epoch_are_ignored() -> None:
    s = Story()
    move_no_accept(s)
    assert s.frame(0, iid="i-0", attempt=0) == []
    s.accepted("i-1", "f1")
    assert s.frame(0, iid="i-0", attempt=0) == []
    assert s.frame(0, iid="i-0", attempt=1) == []
    assert s.frame(0, iid="i-1", epoch="f0", attempt=1) == []
    s.peers.hear(s.now, "i-1", "f1")


def test_duplicates_are_ignored() -> None:
    s = Story()
    s.accepted()
    s.frame(0)
    assert s.frame(0) == []
    s.frame(1, "final")
    assert s.emitted == [0, 1]


def test_absence_right_after_the_acceptance_is_no_sign() -> None:
    s = Story()
    s.accepted()
    s.now += 0.5
    assert s.tell(Absent("i-0", "e1")) == []
    assert s.tell(Absent("i-1", "e1")) == []
    s.now += 5
    assert s.tell(Absent("i-0", "e0")) == []


def test_telemetry_alone_does_not_kill_an_instance_that_we_hear() -> None:
    s = Story()
    s.accepted()
    s.now += 5
    s.peers.hear(s.now, "i-0", "e1")
    assert s.tell(Gone("i-0", "e1")) == []


def test_batches_of_others_keep_an_instance_alive() -> None:
    s = Story()
    s.accepted()
    for _ in range(20):
        s.peers.hear(s.now, "i-0", "e1")
        assert s.later(1.9) == []


def test_silence_while_our_bus_is_down_is_forgiven_for_a_while() -> None:
    s = Story()
    s.accepted()
    s.peers.connection(s.now, connected=False)
    assert s.later(9) == []
    s.peers.connection(s.now, connected=True)
    assert s.later(1.9) == []
    s.later(0.2)
    assert s.replaced == [("i-0", "silent")]


def test_an_outage_does_not_hang_a_stream() -> None:
    s = Story(deadline_s=600)
    s.accepted()
    s.frame(0)
    s.peers.connection(s.now, connected=False)
    s.later(10.1)
    assert isinstance(s.failed(), InstanceLostError)


def test_standing_still_ourselves_is_nobodys_silence() -> None:
    s = Story()
    s.accepted()
    s.now += 30
    s.peers.forgive(s.now)
    assert s.tell(Tick()) == []


# --- the client, and time


@pytest.mark.parametrize("event", [ClientGone(), SlowClient(SlowClientError("slow"))])
def test_a_client_that_leaves_frees_the_instance_at_any_moment(event: Event) -> None:
    reason = "client_gone" if isinstance(event, ClientGone) else "slow_client"
    asking, forwarding, waiting, streaming = Story(), Story(), Story(), Story()
    forwarding.placed()
    waiting.accepted()
    streaming.accepted()
    streaming.frame(0)
    for s in (asking, forwarding, waiting, streaming):
        s.tell(event)
        assert isinstance(s.failed(), ClientGoneError if reason == "client_gone" else SlowClientError)
        assert s.cancels == ([] if s is asking else [("i-0", 0, reason)])


def test_deadline_at_any_moment() -> None:
    forwarding, waiting, streaming = Story(deadline_s=3), Story(deadline_s=3), Story(deadline_s=3)
    forwarding.placed()
    waiting.accepted()
    streaming.accepted()
    streaming.frame(0)
    for s in (forwarding, waiting, streaming):
        s.peers.hear(T0 + 3, "i-0", "e1")
        s.later(3)
        assert isinstance(s.failed(), DeadlineError)
        assert s.cancels == [("i-0", 0, "deadline")]


def test_waits_never_reach_beyond_the_deadline() -> None:
    s = Story(deadline_s=0.5)
    assert s.asks[0].timeout_s == 0.5
    [forward] = s.placed()
    assert isinstance(forward, Forward)
    assert forward.timeout_s == 0.5


# --- any order of anything

_attempts = st.integers(0, 3)
_iids = st.sampled_from(["i-0", "i-1"])
_epochs = st.sampled_from(["e1", "e2"])
_errors = st.sampled_from([BusTimeoutError("x"), NoRespondersError("x"), BusError("x"), PayloadTooLargeError("x")])
_infos = st.sampled_from([None, ErrorInfo("overloaded", "x"), ErrorInfo("instance_lost", "x")])
_frames = st.builds(
    Frame,
    rid=st.just(RID),
    attempt=_attempts,
    seq=st.integers(0, 3),
    kind=st.sampled_from(["delta", "final", "error"]),
    finish_reason=st.sampled_from(["stop", "abort", None]),
    error=_infos,
    retryable=st.booleans(),
)
_request = Story().asks[0].request
_replies = st.one_of(
    st.builds(lambda iid: place(_request, iid), _iids),
    st.sampled_from([refuse(r, "unavailable") for r in ("overloaded", "no_instance", "not_owner", "expired")]),
)
_events = st.one_of(
    st.builds(Routed, _attempts, _replies),
    st.builds(RouteFailed, _attempts, _errors),
    st.builds(
        Answered,
        _attempts,
        st.builds(ForwardReply, accepted=st.booleans(), epoch=_epochs, error=_infos, retryable=st.booleans()),
    ),
    st.builds(ForwardFailed, _attempts, _errors),
    st.builds(Arrived, _iids, _epochs, _frames),
    st.builds(Absent, _iids, _epochs),
    st.builds(Gone, _iids, _epochs),
    st.just(Tick()),
    st.just(ClientGone()),
)


@given(st.lists(st.tuples(_events, st.sampled_from([0.0, 0.01, 0.3, 1.5, 2.5])), max_size=40))
def test_any_order_of_events_keeps_the_promises(script: list[tuple[Event, float]]) -> None:
    s = Story(deadline_s=30)
    for event, pause in script:
        if isinstance(event, Arrived):
            s.peers.hear(s.now, event.iid, event.epoch)
        s.tell(event)
        s.now += pause
    s.now = max(s.now, T0 + 30)
    s.tell(Tick())
    assert len(s.ends) == 1  # whatever happens, one end, at the deadline at the latest
    assert isinstance(s.effects[-1], Finish)
    assert s.emitted == list(range(len(s.emitted)))  # no gap, no duplicate
    assert len({e.frame.attempt for e in s.effects if isinstance(e, Emit)}) <= 1  # never of two attempts
    attempts = [a.request.attempt for a in s.asks]
    assert attempts == sorted(attempts)
    assert max(attempts) < LIMITS.max_attempts
    if s.ends == [None]:
        assert s.emitted
    forwarded = {(e.head.placement.iid, n) for n, e in enumerate(f for f in s.effects if isinstance(f, Forward))}
    assert len(s.cancels) <= len(forwarded)


def test_the_short_way_takes_the_next_delta_of_a_stream_and_nothing_else() -> None:
    def frame(seq: int, kind: Any = "delta", attempt: int = 0) -> Frame:
        return Frame(rid="r", attempt=attempt, seq=seq, kind=kind, text="x")

    s = Story()
    assert not s.call.follows("i-0", "e1", frame(0))
    s.accepted()
    assert not s.call.follows("i-0", "e1", frame(0)), "the first token changes the phase"
    s.frame(0)
    for stray in (frame(0), frame(2), frame(1, "final"), frame(1, "error"), frame(1, attempt=1)):
        assert not s.call.follows("i-0", "e1", stray)
    assert not s.call.follows("i-1", "e1", frame(1))
    assert not s.call.follows("i-0", "e2", frame(1))
    assert s.call.follows("i-0", "e1", frame(1))
    assert not s.call.follows("i-0", "e1", frame(1)), "it was counted"
    assert [type(e) for e in s.frame(2)] == [Emit]
    assert [type(e) for e in s.frame(3, "final")] == [Emit, Finish]
