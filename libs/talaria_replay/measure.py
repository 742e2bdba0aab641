"""What is reported of a run, live or simulated: one record per call and nearest-rank percentiles over them (5.1)."""

from __future__ import annotations

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
    out = {f"p{p}": round(nearest_rank(values, p), 4) for p in PERCENTS}
    return out | {"mean": round(sum(values) / len(values), 4), "max": round(max(values), 4), "n": len(values)}


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


def summary(records: Sequence[CallRecord]) -> dict[str, Any]:
    """The figures of a run; times in seconds, rates of 1."""
    good = [r for r in records if not r.error]
    returns = [r for r in good if r.call]
    sessions = session_times(records)
    prompt = sum(r.prompt_tokens for r in good)
    return {
        "sct_s": percentiles(list(sessions.values())),
        "ttft_s": percentiles([r.ttft_s for r in good]),
        "ttft_request_local_s": percentiles([r.local_ttft_s for r in good]),
        "return_ttft_s": percentiles([r.ttft_s for r in returns]),
        "call_s": percentiles([r.done_s - r.intended_s for r in good]),
        "calls": len(records),
        "failed_calls": len(records) - len(good),
        "sessions": len({r.session for r in records}),
        "failed_sessions": len({r.session for r in records}) - len(sessions),
        "retries": sum(r.retries for r in records),
        "prompt_tokens": prompt,
        "completion_tokens": sum(r.completion_tokens for r in good),
        "cached_share": round(sum(r.cached_tokens for r in good) / prompt, 4) if prompt else 0.0,
        "same_instance_share": _same_instance(records),
        "prompt_error": percentiles(
            [
                abs(r.prompt_tokens - r.wanted_prompt_tokens) / r.wanted_prompt_tokens
                for r in good
                if r.wanted_prompt_tokens
            ]
        ),
        "short_answers": sum(r.completion_tokens < r.wanted_completion_tokens for r in good),
        "wall_s": round(max((r.done_s for r in records), default=0.0), 4),
    }


def same_bodies(a: Iterable[CallRecord], b: Iterable[CallRecord]) -> float:
    """Share of the calls in both runs that sent exactly the same messages."""
    other = {(r.session, r.call): r.body for r in b if r.body}
    both = [(r.body, other[r.session, r.call]) for r in a if r.body and (r.session, r.call) in other]
    return sum(x == y for x, y in both) / len(both) if both else 0.0


def _same_instance(records: Sequence[CallRecord]) -> float | None:
    """Share of returns that were served where the session's call before was; None when the server does not tell."""
    at = {(r.session, r.call): r.instance for r in records if r.instance}
    pairs = [(at.get((r.session, r.call - 1)), r.instance) for r in records if r.instance and r.call]
    known = [(a, b) for a, b in pairs if a]
    return round(sum(a == b for a, b in known) / len(known), 4) if known else None
