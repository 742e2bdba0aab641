"""Converters from public trace files into the trace format. Where to get each source: docs/traces.md."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from talaria_replay import trace
from talaria_replay.trace import Call, TraceError

CHARS_PER_TOKEN = 4.0
"""For logs without counts only, and said so in the trace's documentation; a tokenizer gives exact counts."""

COUNTS = ("prompt_tokens", "completion_tokens")
"""What a log may say of an assistant message's call, in the message; no part of what was sent."""
MOST = 1 << 53
"""Tokens or blocks; beyond it a number in JSON is no exact one."""

Count = Callable[[str], int]


def rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, object) of a JSON-lines file, plain or gzipped. Raises TraceError on a line that is no object."""
    for number, line in trace.lines(path):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as e:
            raise TraceError(path, [f"line {number}: {e}; expected a JSON object"]) from e
        if not isinstance(row, dict):
            raise TraceError(path, [f"line {number}: expected an object, got {_kind(row)}"])
        if b"\\u" in line:
            _check_text(path, number, row)
        yield number, row


def _check_text(path: Path, number: int, row: dict[str, Any]) -> None:
    """JSON can write half of a surrogate pair, which is no text and can be written nowhere."""
    for name, value in row.items():
        try:
            json.dumps([name, value], ensure_ascii=False).encode()
        except UnicodeEncodeError as e:
            half = f"\\u{ord(e.object[e.start]):04x}"
            raise TraceError(
                path, [f"line {number}: field {name!a}: expected text, got half of a surrogate pair ({half})"]
            ) from e


class _Row:
    """A line of a source; what it gives is checked. Raises TraceError with file, line, field and what was expected."""

    def __init__(self, path: Path, number: int, row: dict[str, Any]) -> None:
        self._path, self._number, self._row = path, number, row

    def wrong(self, name: str, expected: str, value: Any) -> TraceError:
        """The error to raise: `value` in field `name`."""
        shown = "" if isinstance(value, dict | list) else f" {value!r}"
        return TraceError(
            self._path, [f"line {self._number}: field {name!r}: expected {expected}, got {_kind(value)}{shown}"]
        )

    def text(self, name: str) -> str:
        """A string."""
        value = self._there(name)
        if not isinstance(value, str):
            raise self.wrong(name, "a string", value)
        return value

    def text_or_none(self, name: str) -> str | None:
        """A string; None where it is null or missing."""
        return None if self._row.get(name) is None else self.text(name)

    def count(self, name: str) -> int:
        """A number of tokens or blocks."""
        return self.as_count(name, self._there(name))

    def as_count(self, name: str, value: Any) -> int:
        """`value`, which stands in field `name`, as `count`."""
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MOST:
            raise self.wrong(name, "an integer >= 0", value)
        return value

    def count_or_0(self, name: str) -> int:
        """As `count`; 0 where it is null or missing."""
        return 0 if self._row.get(name) is None else self.count(name)

    def seconds_or_none(self, name: str) -> float | None:
        """A time; None where it is null or missing."""
        value = self._row.get(name)
        if value is None:
            return None
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < math.inf:
            raise self.wrong(name, "a number of seconds >= 0", value)
        return float(value)

    def _there(self, name: str) -> Any:
        if name not in self._row:
            has = ", ".join(sorted(self._row))
            raise TraceError(self._path, [f"line {self._number}: field {name!r} is missing; it has {has}"])
        return self._row[name]


def swebench_calls(path: Path, *, model: str | None = None) -> Iterator[Call]:
    """mini-swe-agent's per-call records (append-only history, so the whole previous context is reusable).

    Of an answer only what went into the history is: `reasoning_tokens`, which `completion_tokens` contains, did not.
    Its timestamps are not usable as gaps: `gap_s` is left out.
    """
    before: dict[str, Call] = {}
    thought: dict[str, int] = {}
    for number, fields in rows(path):
        row = _Row(path, number, fields)
        session = row.text("session")
        prompt = max(1, row.count("prompt_tokens"))
        last = before.get(session)
        said = 0 if last is None else max(0, last.completion_tokens - thought[session])
        reusable = 0 if last is None else min(prompt, last.prompt_tokens + said)
        thought[session] = row.count_or_0("reasoning_tokens")
        call = Call(
            session=session,
            call=0 if last is None else last.call + 1,
            model=model or row.text_or_none("model") or "unknown",
            prompt_tokens=prompt,
            completion_tokens=max(1, row.count("completion_tokens")),
            reusable_tokens=reusable,
        )
        before[session] = call
        yield call


def claude_code_calls(path: Path, *, model: str | None = None, gap_cap_s: float | None = None) -> Iterator[Call]:
    """Claude Code's per-call records with 64-token block hashes of the prompts.

    Reuse of a cut prompt is exact to the block. Blocks do not show answers: where all blocks of the previous prompt
    return and there is room for its answer behind them, prompt and answer are taken for reusable whole.
    `think_time` there includes people, not only tools: it becomes the gap, and `gap_cap_s` caps it.
    """
    block = 64
    before: dict[str, Call] = {}
    for number, fields in rows(path):
        row = _Row(path, number, fields)
        session = row.text("session")
        prompt = max(1, row.count("prompt_tokens"))
        last = before.get(session)
        common = row.count_or_0("lcp_prev_blocks")
        reusable = 0 if last is None else min(block * common, prompt, last.prompt_tokens)
        context = 0 if last is None else last.prompt_tokens + last.completion_tokens
        if common and common == row.count_or_0("prev_blocks") and prompt >= context:
            reusable = context
        think = row.seconds_or_none("think_time")
        gap = None if last is None or think is None else min(think, gap_cap_s or think)
        call = Call(
            session=session,
            call=0 if last is None else last.call + 1,
            model=model or row.text_or_none("model") or "unknown",
            prompt_tokens=prompt,
            completion_tokens=max(1, row.count("completion_tokens")),
            reusable_tokens=reusable,
            gap_s=gap,
            gap_source="none" if gap is None else "recorded",
            parent=row.text_or_none("parent"),
        )
        before[session] = call
        yield call


def message_logs(path: Path, *, model: str, count: Count | None = None, texts: bool = True) -> Iterator[Call]:
    """Logs of whole conversations, one per line, OpenAI messages under "messages" or "traj".

    Each assistant message is one call whose prompt is everything before it. Token counts are those that the message
    gives (COUNTS, which are taken out of it), else the context of the call before and what `count` says of the messages
    since; without `count` it is one token for four characters. A conversation is named by
    session, instance_id, task_id and trial, as many as there are; two lines of one name are a mistake.
    """
    measure = count or (lambda text: max(1, round(len(text) / CHARS_PER_TOKEN)))
    lines: dict[str, int] = {}
    for number, fields in rows(path):
        row = _Row(path, number, fields)
        under = "messages" if fields.get("messages") else "traj"
        messages = fields.get(under)
        if not isinstance(messages, list):
            raise TraceError(path, [f"line {number}: expected a list of messages in field 'messages' or 'traj'"])
        names = [k for k in ("session", "instance_id", "task_id", "trial") if fields.get(k) is not None]
        session = "-".join(str(fields[k]) for k in names) or f"line-{number}"
        first = lines.setdefault(session, number)
        if first != number:
            raise row.wrong("-".join(names), f"another name than that of line {first}", session)
        for n, message in enumerate(messages):
            _check_message(row, f"{under}[{n}]", message)
            for name in COUNTS:
                if message.get(name) is not None:
                    row.as_count(f"{under}[{n}].{name}", message[name])
        yield from _conversation(session, messages, model, measure, texts)


def _check_message(row: _Row, name: str, message: Any) -> None:
    if not isinstance(message, dict):
        raise row.wrong(name, "a message (an object)", message)
    content = message.get("content")
    for n, part in enumerate(content if isinstance(content, list) else ()):
        if not isinstance(part, dict) or not isinstance(part.get("text", ""), str):
            raise row.wrong(f"{name}.content[{n}]", 'an object, "text" in it a string', part)
    if (problem := trace.wrong_in_message(message)) is not None:
        field, expected = problem
        raise row.wrong(f"{name}.{field}", expected, message.get(field))


def _kind(value: Any) -> str:
    """The JSON name of a value's type."""
    names = {dict: "object", list: "array", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")


def _conversation(
    session: str, messages: list[dict[str, Any]], model: str, measure: Count, texts: bool
) -> Iterator[Call]:
    plain = [{k: v for k, v in message.items() if k not in COUNTS} for message in messages]
    sizes = [measure(_text(m)) for m in plain]
    known = 0  # tokens of the previous prompt and completion
    number = since = 0
    for at, message in enumerate(messages):
        if message.get("role") != "assistant" or at == 0:
            continue
        prompt = max(1, message.get("prompt_tokens") or known + sum(sizes[since:at]))
        completion = max(1, message.get("completion_tokens") or sizes[at])
        yield Call(
            session=session,
            call=number,
            model=model,
            prompt_tokens=prompt,
            completion_tokens=completion,
            reusable_tokens=min(known, prompt),
            messages=plain[:at] if texts else None,
        )
        known, since = prompt + completion, at + 1
        number += 1


def _text(message: dict[str, Any]) -> str:
    content = message.get("content") or ""
    if isinstance(content, list):
        content = "".join(part.get("text", "") for part in content)
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
