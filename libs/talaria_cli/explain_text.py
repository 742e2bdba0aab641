"""Why a call went where it went, in words: from its events in TALARIA_EVENTS to lines of text. Pure."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

from talaria_common.wire import Event

KINDS = ("route", "lease", "forward", "completion")
"""Kinds of events that tell of one call."""

_VIA = {
    "lease": "its session's lease",
    "cost": "cost (Eq. 1)",
    "retry": "cost, after a failed attempt",
    "policy": "the configured policy",
}
_LEASE = {
    "none": "the session held no lease",
    "honoured": "honoured: the session returned to its reserved instance",
    "expired": "expired before this call came",
    "stale": "discarded: its instance had fallen silent and no health probe was answered",
    "gone": "discarded: its instance is gone",
    "prefix": "discarded: the KV that it was for is no longer there",
    "excluded": "discarded: the call had failed on its instance",
}
_REASONS = {
    "excluded": "failed this call before",
    "stale": "no snapshot for 3 heartbeats",
    "gone": "no snapshot for 30 heartbeats",
    "failed_model": "the model failed to load there",
    "context": "the prompt does not fit its KV or context",
    "queue": "its queue is full",
    "round": "its predicted round would pass gamma x T_TTFT (Eq. 5)",
    "replica": "a fresh replica is not worth its price (Eq. 2)",
}
Row = tuple[str, ...]
HEAD: Row = ("", "instance", "request", "recovery", "activation", "total ms", "wait ms", "KV", "model", "calls", "")


def order(events: Iterable[Event]) -> list[Event]:
    """As they happened; at the same ms the decision before what followed from it."""
    rank = {kind: n for n, kind in enumerate(("route", "lease", "forward", "completion"))}
    return sorted(events, key=lambda e: (e.at_ms, rank.get(e.kind, 9)))


def title(events: Sequence[Event]) -> str:
    """Which call it is."""
    known: dict[str, Any] = {}
    for event in events:
        known = event.data | known
    return (
        f"call {known.get('rid', '?')}: model {known.get('model', '?')}, tenant {known.get('tenant', '?')}, "
        f"session {known.get('session', '?')}"
    )


def line(event: Event) -> str:
    """One event in one line."""
    told = {"route": _route, "lease": _lease, "forward": _forward, "completion": _completion}[event.kind](event.data)
    seconds, ms = divmod(event.at_ms, 1000)
    return f"{time.strftime('%H:%M:%S', time.localtime(seconds))}.{ms:03d}  {told}  ({event.source})"


def facts(data: dict[str, Any]) -> list[str]:
    """What else a decision says, a line each: the lease's fate, what ruled instances out."""
    lease = str(data.get("lease", "none"))
    lines = [f"lease: {_LEASE.get(lease, f'discarded: its instance is {lease}')}"]
    if data.get("waited_ms"):
        lines.append(f"the call waited {data['waited_ms']:.1f} ms for this answer")
    if data.get("avoidable_open"):
        lines.append("avoidable open: the model must be activated there, though another healthy instance has it active")
    if data.get("spilled"):
        lines.append("spilled: no instance had room within the target, so the least costly one takes it")
    for reason, count in sorted(data.get("rejected", {}).items()):
        lines.append(f"ruled out: {count} x {reason}: {_REASONS.get(reason, f'it says itself that it is {reason}')}")
    return lines


def rows(data: dict[str, Any]) -> list[Row]:
    """A decision's candidates for a table headed by `HEAD`: those that passed best first, then those ruled out."""
    chosen = data.get("iid")
    return [
        (
            "*" if c.get("iid") == chosen else "",
            str(c.get("iid")),
            *(f"{c.get(term, 0.0):.1f}" for term in ("req_ms", "kv_ms", "act_ms", "total_ms", "wait_ms")),
            f"{c.get('kv', 'missing')} ({c['reused']} tokens)" if c.get("reused") else str(c.get("kv", "missing")),
            str(c.get("model", "")),
            str(c.get("calls", 0)),
            f"ruled out: {c['rejected']}" if c.get("rejected") else "",
        )
        for c in data.get("candidates", [])
    ]


def _route(data: dict[str, Any]) -> str:
    attempt = f"attempt {data.get('attempt', 0)}"
    if "verdict" in data:
        back = f"; come back in {data['retry_after_s']} s" if "retry_after_s" in data else ""
        return f"{attempt} refused: {data['verdict']}: {data.get('message', '')}{back}"
    via = str(data.get("via", "?"))
    wait = f", predicted wait {data.get('wait_ms', 0):.0f} ms" if "wait_ms" in data else ""
    return f"{attempt} placed on {data.get('iid')} by {_VIA.get(via, via)}, on view {data.get('view', '?')}{wait}"


def _lease(data: dict[str, Any]) -> str:
    what, reason = data.get("what"), data.get("reason")
    kept = f", {data.get('kv_tokens', 0)} tokens kept" if what == "installed" else ""
    return f"lease on {data.get('iid')} {what}{f' ({reason})' if reason else ''}{kept}"


def _forward(data: dict[str, Any]) -> str:
    if data.get("accepted"):
        return f"accepted, {data.get('queued', 0)} before their first token"
    return f"not accepted: {data.get('code', '?')}: {data.get('message', '')}"


def _completion(data: dict[str, Any]) -> str:
    ended = data.get("finish") or ("ok" if data.get("ok") else "failed")
    source = data.get("cache_source", "none")
    return (
        f"ended ({ended}) after {data.get('total_ms', 0.0):.0f} ms, first token at {data.get('ttft_ms', 0.0):.0f} ms: "
        f"{data.get('prompt_tokens', 0)} prompt tokens of which {data.get('cached_tokens', 0)} cached ({source}), "
        f"{data.get('completion_tokens', 0)} out"
    )
