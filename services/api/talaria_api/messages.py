"""What the core of a call is told and what it wants done; and what is fixed for a call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from talaria_common.errors import TalariaError
from talaria_common.wire import Cancel, ForwardHead, ForwardReply, Frame, RouteReply, RouteRequest
from talaria_common.wire.call import Endpoint
from talaria_common.wire.route import SessionSource

CancelReason = Literal["client_gone", "deadline", "superseded", "slow_client"]


@dataclass(frozen=True, slots=True)
class Limits:
    """How long a call waits for what. Seconds."""

    route_timeout_s: float
    """For one answer of the router."""
    route_give_up_s: float
    """For any answer of any router: then the call fails with 503, deadline or not."""
    accept_timeout_s: float
    alive_grace_s: float
    """After the acceptance, before an `alive` list without the call counts."""
    max_attempts: int
    pause_s: float = 0.05
    """Before asking again when the answer was "not now" (partition moving, nobody listens, bus away); doubles."""
    max_pause_s: float = 0.5


@dataclass(frozen=True, slots=True)
class Facts:
    """What is fixed for a call. `deadline` in seconds of the clock."""

    rid: str
    endpoint: Endpoint
    api: str
    api_epoch: str
    tenant: str
    session: str
    session_source: SessionSource
    model: str
    prompt_bytes: int
    max_tokens: int | None
    stream: bool
    deadline: float
    parent_session: str | None = None
    session_final: bool = False
    prefix_id: str = ""
    prefix_bytes: int = 0
    priority: int = 0


# --- events


class Begin(NamedTuple):
    """The first event."""


class Routed(NamedTuple):
    """A router answered."""

    attempt: int
    reply: RouteReply


class RouteFailed(NamedTuple):
    """No router answered, or the bus refused."""

    attempt: int
    error: TalariaError


class Answered(NamedTuple):
    """The instance answered the forward."""

    attempt: int
    reply: ForwardReply


class ForwardFailed(NamedTuple):
    """The instance did not answer the forward, or the bus refused it."""

    attempt: int
    error: TalariaError


class Arrived(NamedTuple):
    """A frame of this call."""

    iid: str
    epoch: str
    frame: Frame


class Absent(NamedTuple):
    """The instance said which calls live there, and this one was not among them."""

    iid: str
    epoch: str


class Gone(NamedTuple):
    """Telemetry says that the instance is gone."""

    iid: str
    epoch: str


class ClientGone(NamedTuple):
    """The client closed the connection."""


class SlowClient(NamedTuple):
    """The client's queue overflowed."""

    error: TalariaError


class Tick(NamedTuple):
    """Time has passed."""


Event = (
    Begin | Routed | RouteFailed | Answered | ForwardFailed | Arrived | Absent | Gone | ClientGone | SlowClient | Tick
)

# --- effects


class Ask(NamedTuple):
    """Ask the router that owns `partition`. Replaces any other request of the call that still waits."""

    partition: int
    request: RouteRequest
    timeout_s: float


class Forward(NamedTuple):
    """Hand the body to the instance. Replaces any other request of the call that still waits."""

    head: ForwardHead
    timeout_s: float


class SendCancel(NamedTuple):
    """Tell the instance to stop."""

    iid: str
    cancel: Cancel


class Emit(NamedTuple):
    """Pass the frame on to the client."""

    frame: Frame


class Replaced(NamedTuple):
    """The call is being placed again: for counters and logs."""

    iid: str
    reason: str


class Finish(NamedTuple):
    """The one terminal outcome. `error` None: the final frame was emitted."""

    error: TalariaError | None


Effect = Ask | Forward | SendCancel | Emit | Replaced | Finish
