"""Which part is ready, and why one is not: judged from its /readyz, its snapshots and the cluster view."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from talaria_cli.up.plan import Part
from talaria_common.wire import Snapshot


class Verdict(NamedTuple):
    """What is known of one part."""

    ready: bool
    says: str


class HttpAnswer(NamedTuple):
    """The last answer of a part's /readyz."""

    status: int
    text: str


@dataclass(slots=True)
class Facts:
    """Everything seen so far. Times are monotonic seconds."""

    bus: bool = False
    http: dict[str, HttpAnswer] = field(default_factory=dict)
    snapshots: dict[str, tuple[Snapshot, float]] = field(default_factory=dict)
    cluster_at: float | None = None

    def forget(self, part: str) -> None:
        """A part died: what it said counts no more."""
        self.http.pop(part, None)
        self.snapshots.pop(part, None)


def judge(part: Part, facts: Facts, now: float, stale_after_s: float) -> Verdict:
    """The verdict on a running process."""
    if part.role == "nats":
        return Verdict(facts.bus, "accepting connections" if facts.bus else "not answering yet")
    if part.role == "instance":
        return _instance(part, facts, now, stale_after_s)
    if part.http is not None:
        return _http(part, part.http, facts)
    if part.role == "telemetry":
        fresh = facts.cluster_at is not None and now - facts.cluster_at < stale_after_s + 1.0
        return Verdict(fresh, "" if fresh else "has not published the cluster view yet")
    ready = any(a.status == 200 for a in facts.http.values())
    return Verdict(ready, "" if ready else "no /readyz of its own (mesh.metrics_ports); waiting for the api's")


def _http(part: Part, url: str, facts: Facts) -> Verdict:
    answer = facts.http.get(part.name)
    if answer is None:
        return Verdict(False, "not answering yet")
    if answer.status == 200:
        return Verdict(True, url if part.role == "api" else "")
    return Verdict(False, reason_in(answer.text) or f"its /readyz says {answer.status}")


def _instance(part: Part, facts: Facts, now: float, stale_after_s: float) -> Verdict:
    if part.name not in facts.snapshots:
        return Verdict(False, "no snapshot yet")
    snapshot, at = facts.snapshots[part.name]
    if now - at > stale_after_s:
        return Verdict(False, f"silent for {now - at:.0f} s")
    if snapshot.status != "ready":
        return Verdict(False, f"{snapshot.status}: {snapshot.reason}" if snapshot.reason else snapshot.status)
    return Verdict(True, models_line(snapshot))


def models_line(snapshot: Snapshot) -> str:
    """The models of an instance by state, short."""
    by_state: dict[str, list[str]] = {}
    for model in snapshot.models:
        by_state.setdefault(model.state, []).append(model.name)
    return "; ".join(f"{state}: {', '.join(names)}" for state, names in sorted(by_state.items()))


def reason_in(text: str) -> str:
    """The reason in a /readyz body: JSON with reasons, reason, detail or an error message; else its text, shortened."""
    try:
        body = json.loads(text)
    except ValueError:
        return text.strip().replace("\n", " ")[:200]
    return _words(body)[:300]


def _words(body: Any) -> str:
    if isinstance(body, str):
        return body
    if isinstance(body, list):
        return "; ".join(filter(None, map(_words, body)))
    if isinstance(body, dict):
        for key in ("reasons", "reason", "detail", "message", "error"):
            if body.get(key):
                return _words(body[key])
        bad = {k: v for k, v in body.items() if v is not True and k not in {"status", "ready"}}
        return "; ".join(f"{k}: {v}" for k, v in bad.items())
    return str(body)
