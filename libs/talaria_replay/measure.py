"""What is reported of a run, live or simulated: one record per call and nearest-rank percentiles over them (5.1)."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from talaria_replay.quantiles import nearest_rank

PERCENTS = (50, 90, 95, 99)


class CallRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One measured call. Times in seconds from the start of the window; warm-up is not in it."""

    session: str
    call: int
    model: str
    intended_s: float
    """When the replay meant it to be enqueued: the session's start, or the previous end plus the capped gap."""
    sent_s: float
    first_s: float = 0.0
    done_s: float = 0.0
    gap_s: float = 0.0
    """The gap before it, capped."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    cache_reported: bool = True
    """False: the server did not tell how much was cached: nothing, if it tells of other calls."""
    wanted_prompt_tokens: int = 0
    wanted_completion_tokens: int = 0
    cache_source: str = ""
    instance: str = ""
    route: str = ""
    retries: int = 0
    body: str = ""
    """Digest of the messages sent."""
    error: str = ""

    @property
    def ttft_s(self) -> float:
        """Schedule-aware: from the intended enqueue."""
        return self.first_s - self.intended_s

    @property
    def local_ttft_s(self) -> float:
        """Request-local: from the request that was answered."""
        return self.first_s - self.sent_s


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """p50, p90, p95, p99, mean, max and n; empty for no values."""
    if not values:
        return {"n": 0}
    ordered = sorted(values)
    out = {f"p{p}": round(nearest_rank(ordered, p), 4) for p in PERCENTS}
    return out | {"mean": round(sum(ordered) / len(ordered), 4), "max": round(ordered[-1], 4), "n": len(ordered)}


def session_times(records: Iterable[CallRecord]) -> dict[str, float]:
    """SCT by session, seconds: first call's intended enqueue to last answer. Failed sessions are left out."""
    start: dict[str, float] = {}
    end: dict[str, float] = {}
    failed: set[str] = set()
    for r in records:
        start[r.session] = min(r.intended_s, start.get(r.session, r.intended_s))
        end[r.session] = max(r.done_s, end.get(r.session, r.done_s))
        if r.error:
            failed.add(r.session)
    return {s: end[s] - start[s] for s in start if s not in failed}


class Tally:
    """The figures of a run, added up session by session: it keeps numbers, not records."""

    def __init__(self) -> None:
        self._values: dict[str, array[float]] = {name: array("d") for name in _DISTRIBUTIONS}
        self._counts: dict[str, int] = dict.fromkeys(_COUNTS, 0)
        self._returns = self._same = self._return_cached = self._return_prompt = 0
        self._cached = self._told = 0
        self._end = 0.0

    def add(self, session: Sequence[CallRecord]) -> None:
        """All calls of one session, in order."""
        good = [r for r in session if not r.error]
        values, counts = self._values, self._counts
        for r in good:
            values["ttft_s"].append(r.ttft_s)
            values["ttft_request_local_s"].append(r.local_ttft_s)
            values["call_s"].append(r.done_s - r.intended_s)
            if r.call:
                values["return_ttft_s"].append(r.ttft_s)
                self._return_cached += r.cached_tokens
                self._return_prompt += r.prompt_tokens
            if r.wanted_prompt_tokens:
                error = abs(r.prompt_tokens - r.wanted_prompt_tokens) / r.wanted_prompt_tokens
                values["prompt_error"].append(error)
            counts["prompt_tokens"] += r.prompt_tokens
            counts["completion_tokens"] += r.completion_tokens
            counts["short_answers"] += r.completion_tokens < r.wanted_completion_tokens
            self._cached += r.cached_tokens
            self._told += r.cache_reported
        counts["calls"] += len(session)
        counts["failed_calls"] += len(session) - len(good)
        counts["retries"] += sum(r.retries for r in session)
        counts["sessions"] += 1
        if len(good) == len(session):
            values["sct_s"].extend(session_times(session).values())
        else:
            counts["failed_sessions"] += 1
        at = {r.call: r.instance for r in session if r.instance}
        known = [(at[r.call - 1], r.instance) for r in session if r.instance and r.call - 1 in at]
        self._returns += len(known)
        self._same += sum(a == b for a, b in known)
        self._end = max(self._end, max((r.done_s for r in session), default=0.0))

    def values(self, name: str) -> Sequence[float]:
        """All values of a distribution of the summary."""
        return self._values[name]

    @property
    def recomputed_share(self) -> float:
        """Of the prompt tokens of returns, those that were not in a cache."""
        return round(1 - self._return_cached / self._return_prompt, 4) if self._return_prompt else 0.0

    def summary(self) -> dict[str, Any]:
        """Times in seconds, rates of 1; None: the server does not tell.

        A server that told of one call's cache and not of another's had nothing for that one: many leave a 0 out.
        """
        silent = not self._told and self._counts["calls"] > self._counts["failed_calls"]
        return {
            **{name: percentiles(values) for name, values in self._values.items()},
            **self._counts,
            "cached_share": None if silent else round(self._cached / max(1, self._counts["prompt_tokens"]), 4),
            "same_instance_share": round(self._same / self._returns, 4) if self._returns else None,
            "wall_s": round(self._end, 4),
        }


_DISTRIBUTIONS = ("sct_s", "ttft_s", "ttft_request_local_s", "return_ttft_s", "call_s", "prompt_error")
_COUNTS = (
    "calls",
    "failed_calls",
    "sessions",
    "failed_sessions",
    "retries",
    "prompt_tokens",
    "completion_tokens",
    "short_answers",
)


def summary(records: Sequence[CallRecord]) -> dict[str, Any]:
    """The figures of a run; times in seconds, rates of 1; None: the server does not tell."""
    tally = Tally()
    by_session: dict[str, list[CallRecord]] = {}
    for r in records:
        by_session.setdefault(r.session, []).append(r)
    for session in by_session.values():
        tally.add(session)
    return tally.summary()


def same_bodies(a: Iterable[CallRecord], b: Iterable[CallRecord]) -> float:
    """Share of the calls in both runs that sent exactly the same messages."""
    other = {(r.session, r.call): r.body for r in b if r.body}
    both = [(r.body, other[r.session, r.call]) for r in a if r.body and (r.session, r.call) in other]
    return sum(x == y for x, y in both) / len(both) if both else 0.0
