"""From outcomes to figures: each value is of one run, ratios are taken within it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bench.compare.loop import Outcome
from bench.compare.systems import HOLDS_STREAMS, TALARIA
from bench.report import Figure, figure
from talaria_replay.measure import session_times
from talaria_replay.quantiles import nearest_rank

Run = Mapping[str, Outcome]
"""By system."""

_UNKNOWN = "\ufffd"
"""Half a character at the end of an answer: servers part on whether to say so."""


def values(outcome: Outcome) -> dict[str, tuple[float, str]]:
    """What one outcome says by itself: name → value, unit."""
    records = outcome.records
    of = {
        "sct": list(session_times(records).values()),
        "ttft": [r.ttft_s for r in records],
        "return_ttft": [r.ttft_s for r in records if r.call],
        "call": [r.done_s - r.intended_s for r in records],
    }
    out = {"wall_s": (outcome.wall_s, "s")}
    out |= {
        f"{name}_p{percent}_s": (nearest_rank(each, percent), "s")
        for name, each in of.items()
        for percent in (50, 95)
        if each
    }
    prompt = sum(r.prompt_tokens for r in records)
    out["cached_share"] = (sum(r.cached_tokens for r in records) / max(1, prompt), "of prompt tokens")
    if outcome.reloads_s:
        out["reloads"] = (len(outcome.reloads_s), "reloads")
        out["reload_p50_s"] = (nearest_rank(outcome.reloads_s, 50), "s")
    return out


_RATIOS = ("sct_p50_s", "sct_p95_s", "call_p50_s", "call_p95_s", "wall_s")
_STREAM_RATIOS = ("ttft_p50_s", "ttft_p95_s", "return_ttft_p50_s", "return_ttft_p95_s")


def ratios(system: str) -> tuple[str, ...]:
    """The values that `system` is compared with Talaria by."""
    return _RATIOS if system in HOLDS_STREAMS else _RATIOS + _STREAM_RATIOS


def figures(runs: Sequence[Run]) -> dict[str, Figure]:
    """Of all runs; ratios where Talaria was in the run, too."""
    found: dict[str, list[tuple[float, str]]] = {}
    for run in runs:
        base = values(run[TALARIA]) if TALARIA in run else {}
        for system, outcome in run.items():
            of = values(outcome)
            for key, value in of.items():
                found.setdefault(f"{key}_{system}", []).append(value)
            if system == TALARIA:
                continue
            for key in ratios(system):
                if key in of and base.get(key, (0.0, ""))[0]:
                    name = f"{key.removesuffix('_s')}_{system}_over_{TALARIA}"
                    found.setdefault(name, []).append((of[key][0] / base[key][0], "x"))
            if base:
                found.setdefault(f"other_answers_{system}", []).append((len(other_answers(run, system)), "calls"))
                found.setdefault(f"other_prompts_{system}", []).append((other_prompts(run, system), "calls"))
    return {name: figure([v for v, _ in each], each[0][1]) for name, each in found.items()}


def other_answers(run: Run, system: str) -> dict[str, list[str]]:
    """Call → Talaria's answer and the system's, where they differ."""
    ours, theirs = run[TALARIA].answers, run[system].answers
    return {rid: [ours[rid], theirs[rid]] for rid in ours if comparable(ours[rid]) != comparable(theirs.get(rid, ""))}


def other_prompts(run: Run, system: str) -> int:
    """Calls whose prompt the system counts otherwise, or whose answer has another length."""

    def counts(outcome: Outcome) -> dict[tuple[str, int], tuple[int, int]]:
        return {(r.session, r.call): (r.prompt_tokens, r.completion_tokens) for r in outcome.records}

    ours, theirs = counts(run[TALARIA]), counts(run[system])
    return sum(ours[call] != theirs.get(call) for call in ours)


def comparable(answer: str) -> str:
    """The text as far as every server tells it alike."""
    return answer.replace(_UNKNOWN, "")
