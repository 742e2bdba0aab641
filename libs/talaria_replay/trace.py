"""The trace format: JSON lines, one model call each, plain or gzipped.

    {"session": "astropy-12907", "call": 1, "model": "m", "prompt_tokens": 5614, "completion_tokens": 500,
     "reusable_tokens": 1768, "gap_s": 0.41, "gap_source": "synthetic"}

`reusable_tokens` is the longest common prefix, in tokens, of this prompt with the previous prompt plus its completion
(appendix A); 0 for a session's first call. `gap_s` is the wall-clock time from the previous response to this enqueue,
tool and agent together. A call may carry its text (`messages`); otherwise a replay makes a prompt of the right length
and prefix relation from `seed`. Calls of one session are in order; sessions may interleave.
"""

from __future__ import annotations

import gzip
import itertools
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any, Literal, cast

import msgspec

GapSource = Literal["recorded", "synthetic", "none"]


class Call(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One model call of one agent session. Counts in tokens, times in seconds."""

    session: str
    call: int
    model: str
    prompt_tokens: int
    completion_tokens: int
    reusable_tokens: int = 0
    gap_s: float | None = None
    gap_source: GapSource = "none"
    parent: str | None = None
    """The session that started this one as a sub-agent."""
    messages: list[dict[str, Any]] | None = None
    """The prompt as chat messages, when the text was kept."""
    seed: int | None = None


class TraceError(ValueError):
    """The trace is wrong; `problems` has a line each, beginning with its number; the message names the file as well."""

    def __init__(self, path: Path, problems: list[str]) -> None:
        super().__init__("\n".join(f"{path}: {problem}" for problem in problems))
        self.problems = problems


_decoder = msgspec.json.Decoder(Call)
_encoder = msgspec.json.Encoder()
MAX_PROBLEMS = 100


def read(path: Path) -> list[Call]:
    """The calls of a valid trace, in file order.

    Raises:
        TraceError: with every problem found, up to 100, each with its line number.
    """
    calls: list[Call] = []
    problems: list[str] = []
    checker = _Checker()
    try:
        for number, line in lines(path):
            try:
                call = _decoder.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
                problems.append(f"line {number}: {e}")
            else:
                problems += [f"line {number}: {p}" for p in checker.check(call)]
                calls.append(call)
            if len(problems) >= MAX_PROBLEMS:
                problems.append("… and perhaps more: stopped after 100 problems")
                break
    except TraceError as e:
        problems += e.problems
    if not calls and not problems:
        problems.append("line 1: the trace is empty")
    if problems:
        raise TraceError(path, problems)
    return calls


def lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """(number, line) of each line that is not blank, of a plain or gzipped file.

    Raises:
        TraceError: the gzip data are broken.
        OSError: it cannot be read.
    """
    number = 0
    with cast("IO[bytes]", gzip.open(path, "rb")) if path.suffix == ".gz" else path.open("rb") as file:
        try:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, line
        except EOFError as e:
            raise TraceError(path, [f"line {number + 1}: the gzip data end here; expected a whole .gz file"]) from e
        except (zlib.error, gzip.BadGzipFile) as e:
            raise TraceError(path, [f"line {number + 1}: broken gzip data ({e}); expected a whole .gz file"]) from e


def write(path: Path, calls: Iterable[Call]) -> int:
    """Write a trace (gzipped if the name ends in .gz); returns the number of calls."""
    count = 0
    with cast("IO[bytes]", gzip.open(path, "wb") if path.suffix == ".gz" else path.open("wb")) as out:
        for call in calls:
            out.write(_encoder.encode(call) + b"\n")
            count += 1
    return count


def sessions(calls: Iterable[Call]) -> dict[str, list[Call]]:
    """The calls by session, sessions in order of first appearance."""
    out: dict[str, list[Call]] = {}
    for call in calls:
        out.setdefault(call.session, []).append(call)
    return out


def grouped(calls: Iterable[Call]) -> Iterator[list[Call]]:
    """Sessions one after the other, of calls that do not interleave (generated ones); nothing else is kept."""
    for _, session in itertools.groupby(calls, key=lambda call: call.session):
        yield list(session)


def gap_sources(calls: Iterable[Call]) -> dict[str, int]:
    """Calls by the source of their gap, those without any under "none"; first calls have none and are left out."""
    return dict(sorted(Counter(call.gap_source for call in calls if call.call).items()))


def missing_gaps(sources: dict[str, int]) -> str:
    """What to say of gaps that the trace lacks, given `gap_sources`; "" where it lacks none."""
    missing, total = sources.get("none", 0), sum(sources.values())
    return f"{missing} of {total} gaps are missing from the trace and taken for 0 s" if missing else ""


def wrong_in_message(message: dict[str, Any]) -> tuple[str, str] | None:
    """(field, what is expected there) of a chat message that cannot be sent; None for one that can."""
    if not isinstance(message.get("content"), str | list | None):
        return "content", "a string, a list of parts or null"
    if not isinstance(message.get("role"), str):
        return "role", "a string"
    return None


def _wrong_messages(messages: Iterable[dict[str, Any]]) -> Iterator[str]:
    for n, message in enumerate(messages):
        if (problem := wrong_in_message(message)) is not None:
            name, expected = problem
            yield f"field 'messages[{n}].{name}': expected {expected}"


class _Checker:
    """Rules that need more than one line."""

    def __init__(self) -> None:
        self._last: dict[str, Call] = {}

    def check(self, call: Call) -> Iterator[str]:
        before = self._last.get(call.session)
        expected = 0 if before is None else before.call + 1
        if call.call != expected:
            yield f"session {call.session!r}: call {call.call}, expected {expected}"
        if call.prompt_tokens < 1:
            yield f"prompt_tokens {call.prompt_tokens}, expected >= 1"
        if call.completion_tokens < 0:
            yield f"completion_tokens {call.completion_tokens}, expected >= 0"
        if not 0 <= call.reusable_tokens <= call.prompt_tokens:
            yield f"reusable_tokens {call.reusable_tokens}, expected 0..prompt_tokens ({call.prompt_tokens})"
        if before is None and call.reusable_tokens:
            yield f"reusable_tokens {call.reusable_tokens}, expected 0 on a session's first call"
        if before is not None and call.reusable_tokens > before.prompt_tokens + before.completion_tokens:
            most = before.prompt_tokens + before.completion_tokens
            yield f"reusable_tokens {call.reusable_tokens}, expected at most previous prompt and completion ({most})"
        if call.gap_s is not None and not 0 <= call.gap_s < float("inf"):
            yield f"gap_s {call.gap_s}, expected >= 0"
        if (call.gap_s is None) != (call.gap_source == "none"):
            wanted = "'none'" if call.gap_s is None else "'recorded' or 'synthetic'"
            yield f"gap_source {call.gap_source!r} with gap_s {call.gap_s}, expected {wanted}"
        yield from _wrong_messages(call.messages or ())
        self._last[call.session] = call
