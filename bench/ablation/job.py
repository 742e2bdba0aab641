"""What one process of the benchmark is asked, and what it answers: JSON on its way in and out."""

from __future__ import annotations

from typing import Any

import msgspec

from bench.ablation.work import Work
from talaria_replay.measure import CallRecord
from talaria_replay.trace import Call


class Job(msgspec.Struct, kw_only=True):
    """One engine with one configuration, and the replays to run on it."""

    ablation: str
    paths: dict[str, str]
    context: int
    kv_tokens: int
    scale: float = 1.0
    """Our seconds for one of the paper's."""
    weights_bytes_per_s: float | None = None
    """Emulated link; None: the machine's own."""
    kv_bytes_per_s: float | None = None
    slots: dict[str, float] = {}
    """`SlotConfig`'s targets and budgets, ms."""
    replays: dict[str, list[Call]] = {}
    """By name; run in this order."""
    starts: dict[str, float] = {}
    """By session: when it begins within its replay, s, of those that are not held back by `concurrent`."""
    concurrent: int = 0
    """Sessions under way at a time: the next one, in the order of `starts`, begins when one has ended. 0: all."""
    unmeasured: bool = False
    """The scheduler knows no step's time when the replays begin, as in a simulation; the engine is warm either way."""
    prefix_tokens: int = 0
    """Instead of replays: measure a prefill of this length, and decode behind it."""


class Replay(msgspec.Struct, kw_only=True):
    """What came of one replay."""

    records: list[CallRecord]
    tokens: dict[str, list[int]]
    """By session/call."""
    slots: list[dict[str, Any]]
    switches: list[dict[str, Any]]
    wall_s: float
    scheduler_s: float
    """Time in the scheduler, look-ups of prefixes included."""
    engine_s: float
    """Time in steps and switches."""
    thread_s: float = 0.0
    """Processor time of the thread that decides, computes and switches; copies have threads of their own."""
    work: dict[str, Work] = {}
    """What its steps did and took, by model."""


class Profile(msgspec.Struct, kw_only=True):
    """Costs of one model."""

    prefix_tokens: int
    prefill_ms: float
    decode_ms: float
    weight_bytes: int
    kv_bytes_per_token: int


class Answer(msgspec.Struct, kw_only=True):
    """Of a process."""

    replays: dict[str, Replay] = {}
    profiles: dict[str, Profile] = {}
