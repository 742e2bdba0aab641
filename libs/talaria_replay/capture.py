"""A live mesh's own traffic as a trace, read off the bus. Pure: the shell in the CLI feeds it.

What the bus tells exactly: session (hashed), model, token counts, and when a call asked and when it ended, by the
listener's clock (a route event, less the wait that it tells of; a completion); the gap is the time between, less the
time in which calls between them failed. A client that came back after a refusal counts from its last try. What the bus
does not tell is the common prefix of two prompts (appendix A): a prompt at least as long as the previous prompt and
answer is taken for their continuation; of a shorter one (compaction) only what the cache really had counts as reusable.
Texts are left out unless forwards are fed as well.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from talaria_common.wire import Completion, Event, ForwardHead
from talaria_replay.trace import Call

MAX_OPEN = 100_000
"""Calls remembered between their asking and their end; the oldest are forgotten (their completion was lost)."""

Key = tuple[str, str, str]
"""tenant, session, model."""


@dataclass(slots=True)
class _Session:
    name: str
    calls: int = 0
    context: int = 0
    """Previous prompt and completion, tokens."""
    ended: float = 0.0
    failed: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Since then, by call: when it asked and when its last attempt failed."""


@dataclass(slots=True)
class _Open:
    asked: float
    messages: list[dict[str, Any]] | None = None
    routed: bool = False
    """Its route event was seen, which tells `asked`; else only its forward was."""
    failed: bool = False
    """An attempt did; another one may follow."""


@dataclass(slots=True)
class Capture:
    """Turns route events and completions into calls.

    Attributes:
        failed: calls that failed or were aborted, at their last attempt: they are in no trace.
        unseen: calls whose asking came before the capture began: they have no gap.
    """

    failed: int = 0
    unseen: int = 0
    _open: OrderedDict[str, _Open] = field(default_factory=OrderedDict)
    _sessions: dict[Key, _Session] = field(default_factory=dict)
    _names: set[str] = field(default_factory=set)

    def routed(self, now: float, event: Event) -> None:
        """A route event: the call asked `waited_ms` before it. Later attempts of the same call change nothing."""
        rid = event.data.get("rid")
        if not isinstance(rid, str):
            return
        call = self._opened(now, rid)
        if not call.routed:
            waited_ms = event.data.get("waited_ms", 0.0)
            waited_s = waited_ms / 1000 if isinstance(waited_ms, int | float) else 0.0
            call.asked, call.routed = min(call.asked, now - waited_s), True

    def forwarded(self, now: float, head: ForwardHead, body: bytes) -> None:
        """A call's body, for captures with texts. It may come before the call's route event."""
        if head.endpoint != "chat":
            return
        known = self._opened(now, head.placement.fence.rid)
        try:
            messages = json.loads(body).get("messages")
        except (ValueError, AttributeError):
            return
        if isinstance(messages, list):
            known.messages = messages

    def completed(self, now: float, done: Completion) -> Call | None:
        """An attempt ended; returns the call as a line of the trace, None if it failed."""
        call = self._open.get(done.rid)
        key = (done.tenant, done.session, done.model)
        session = self._sessions.get(key)
        if not done.ok or done.prompt_tokens < 1:
            # It is placed again, perhaps; the agent has been waiting since it asked first.
            self.failed += call is None or not call.failed
            if call is not None:
                call.failed = True
                if session is not None:
                    session.failed[done.rid] = (call.asked, now)
            return None
        if call is not None:
            del self._open[done.rid]
            self.failed -= call.failed
        self.unseen += call is None
        if session is None:
            session = self._sessions[key] = _Session(self._name(done))
        session.failed.pop(done.rid, None)
        gap = None if call is None or not session.calls else _gap(session, call.asked)
        whole = done.prompt_tokens >= session.context
        reusable = session.context if whole else min(done.cached_tokens, session.context, done.prompt_tokens)
        made = Call(
            session=session.name,
            call=session.calls,
            model=done.model,
            prompt_tokens=done.prompt_tokens,
            completion_tokens=done.completion_tokens,
            reusable_tokens=reusable,
            gap_s=gap,
            gap_source="none" if gap is None else "recorded",
            messages=call.messages if call else None,
        )
        session.calls += 1
        session.context = done.prompt_tokens + done.completion_tokens
        session.ended = now
        session.failed.clear()
        return made

    def _opened(self, now: float, rid: str) -> _Open:
        call = self._open.setdefault(rid, _Open(now))
        if len(self._open) > MAX_OPEN:
            self._open.popitem(last=False)
        return call

    def _name(self, done: Completion) -> str:
        """Short, and told apart where one session uses several models or two tenants' hashes begin alike."""
        for name in (
            done.session[:16],
            f"{done.session[:16]}@{done.model}",
            f"{done.session}@{done.model}@{done.tenant}",
        ):
            if name not in self._names:
                self._names.add(name)
                return name
        raise AssertionError("a session is named once")


def _gap(session: _Session, asked: float) -> float:
    """Seconds from the session's last answer to `asked` in which none of its calls was under way."""
    gap, free = 0.0, session.ended
    for began, ended in sorted(session.failed.values()):
        gap += max(0.0, min(began, asked) - free)
        free = max(free, ended)
    return round(gap + max(0.0, asked - free), 6)
