"""What the telemetry core is told and what it wants published. It also takes the wire's `Snapshot` as it is."""

from __future__ import annotations

from typing import NamedTuple

from talaria_common.wire import ClusterView, Event, Presence, Snapshot


class Present(NamedTuple):
    """The presence bucket's entry of an instance; `presence` None: it said goodbye."""

    iid: str
    presence: Presence | None


class Beat(NamedTuple):
    """A heartbeat's time has passed: judge everyone's age, publish a view."""

    page_bytes: int | None = None
    """Most of one message; None: no bound."""


class Announce(NamedTuple):
    """Somebody may have missed something (the bus was away): the next view is a full one."""


Input = Snapshot | Present | Beat | Announce


class Publish(NamedTuple):
    """Publish a cluster view."""

    view: ClusterView


class Emit(NamedTuple):
    """Publish an event."""

    event: Event


Effect = Publish | Emit
