"""Identifiers: how they are made, hashed and checked.

Request ids have one fixed length (ids of varying length have been matched by prefix in other systems, so that aborting
one request ended another). What a client chose (session ids, API keys) never reaches a subject, a KV key or the bus:
only its hash does.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from functools import lru_cache

PARTITIONS = 256
"""Number of router partitions. A constant of protocol v1: changing it moves every session."""

RID_LENGTH = 32
_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_\-]{0,62}[A-Za-z0-9])?")
NAME_PATTERN = rf"\A{_NAME.pattern}\Z"
"""The whole of a name that `check_name` lets pass."""
MODEL_CHARS = 128
"""The longest name that a model may have."""
_MODEL = re.compile(rf"[A-Za-z0-9](?:[A-Za-z0-9_.:/@+\-]{{0,{MODEL_CHARS - 2}}}[A-Za-z0-9])?")


def new_rid() -> str:
    """A fresh request id: 32 hex digits."""
    return secrets.token_hex(16)


def new_epoch() -> str:
    """An id for one life of a process: 12 hex digits. A restart is a new epoch."""
    return secrets.token_hex(6)


def hash_id(*parts: str) -> str:
    """128-bit BLAKE2b of the parts, as 32 hex digits: stable across processes, safe as a subject token and KV key.

    The parts are length-prefixed, so that ("a", "bc") and ("ab", "c") differ.
    """
    joined = bytearray()
    for part in parts:
        raw = part.encode("utf-8", "surrogatepass")
        joined += len(raw).to_bytes(8, "little")
        joined += raw
    return hashlib.blake2b(joined, digest_size=16).hexdigest()


@lru_cache(8192)
def partition_of(tenant: str, session: str, model: str) -> int:
    """The router partition, 0..255, that owns (tenant, session, model). DESIGN: hash mod 256."""
    return int(hash_id(tenant, session, model)[:8], 16) % PARTITIONS


@lru_cache(4096)
def check_name(value: str, what: str = "name") -> str:
    """Return `value` if it may be a subject token (instance, api, router or tenant name), else raise ValueError."""
    if not _NAME.fullmatch(value):
        raise ValueError(f"{what} {value!r}: letters, digits, '-' and '_', 1 to 64 characters, not '-' at an end")
    return value


def check_model_name(value: str) -> str:
    """Return `value` if it may name a model in the catalog, else raise ValueError."""
    if not _MODEL.fullmatch(value):
        raise ValueError(f"model name {value!r}: letters, digits and '_.:/@+-', 1 to 128 characters")
    return value
