"""When a snapshot replaces another and when an instance is stale: one rule for telemetry and routers (4.1).

Ages are measured by the receiver's own clock, so that clocks which differ between hosts do no harm. The sender's
`at_ms` is only compared with another `at_ms` of the same instance.
"""

from __future__ import annotations

from typing import Literal

from talaria_common.wire.snapshot import Snapshot

Health = Literal["ok", "stale", "gone"]
HEALTHS: tuple[Health, ...] = ("ok", "stale", "gone")
"""From good to bad."""

GONE_FACTOR = 10
"""An instance is gone, not just stale, after this many times the stale age."""

GATHER_HEARTBEATS = 1.25
"""After a start, by this long every living instance has been heard once."""


def supersedes(new: Snapshot, old: Snapshot | None, *, old_is_stale: bool = False) -> bool:
    """Whether `new` is to replace `old` of the same instance.

    Within an epoch the higher version wins: duplicates and reordered messages lose. Across epochs the later `at_ms`
    wins, so a delayed message of an earlier life does not return. But a stale `old` gives way to whatever is not that
    message again: else an instance whose clock was set back over its restart would be ignored until the clock had
    caught up, and one damaged message with a version out of reach would end its instance for good.
    """
    if old is None:
        return True
    if new.epoch == old.epoch:
        return new.version > old.version or (old_is_stale and new.version != old.version)
    return old_is_stale or new.at_ms > old.at_ms


def health_of(age_s: float, heartbeat_s: float, missed: int) -> Health:
    """Health by age: stale once more than `missed` heartbeats went by, gone after GONE_FACTOR times that."""
    limit = heartbeat_s * missed
    if age_s <= limit:
        return "ok"
    return "stale" if age_s <= limit * GONE_FACTOR else "gone"
