"""Session identity: which of the conventions that agents use names this call's session (NATS.md, HTTP edge facts).

Pure: headers and a few body fields in, a `SessionRef` out. The first convention that is present wins:

    X-Talaria-Session-ID                        header
    X-Dynamo-Session-ID                         dynamo
    x-claude-code-agent-id, -session-id         claude-code   a subagent is a session of its own, its parent the session
    thread-id                                   codex
    x-session-id, x-session-affinity            x-session
    x-litellm-session-id                        litellm
    metadata.session_id, metadata.user_id       metadata      Claude Code puts JSON with a session_id into user_id
    prompt_cache_key                            prompt-cache-key
    how the conversation begins                 prefix        low confidence

`user` and `safety_identifier` name people, not sessions, and are not read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple
from urllib.parse import quote

import msgspec

from talaria_common.ids import hash_id
from talaria_common.wire.route import SessionSource

MAX_ECHO_CHARS = 256
"""A longer id is cut in the response header; what identifies the session is the hash of all of it."""

PREFIX_BYTES = 1024
"""How much of a bare prompt stands for the beginning of the conversation."""

OPENING_CHARS = 1 << 16
"""How much of each message at the beginning of a chat is hashed."""

_ONE_HEADER: tuple[tuple[bytes, SessionSource], ...] = (
    (b"thread-id", "codex"),
    (b"x-session-id", "x-session"),
    (b"x-session-affinity", "x-session"),
    (b"x-litellm-session-id", "litellm"),
)
_FAMILIES: tuple[tuple[bytes, SessionSource], ...] = ((b"x-talaria", "header"), (b"x-dynamo", "dynamo"))
_CLAUDE_USER = re.compile(r"^user_.*_session_([0-9A-Za-z\-]+)$")
_TRUE = frozenset({"1", "true", "yes", "on"})
_ECHO_SAFE = " !\"#$&'()*+,/:;<=>?@[\\]^`{|}~"


class SessionRef(NamedTuple):
    """A call's session."""

    id: str
    """As the client named it, or a hash for source "prefix"."""
    source: SessionSource
    parent: str | None = None
    final: bool = False

    def key(self, tenant: str) -> str:
        """What goes on the bus: nobody but this api sees the client's own id."""
        return hash_id(tenant, self.id)

    def parent_key(self, tenant: str) -> str | None:
        """The parent's key, if a parent was named."""
        return None if self.parent is None else hash_id(tenant, self.parent)

    def echo(self) -> bytes:
        """The id as a header value: printable ASCII, everything else percent-encoded, at most MAX_ECHO_CHARS."""
        return quote(self.id, safe=_ECHO_SAFE, errors="replace").strip().encode("ascii")[:MAX_ECHO_CHARS]


class BodyHints(NamedTuple):
    """The body fields that may name a session, and how the conversation begins."""

    metadata: Mapping[str, Any] | None
    prompt_cache_key: str | None
    opening: Callable[[], tuple[str, ...]]
    """The parts that are hashed for the prefix chain: role and text in turn, or the first bytes of the prompt. Called
    only when nothing names the session: it has to read the texts."""


def identify(headers: Mapping[bytes, bytes], hints: BodyHints, tenant: str) -> SessionRef:
    """The session of a call. `headers` by lower-case name; never fails, the prefix chain is always there."""
    named = _by_header(headers) or _by_body(hints)
    if named is None:
        named = SessionRef(hash_id("prefix", tenant, *hints.opening()), "prefix")
    for prefix, _ in _FAMILIES:
        parent = _text(headers, prefix + b"-parent-session-id")
        if parent and named.parent is None:
            named = named._replace(parent=parent)
        if _text(headers, prefix + b"-session-final").lower() in _TRUE:
            named = named._replace(final=True)
    return named


def _by_header(headers: Mapping[bytes, bytes]) -> SessionRef | None:
    for prefix, source in _FAMILIES:
        if value := _text(headers, prefix + b"-session-id"):
            return SessionRef(value, source)
    session = _text(headers, b"x-claude-code-session-id")
    if agent := _text(headers, b"x-claude-code-agent-id"):
        return SessionRef(agent, "claude-code", parent=session or None)
    if session:
        return SessionRef(session, "claude-code")
    for name, source in _ONE_HEADER:
        if value := _text(headers, name):
            return SessionRef(value, source)
    return None


def _by_body(hints: BodyHints) -> SessionRef | None:
    metadata = hints.metadata or {}
    if value := _string(metadata.get("session_id")) or _from_user_id(_string(metadata.get("user_id"))):
        return SessionRef(value, "metadata")
    if value := _string(hints.prompt_cache_key):
        return SessionRef(value, "prompt-cache-key")
    return None


def _from_user_id(value: str) -> str:
    """The session in `metadata.user_id`: Claude Code's JSON, its older `user_…_session_…`, else the value itself.

    JSON without a session names a person, so it names no session.
    """
    if value.startswith("{"):
        try:
            content = msgspec.json.decode(value)
        except (msgspec.DecodeError, RecursionError):
            return value
        return _string(content.get("session_id")) if isinstance(content, dict) else value
    match = _CLAUDE_USER.match(value)
    return match.group(1) if match else value


def _text(headers: Mapping[bytes, bytes], name: bytes) -> str:
    value = headers.get(name)
    if not value:
        return ""
    try:
        return value.decode("utf-8").strip()
    except UnicodeDecodeError:
        return value.decode("latin-1").strip()


def _string(value: object) -> str:
    return value.strip() if isinstance(value, str) else ""
