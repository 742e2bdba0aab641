from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from talaria_replay.quantiles import QuantileTable, nearest_rank
from talaria_replay.trace import Call, TraceError, gap_sources, missing_gaps, read, sessions, write


def call(n: int, **changes: object) -> Call:
    base: dict[str, object] = {"session": "s", "call": n, "model": "m", "prompt_tokens": 100, "completion_tokens": 10}
    return Call(**(base | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.gz"])
def test_round_trip(tmp_path: Path, name: str) -> None:
    calls = [call(0), call(1, reusable_tokens=90, gap_s=0.4, gap_source="synthetic", messages=[{"role": "user"}])]
    assert write(tmp_path / name, calls) == 2
    assert read(tmp_path / name) == calls
    assert list(sessions(calls)) == ["s"]


@pytest.mark.parametrize(
    ("calls", "line", "says"),
    [
        ([call(0), call(2)], 2, "call 2, expected 1"),
        ([call(1)], 1, "call 1, expected 0"),
        ([call(0, reusable_tokens=5)], 1, "first call"),
        ([call(0), call(1, reusable_tokens=101)], 2, "expected 0..prompt_tokens"),
        ([call(0), call(1, prompt_tokens=500, reusable_tokens=111)], 2, "at most previous"),
        ([call(0, prompt_tokens=0)], 1, "expected >= 1"),
        ([call(0), call(1, gap_s=-1.0, gap_source="recorded")], 2, "gap_s -1.0"),
        ([call(0), call(1, gap_s=1.0)], 2, "gap_source 'none'"),
        ([call(0, messages=[{"content": "x"}])], 1, "field 'messages[0].role': expected a string"),
        ([call(0, messages=[{"role": "user", "content": 5}])], 1, "field 'messages[0].content': expected a string, a"),
    ],
)
def test_problems_name_their_line(tmp_path: Path, calls: list[Call], line: int, says: str) -> None:
    write(tmp_path / "t.jsonl", calls)
    with pytest.raises(TraceError) as e:
        read(tmp_path / "t.jsonl")
    assert e.value.problems[0].startswith(f"line {line}: ")
    assert str(e.value).startswith(f"{tmp_path / 't.jsonl'}: line {line}: ")
    assert says in e.value.problems[0]


@pytest.mark.parametrize(
    "text",
    [
        "not json\n",
        "{}\n",
        '{"session": "s"}\n',
        "[1]\n",
        "",
        '{"session":"s","call":0,"model":"m","prompt_tokens":1,"completion_tokens":1,"typo":1}\n',
    ],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "t.jsonl").write_text(text)
    with pytest.raises(TraceError, match="line 1"):
        read(tmp_path / "t.jsonl")


def broken(tmp_path: Path, how: str) -> Path:
    """Of 4000 calls, read in part."""
    path = tmp_path / "t.jsonl.gz"
    write(path, [call(n) for n in range(4000)])
    data = bytearray(path.read_bytes())
    if how == "cut":
        path.write_bytes(data[: len(data) // 2])
    elif how == "flipped":
        data[len(data) // 2] ^= 0xFF
        path.write_bytes(data)
    elif how == "tail":
        path.write_bytes(data[:-3])
    elif how == "sum":
        data[-8] ^= 0xFF
        path.write_bytes(data)
    else:
        path.write_bytes(b"no gzip\n")
    return path


@pytest.mark.parametrize("how", ["cut", "flipped", "tail", "sum", "plain"])
def test_broken_gzip_is_named_with_its_line(tmp_path: Path, how: str) -> None:
    path = broken(tmp_path, how)
    with pytest.raises(TraceError, match=r"t\.jsonl\.gz: line \d+: .*expected"):
        read(path)


def test_gaps_by_source() -> None:
    calls = [call(0), call(1, gap_s=1.0, gap_source="recorded"), call(2), call(3), call(4)]
    assert gap_sources(calls) == {"none": 3, "recorded": 1}
    assert missing_gaps(gap_sources(calls)) == "3 of 4 gaps are missing from the trace and taken for 0 s"
    assert not missing_gaps({"recorded": 4, "synthetic": 1})


@given(st.lists(st.integers(-1000, 1000), min_size=1), st.integers(1, 100))
def test_nearest_rank_is_an_observation_with_enough_below(values: list[int], percent: int) -> None:
    q = nearest_rank(values, percent)
    assert q in values
    assert sum(v <= q for v in values) * 100 >= percent * len(values)
    assert sum(v < q for v in values) * 100 < percent * len(values)


@given(st.floats(0, 0.999), st.floats(0, 0.999))
def test_table_is_monotone_and_bounded(a: float, b: float) -> None:
    table = QuantileTable([(0, 2), (50, 10), (100, 400)])
    low, high = sorted((a, b))
    assert 1.999 <= table.at(low) <= table.at(high) <= 400.001


def test_table_goes_through_its_points() -> None:
    table = QuantileTable([(0, 2), (50, 10), (95, 100), (100, 400)])
    assert table.at(0.5) == pytest.approx(10)
    assert table.at(0.95) == pytest.approx(100)


def test_table_refuses_falling_values() -> None:
    with pytest.raises(ValueError, match="fall"):
        QuantileTable([(0, 2), (50, 1), (100, 3)])
