"""Request bodies of a stated size that look like an agent's: many messages of prose and code, with escapes."""

from __future__ import annotations

import json
import random

MESSAGE_BYTES = 2048
"""An agent's transcript is many messages of about this size, not one long one."""

_TEXT = """the call returns a prefix of blocks and def run(self, step: int) -> None: slot round lease "quoted"
path/to/file.py import os print(f'{x!r}') assert error at line 42 expected None but got tokens cache ü prefill decode"""
_WORDS = _TEXT.split()

SIZES = {"1kb": 1_000, "100kb": 100_000, "400kb": 400_000}


def messages(size_bytes: int, seed: int) -> list[dict[str, str]]:
    """Messages whose text is `size_bytes` long in all; the same for the same seed."""
    pick = random.Random(seed)
    out: list[dict[str, str]] = []
    left = size_bytes
    while left > 0:
        want = min(left, MESSAGE_BYTES)
        parts: list[str] = [f"step {seed}-{len(out)}:"]
        length = len(parts[0])
        while length < want:
            word = pick.choice(_WORDS)
            parts.append(("\n    " if pick.random() < 0.1 else " ") + word)
            length += len(parts[-1])
        out.append({"role": "user" if len(out) % 2 == 0 else "assistant", "content": "".join(parts)[:want]})
        left -= want
    if out[-1]["role"] == "assistant":
        out[-1]["role"] = "user"
    return out


def body(size_bytes: int, *, seed: int, model: str, tokens: int, stream: bool) -> bytes:
    """A chat request's JSON."""
    request: dict[str, object] = {
        "model": model,
        "messages": messages(size_bytes, seed),
        "max_tokens": tokens,
        "temperature": 0,
        "stream": stream,
    }
    if stream:
        request["stream_options"] = {"include_usage": True}
    return json.dumps(request).encode()


def http_request(payload: bytes, *, port: int, session: str) -> bytes:
    """The whole HTTP/1.1 request, ready to be written again and again."""
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\n"
        f"Host: 127.0.0.1:{port}\r\n"
        "Content-Type: application/json\r\n"
        "Accept: */*\r\n"
        "Authorization: Bearer sk-bench\r\n"
        f"{f'X-Talaria-Session-ID: {session}' if session else 'User-Agent: bench'}\r\n"
        f"Content-Length: {len(payload)}\r\n\r\n"
    )
    return head.encode() + payload
