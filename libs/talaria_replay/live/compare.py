"""Two results side by side: the sessions that both runs finished, call by call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from talaria_replay.live.results import Results
from talaria_replay.measure import CallRecord, percentiles, same_bodies, session_times
from talaria_replay.quantiles import nearest_rank

FIGURES = ("sct_s", "ttft_s", "ttft_request_local_s", "return_ttft_s", "call_s")
_RATIOS = ("p50", "p90", "p95", "p99", "mean")
_APART = {"gap_sources"}
"""What a plan tells and the trace's digest covers."""

Values = dict[tuple[str, int], float]
"""By session and call; a session's own under call 0."""


def compare(a: Results, b: Results) -> dict[str, Any]:
    """What two runs have in common, and how the second's times are to the first's; times in seconds, rates of 1.

    Only sessions count whose calls were all answered in both runs, the same calls. Of each figure: the percentiles of
    both, `ratio` of the second's to the first's, and `paired_p50`, the median of the ratios call by call (session by
    session for `sct_s`). `same_bodies`: share of the calls that sent the same messages. `differs`: parts of the plan.
    """
    of = [_finished(r.calls) for r in (a, b)]
    both = {s for s in of[0].keys() & of[1].keys() if of[0][s].keys() == of[1][s].keys()}
    calls = [[r for s, session in each.items() if s in both for r in session.values()] for each in of]
    values = [_values(records) for records in calls]
    return {
        "sessions": len(both),
        "calls": len(calls[0]),
        "left_out": len({r.session for r in a.calls} | {r.session for r in b.calls}) - len(both),
        "complete": [a.complete, b.complete],
        "differs": [k for k in sorted((a.plan | b.plan).keys() - _APART) if a.plan.get(k) != b.plan.get(k)],
        "same_bodies": same_bodies(*calls),
        "figures": {name: _figure(values[0][name], values[1][name]) for name in FIGURES},
    }


def _finished(records: Sequence[CallRecord]) -> dict[str, dict[int, CallRecord]]:
    """The sessions without a failed call: their records by call."""
    failed = {r.session for r in records if r.error}
    out: dict[str, dict[int, CallRecord]] = {}
    for r in records:
        if r.session not in failed:
            out.setdefault(r.session, {})[r.call] = r
    return out


def _values(records: Sequence[CallRecord]) -> dict[str, Values]:
    return {
        "sct_s": {(s, 0): v for s, v in session_times(records).items()},
        "ttft_s": {(r.session, r.call): r.ttft_s for r in records},
        "ttft_request_local_s": {(r.session, r.call): r.local_ttft_s for r in records},
        "return_ttft_s": {(r.session, r.call): r.ttft_s for r in records if r.call},
        "call_s": {(r.session, r.call): r.done_s - r.intended_s for r in records},
    }


def _figure(a: Values, b: Values) -> dict[str, Any]:
    first, second = percentiles(list(a.values())), percentiles(list(b.values()))
    pairs = [b[key] / a[key] for key in a if a[key] > 0]
    return {
        "a": first,
        "b": second,
        "ratio": {p: round(second[p] / first[p], 4) for p in _RATIOS if first.get(p)},
        "paired_p50": round(nearest_rank(pairs, 50), 4) if pairs else None,
    }
