"""What the router core is told and what it wants done: its whole surface beside the wire structs.

The core also takes the wire structs `Completion`, `ClusterView` and `Snapshot` as they are.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from talaria_common.wire import ClusterView, Completion, Event, RouteReply, RouteRequest, SessionRecord, Snapshot


class Ask(NamedTuple):
    """A call wants a place. `to` comes back untouched in the `Reply`."""

    request: RouteRequest
    to: object = None


class Probed(NamedTuple):
    """The health probe of `iid` ended: `ok` if it answered in time that it is ready, in the life `epoch`."""

    iid: str
    ok: bool
    epoch: str = ""


class Restored(NamedTuple):
    """The bucket's answer to `Load`: the record, or None."""

    key: str
    record: SessionRecord | None


class Gained(NamedTuple):
    """A partition is ours under revision `rev`. `may_hold`: it had an owner before, so the bucket may know sessions."""

    partition: int
    rev: int
    may_hold: bool = True


class Lost(NamedTuple):
    """A partition is no longer ours."""

    partition: int


class Controlled(NamedTuple):
    """The answer to a `Control`; `ok` False: refused, or no answer came."""

    control: Control
    ok: bool


class Heard(NamedTuple):
    """Whether the bus can be heard, from now on."""

    connected: bool


class Tick(NamedTuple):
    """Time has passed: leases, placements, waits and staleness are looked at. Every 50 to 100 ms."""


Input = Ask | Completion | ClusterView | Snapshot | Probed | Restored | Gained | Lost | Controlled | Heard | Tick


class Reply(NamedTuple):
    """Answer an `Ask`."""

    to: object
    reply: RouteReply


class Emit(NamedTuple):
    """Publish an event."""

    event: Event


class Probe(NamedTuple):
    """Ask the instance itself whether it is healthy; answer with `Probed`, also when it stays silent."""

    iid: str


class Control(NamedTuple):
    """Have `iid` open or close `model`; answer with `Controlled`."""

    iid: str
    verb: Literal["open", "close"]
    model: str


class Load(NamedTuple):
    """Read one session's record; answer with `Restored`. The core waits RESTORE_WAIT_S at most."""

    key: str


class Dirty(NamedTuple):
    """The record of `key` changed or is gone: write `core.record(key)` behind."""

    key: str


class Follow(NamedTuple):
    """Listen to the instances' own snapshots (True) because the cluster view is silent, or stop it (False)."""

    on: bool


Effect = Reply | Emit | Probe | Load | Control | Dirty | Follow
