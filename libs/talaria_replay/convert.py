"""Converters from public trace files into the trace format. Where to get each source: docs/traces.md."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from talaria_replay.trace import Call, TraceError

CHARS_PER_TOKEN = 4.0
"""For logs without counts only, and said so in the trace's documentation; a tokenizer gives exact counts."""

Count = Callable[[str], int]


def rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, object) of a JSON-lines file, plain or gzipped. Raises TraceError on a line that is no object."""
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as e:
                raise TraceError([f"line {number}: {e}"]) from e
            if not isinstance(row, dict):
                raise TraceError([f"line {number}: expected an object, got {type(row).__name__}"])
            yield number, row


def _field(row: dict[str, Any], name: str, number: int) -> Any:
    if name not in row:
        raise TraceError([f"line {number}: field {name!r} is missing; it has {', '.join(sorted(row))}"])
    return row[name]


def swebench_calls(path: Path, *, model: str | None = None) -> Iterator[Call]:
    """mini-swe-agent's per-call records (append-only history, so the whole previous context is reusable).

    Its timestamps are not usable as gaps: `gap_s` is left out.
    """
    before: dict[str, Call] = {}
    for number, row in rows(path):
        session = _field(row, "session", number)
        prompt = max(1, _field(row, "prompt_tokens", number))
        last = before.get(session)
        reusable = 0 if last is None else min(prompt, last.prompt_tokens + last.completion_tokens)
        call = Call(
            session=session,
            call=0 if last is None else last.call + 1,
            model=model or row.get("model") or "unknown",
            prompt_tokens=prompt,
            completion_tokens=max(1, _field(row, "completion_tokens", number)),
            reusable_tokens=reusable,
        )
        before[session] = call
        yield call


def claude_code_calls(path: Path, *, model: str | None = None, gap_cap_s: float | None = None) -> Iterator[Call]:
    """Claude Code's per-call records with 64-token block hashes; reuse is exact to the block.

    `think_time` there includes people, not only tools: it becomes the gap, and `gap_cap_s` caps it.
    """
    block = 64
    before: dict[str, Call] = {}
    for number, row in rows(path):
        session = _field(row, "session", number)
        prompt = max(1, _field(row, "prompt_tokens", number))
        last = before.get(session)
        common = 0 if last is None else min(block * (row.get("lcp_prev_blocks") or 0), prompt, last.prompt_tokens)
        think = row.get("think_time")
        gap = None if last is None or think is None else min(float(think), gap_cap_s or float(think))
        call = Call(
            session=session,
            call=0 if last is None else last.call + 1,
            model=model or row.get("model") or "unknown",
            prompt_tokens=prompt,
            completion_tokens=max(1, _field(row, "completion_tokens", number)),
            reusable_tokens=common,
            gap_s=gap,
            gap_source="none" if gap is None else "recorded",
            parent=row.get("parent"),
        )
        before[session] = call
        yield call


def message_logs(path: Path, *, model: str, count: Count | None = None, texts: bool = True) -> Iterator[Call]:
    """Logs of whole conversations, one per line, OpenAI messages under "messages" or "traj".

    Each assistant message is one call whose prompt is everything before it. Token counts come from `count`, else
    from four characters a token.
    """
    measure = count or (lambda text: max(1, round(len(text) / CHARS_PER_TOKEN)))
    for number, row in rows(path):
        messages = row.get("messages") or row.get("traj")
        if not isinstance(messages, list):
            raise TraceError([f"line {number}: neither 'messages' nor 'traj' is a list"])
        parts = [row.get(k) for k in ("session", "instance_id", "task_id", "trial") if row.get(k) is not None]
        yield from _conversation("-".join(map(str, parts)) or f"line-{number}", messages, model, measure, texts)


def _conversation(
    session: str, messages: list[dict[str, Any]], model: str, measure: Count, texts: bool
) -> Iterator[Call]:
    sizes = [measure(_text(m)) for m in messages]
    known = 0  # tokens of the previous prompt and completion
    number = 0
    for at, message in enumerate(messages):
        if message.get("role") != "assistant" or at == 0:
            continue
        prompt = max(1, sum(sizes[:at]))
        yield Call(
            session=session,
            call=number,
            model=model,
            prompt_tokens=prompt,
            completion_tokens=max(1, sizes[at]),
            reusable_tokens=min(known, prompt),
            messages=messages[:at] if texts else None,
        )
        known = prompt + max(1, sizes[at])
        number += 1


def _text(message: dict[str, Any]) -> str:
    content = message.get("content") or ""
    if isinstance(content, list):
        content = "".join(part.get("text", "") for part in content if isinstance(part, dict))
    calls = message.get("tool_calls")
    return f"{content}{json.dumps(calls) if calls else ''}"


def with_gaps(calls: Iterable[Call], draw: Callable[[], float]) -> Iterator[Call]:
    """The calls, those without a gap given a synthetic one (first calls keep none)."""
    for call in calls:
        if call.call and call.gap_s is None:
            yield msgspec.structs.replace(call, gap_s=draw(), gap_source="synthetic")
        else:
            yield call


FORMATS: dict[str, Callable[..., Iterator[Call]]] = {
    "swebench": swebench_calls,
    "claude-code": claude_code_calls,
    "messages": message_logs,
}
