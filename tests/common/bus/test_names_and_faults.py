from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from talaria_common.bus.faults import BusFaultError, FaultReporter
from talaria_common.bus.names import matches, overlaps
from tests.support.waiting import until

token = st.sampled_from(["a", "b", "c"])
subject_st = st.lists(token, min_size=1, max_size=4).map(".".join)
filter_st = st.tuples(st.lists(st.sampled_from(["a", "b", "*"]), max_size=3), st.sampled_from(["a", "*", ">"])).map(
    lambda parts: ".".join([*parts[0], parts[1]])
)


@given(subject_st, filter_st, filter_st)
def test_filters_that_share_a_subject_overlap(subject: str, one: str, other: str):
    if matches(subject, one) and matches(subject, other):
        assert overlaps(one, other)
        assert overlaps(other, one)


@given(filter_st, filter_st)
def test_filters_that_overlap_share_a_subject(one: str, other: str):
    """The witness: each place takes the token that is no wildcard, and a `>` as many as the other needs."""
    if not overlaps(one, other):
        return
    a, b = one.split("."), other.split(".")
    length = max(len(a), len(b))

    def at(parts: list[str], i: int) -> str:
        return parts[i] if i < len(parts) and parts[i] not in ("*", ">") else ""

    witness = ".".join(at(a, i) or at(b, i) or "x" for i in range(length))
    assert matches(witness, one)
    assert matches(witness, other)


@given(subject_st)
def test_a_subject_matches_itself_and_everything(subject: str):
    assert matches(subject, subject)
    assert matches(subject, ">")
    assert not matches(subject, subject + ".>")
    assert not matches(subject + ".d", subject)


async def test_faults_are_told_at_once_then_counted_then_told_again():
    reporter = FaultReporter(window_s=0.05)
    told: list[Exception] = []
    reporter.add(told.append)
    for _ in range(100):
        reporter.report("slow_consumer", "a", "dropped")
    assert len(told) == 1
    reporter.report("slow_consumer", "b", "dropped")
    assert len(told) == 2
    await until(lambda: len(told) == 3)
    fault = told[2]
    assert isinstance(fault, BusFaultError)
    assert (fault.fault, fault.count) == ("slow_consumer", 99)
    await until(lambda: not reporter._timers)
    reporter.report("slow_consumer", "a", "dropped")
    assert len(told) == 4
    reporter.close()
    await asyncio.sleep(0)
    assert not reporter._timers


async def test_a_failing_callback_keeps_the_others():
    reporter = FaultReporter()
    told: list[Exception] = []

    def broken(_: Exception) -> None:
        raise RuntimeError

    reporter.add(broken)
    reporter.add(told.append)
    reporter.report("handler", "a", "x", ValueError("cause"))
    reporter.close()
    (fault,) = told
    assert isinstance(fault, BusFaultError)
    assert isinstance(fault.cause, ValueError)


@pytest.mark.parametrize(("one", "other", "do"), [("a.>", "a", False), ("a.*", "a.b.c", False), ("*.b", "a.>", True)])
def test_overlaps(one: str, other: str, do: bool):
    assert overlaps(one, other) is do
