"""Tokens of answers that nobody reads as they grow: told first, last, and now and then; none lost, none twice."""

from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st

from talaria_common.wire.error import ErrorInfo
from talaria_gpu.engine.contract import StepResult, StepTokens
from talaria_gpu.engine.holding import HOLD_S, Holding
from talaria_gpu.engine.ipc import Refused, Stepped


def step(*tokens, kind="decode"):
    return Stepped(model="m", result=StepResult(kind=kind, tokens=list(tokens), wall_ms=3.0))


def of(rid, *ids, finished=""):
    return StepTokens(rid=rid, token_ids=list(ids), finished=finished, cached_tokens=2 if ids else 0)


def told(reports):
    return [(t.rid, t.token_ids, t.finished) for report in reports for t in report.result.tokens]


def test_the_first_token_and_the_end_are_told_at_once():
    holding = Holding()
    holding.expect("a")
    (first,) = holding.take(0.0, [step(of("a", 1), kind="prefill")])
    assert (told([first]), first.result.kind, first.result.wall_ms) == ([("a", [1], "")], "prefill", 3.0)
    assert holding.take(0.01, [step(of("a", 2)), step(of("a", 3))]) == []
    (last,) = holding.take(0.02, [step(of("a", finished="stop"))])
    assert told([last]) == [("a", [2, 3], "stop")]
    assert last.result.tokens[0].cached_tokens == 2
    assert holding.flush(1.0) == []


def test_what_is_held_is_told_in_time():
    holding = Holding()
    holding.expect("a")
    holding.take(0.0, [step(of("a", 1))])
    assert holding.take(HOLD_S / 2, [step(of("a", 2))]) == []
    assert told(holding.take(HOLD_S, [step(of("a", 3))])) == [("a", [2, 3], "")]
    assert holding.take(HOLD_S * 1.5, [step(of("a", 4))]) == []
    assert told(holding.flush(HOLD_S * 1.6)) == [("a", [4], "")]


def test_streams_pass_and_a_refused_call_is_forgotten():
    holding = Holding()
    streams = [step(of("s", 1)), step(of("s", 2))]
    assert holding.take(0.0, streams) == streams
    holding.expect("a")
    refusal = Refused(rid="a", error=ErrorInfo("overloaded", "full"))
    assert holding.take(0.0, [refusal]) == [refusal]
    mixed = [step(of("a", 1), of("s", 1)), step(of("a", 2), of("s", 2))]
    assert holding.take(0.0, mixed) == mixed


@given(
    st.lists(st.tuples(st.sampled_from("abs"), st.integers(1, 3), st.floats(0, 0.2), st.booleans()), max_size=60),
)
def test_nothing_is_lost_or_told_twice(steps):
    holding = Holding()
    for rid in "ab":
        holding.expect(rid)
    made, heard, ended = defaultdict(list), defaultdict(list), set()
    now, serial = 0.0, 0

    def hear(reports):
        for rid, ids, finished in told(reports):
            assert rid not in ended
            heard[rid] += ids
            if finished:
                ended.add(rid)

    for rid, count, wait_s, end in steps:
        if rid in ended:
            continue
        now += wait_s
        ids = list(range(serial, serial + count))
        serial += count
        made[rid] += ids
        hear(holding.take(now, [step(of(rid, *ids, finished="length" if end else ""))]))
        assert (rid in ended) == end
    hear(holding.flush(now))
    assert heard == made
