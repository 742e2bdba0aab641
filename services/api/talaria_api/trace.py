"""W3C trace context: a caller's trace goes on, with this call as its own span."""

from __future__ import annotations

import re
import secrets

_TRACEPARENT = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


def child(traceparent: bytes | None) -> str:
    """A traceparent for this call: a new span of the caller's trace, or of a new trace if there is none to continue."""
    span = secrets.token_hex(8)
    match = _TRACEPARENT.fullmatch((traceparent or b"").strip())
    if match is not None:
        version, trace, parent, flags, extra = match.groups()
        known = version != b"ff" and (version != b"00" or extra is None)
        if known and trace.strip(b"0") and parent.strip(b"0"):
            return f"00-{trace.decode()}-{span}-{flags.decode()}"
    return f"00-{secrets.token_hex(16)}-{span}-00"
