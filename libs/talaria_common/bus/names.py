"""What may name a subject, queue, bucket or key, and how large a message is: the same rules for every bus.

NATS itself takes `a..b` and `x.*.y` in a publish and only then drops it silently (NATS trap 5), so the check is here.
"""

from __future__ import annotations

import re
from functools import lru_cache

from talaria_common.bus.interface import Headers
from talaria_common.errors import BusNameError, PayloadTooLargeError

_PART = r"[^\s.*>\x00-\x1f\x7f]+"
_SUBJECT = re.compile(rf"{_PART}(?:\.{_PART})*")
_FILTER = re.compile(rf"(?:(?:{_PART}|\*)\.)*(?:{_PART}|\*|>)")
_QUEUE = re.compile(r"[^\s\x00-\x1f\x7f]*")
_BUCKET = re.compile(r"[a-zA-Z0-9_-]+")
_KEY = re.compile(r"[-/_=a-zA-Z0-9]+(?:\.[-/_=a-zA-Z0-9]+)*")


@lru_cache(maxsize=8192)
def check_subject(subject: str) -> str:
    """Return `subject` if something can be published on it, else raise BusNameError."""
    if not _SUBJECT.fullmatch(subject):
        raise BusNameError(f"{subject!r} is not a subject: tokens without spaces and wildcards, joined by dots")
    return subject


def check_filter(subject: str) -> str:
    """Return `subject` if it can be subscribed to (`*` for one token, a last `>` for the rest), else raise."""
    if not _FILTER.fullmatch(subject):
        raise BusNameError(f"{subject!r} is not a subject filter")
    return subject


def check_queue(queue: str) -> str:
    """Return `queue` if it names a queue group (or is empty: none), else raise BusNameError."""
    if not _QUEUE.fullmatch(queue):
        raise BusNameError(f"{queue!r} is not a queue group")
    return queue


def check_bucket(bucket: str) -> str:
    """Return `bucket` if it names a KV bucket or a stream, else raise BusNameError."""
    if not _BUCKET.fullmatch(bucket):
        raise BusNameError(f"{bucket!r} is not a bucket or stream name: letters, digits, '_' and '-'")
    return bucket


@lru_cache(maxsize=8192)
def check_key(key: str) -> str:
    """Return `key` if it is a legal KV key, else raise BusNameError."""
    if not _KEY.fullmatch(key):
        raise BusNameError(f"{key!r} is not a key: letters, digits, '-', '_', '/', '=' and inner dots; hash ids first")
    return key


def check_value(value: bytes) -> bytes:
    """Return `value` if it can be told from a deletion marker, else raise ValueError."""
    if not value:
        raise ValueError("a KV value must not be empty: NATS cannot tell it from a deletion marker")
    return value


def matches(subject: str, pattern: str) -> bool:
    """Whether a message on `subject` reaches a subscription on `pattern`."""
    have, want = subject.split("."), pattern.split(".")
    for i, part in enumerate(want):
        if part == ">":
            return len(have) > i
        if i >= len(have) or part not in ("*", have[i]):
            return False
    return len(have) == len(want)


def overlaps(one: str, other: str) -> bool:
    """Whether some subject matches both filters: then a stream on one would answer requests on the other (trap 2)."""
    a, b = one.split("."), other.split(".")
    for x, y in zip(a, b, strict=False):
        if ">" in (x, y):
            return True
        if x != y and "*" not in (x, y):
            return False
    return len(a) == len(b)


def message_bytes(data: bytes, headers: Headers | None) -> int:
    """Size of a message as the server counts it against max_payload: payload and header block.

    nats-py counts the payload alone, and the server closes the connection over a header block that passes the limit.
    """
    size = len(data)
    if headers:
        size += len("NATS/1.0\r\n\r\n") + sum(len(k.encode()) + len(v.encode()) + 4 for k, v in headers.items())
    return size


def check_size(data: bytes, headers: Headers | None, limit: int) -> int:
    """The message's size in bytes. Raises PayloadTooLargeError above `limit`."""
    size = message_bytes(data, headers)
    if size > limit:
        raise PayloadTooLargeError(f"the message has {size} bytes, the message bus carries {limit}")
    return size
