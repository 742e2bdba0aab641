"""One line of text per message, for `talaria tap`. Pure; remembers only what it printed last of each instance."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from talaria_common import subjects
from talaria_common.wire import ClusterView, Completion, Event, ModelState, Snapshot, WireError, decode

QUIET_S = 10.0
"""An instance whose snapshot says the same as before is printed again after this."""
_FIRST = ("rid", "attempt", "model", "iid", "chosen", "via", "session", "from", "to", "reason", "state", "status")
"""Event fields that people look for first."""
_SHORTEN = {"rid", "session", "epoch", "lease"}


class Lines:
    """Turns messages into lines."""

    def __init__(self) -> None:
        self._shown: dict[str, tuple[Any, float]] = {}

    def render(self, subject: str, data: bytes, now: float) -> str | None:
        """The line for a message seen at `now` (Unix seconds); None for a snapshot that says nothing new."""
        kind, *rest = subject.removeprefix(f"{subjects.ROOT}.").split(".")
        try:
            match kind:
                case "event":
                    return self._event(decode(data, Event))
                case "completion":
                    return self._completion(decode(data, Completion))
                case "snapshot":
                    return self._snapshot(decode(data, Snapshot), now)
                case "cluster":
                    return self._cluster(decode(data, ClusterView))
        except WireError as e:
            return f"{_clock(now)}  ?           {subject}: {e}"
        text = data[:200].decode("utf-8", "replace").replace("\n", " ")
        more = f" … {len(data)} bytes" if len(data) > 200 else ""
        return f"{_clock(now)}  {'.'.join([kind, *rest])}  {text}{more}"

    def _event(self, event: Event) -> str:
        data = dict(event.data)
        fields = [_field(k, data.pop(k)) for k in _FIRST if k in data]
        fields += [_field(k, v) for k, v in data.items()]
        return _line(event.at_ms, event.kind, event.source, " ".join(f for f in fields if f))

    def _completion(self, c: Completion) -> str:
        ended = "ok" if c.ok else "not ok"
        return _line(
            c.at_ms,
            "completion",
            c.iid,
            f"rid={c.rid[:8]} attempt={c.attempt} model={c.model} session={c.session[:8]} {ended}"
            f" prompt={c.prompt_tokens} cached={c.cached_tokens}({c.cache_source}) out={c.completion_tokens}"
            f" queue={c.queue_ms:.0f}ms ttft={c.ttft_ms:.0f}ms total={c.total_ms:.0f}ms",
        )

    def _snapshot(self, s: Snapshot, now: float) -> str | None:
        models = " ".join(map(_model, s.models))
        gist = (s.epoch, s.status, s.reason, s.active_model, models, s.switches, s.engine_restarts)
        before = self._shown.get(s.iid)
        if before is not None and before[0] == gist and now - before[1] < QUIET_S:
            return None
        self._shown[s.iid] = (gist, now)
        status = f"{s.status} ({s.reason})" if s.reason else s.status
        return _line(s.at_ms, "snapshot", s.iid, f"v{s.version} {status} switches={s.switches} {models}")

    def _cluster(self, view: ClusterView) -> str:
        rows = " ".join(f"{v.snapshot.iid}:{v.health}/{v.snapshot.status}/{v.age_ms}ms" for v in view.instances)
        gone = f" removed: {', '.join(view.removed)}" if view.removed else ""
        return _line(
            view.at_ms, "cluster", view.telemetry, f"v{view.version} {'full' if view.full else 'delta'} {rows}{gone}"
        )


def _model(m: ModelState) -> str:
    load = f" {m.running} running" if m.running else ""
    load += f" {m.queued} queued" if m.queued else ""
    return f"{m.name}[{m.state}{load} kv {m.kv_used_tokens}/{m.kv_capacity_tokens}]"


def _line(at_ms: int, kind: str, source: str, text: str) -> str:
    return f"{_clock(at_ms / 1000)}  {kind:<10}  {source:<12}  {text}".rstrip()


def _clock(at: float) -> str:
    return f"{time.strftime('%H:%M:%S', time.localtime(at))}.{int(at * 1000) % 1000:03d}"


def _field(key: str, value: Any) -> str:
    if value is None or value in ("", [], {}):
        return ""
    if key in _SHORTEN and isinstance(value, str):
        value = value[:8]
    if isinstance(value, float):
        value = f"{value:.1f}"
    if isinstance(value, list) and value and isinstance(value[0], dict):  # candidates of a route, with their costs
        value = "[" + "; ".join(_row(row) for row in value) + "]"
    elif isinstance(value, dict | list):
        value = msgspec.json.encode(value).decode()
    return f"{key}={value}"


def _row(row: dict[str, Any]) -> str:
    return ",".join(f"{v:.0f}" if isinstance(v, float) else str(v) for v in row.values())
