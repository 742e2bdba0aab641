"""Asking for a place: api → router and back (DESIGN 4, steps 1 and 2)."""

from __future__ import annotations

from typing import Literal

from talaria_common.wire.base import Float, Int, Name, Wire
from talaria_common.wire.error import ErrorInfo

SessionSource = Literal[
    "header", "dynamo", "claude-code", "codex", "x-session", "litellm", "metadata", "prompt-cache-key", "prefix"
]
"""Where a session id came from; "prefix" (a hash of how the conversation begins) is the only low-confidence one."""

RouteVia = Literal["lease", "cost", "retry", "policy"]
"""Why an instance was chosen: a lease consumed, cost ranking, ranking after a failed attempt, another policy."""


class RouteRequest(Wire, frozen=True, kw_only=True):
    """What the router may know of a call: facts, never the body or a token."""

    rid: str
    attempt: Int = 0
    tenant: str
    session: str
    """hash_id(tenant, session id): the client's own id stays at the api."""
    session_source: SessionSource = "prefix"
    parent_session: str | None = None
    session_final: bool = False
    """The client says that this is the session's last call: no lease is installed after it."""
    model: str
    api: Name
    """Name of the api that asks, where frames go."""
    prompt_bytes: Int
    """Bytes of prompt text in the body; the router learns bytes per token per model."""
    max_tokens: Int | None = None
    stream: bool = False
    priority: Int = 0
    exclude: tuple[str, ...] = ()
    """Instances that failed this call already."""
    recovering: tuple[str, ...] = ()
    """Those of `exclude` whose failure may pass (died, silent, restarting): where nobody else is left, the call may
    wait for one of them to be well again."""
    deadline_ms: Int
    """Absolute, UTC ms."""
    prefix_id: str = ""
    """Fingerprint of how the prompt begins, where sessions share that (a system prompt); "": nothing worth telling."""
    prefix_bytes: Int = 0
    """Bytes of that beginning."""
    may_wait: bool = False
    """The api understands `RouteReply.queued`: asks that wait get it as a sign of life."""


class Fence(Wire, frozen=True, kw_only=True, gc=False):
    """Compared within its partition: an instance refuses a command whose owner revision or attempt is behind."""

    partition: Int
    owner_rev: Int
    rid: str
    attempt: Int


class Placement(Wire, frozen=True, kw_only=True):
    """Where the call goes. If it is not taken up by `accept_by_ms` it leaves the router's overlay."""

    iid: Name
    fence: Fence
    router: str
    seq: Int
    """Number of this placement among those of (router, its epoch) on this instance, from 1: see `SeenPlacements`."""
    router_epoch: str = ""
    via: RouteVia = "cost"
    accept_by_ms: Int
    deadline_ms: Int
    wait_ms: Int = 0
    """Predicted wait before the first token."""
    continuation: bool = False
    """The session's last call on this model ended here, by a lease or by cost: `ForwardHead.is_continuation`."""


class Verdict(Wire, frozen=True, kw_only=True):
    """No placement: why, and when to come back. `not_owner`: ask again, the partition has moved."""

    reason: Literal["overloaded", "no_instance", "unknown_model", "not_owner", "expired"]
    error: ErrorInfo


class Queued(Wire, frozen=True, kw_only=True):
    """Still waiting for room: ask again at once, the call keeps its place meanwhile."""

    waited_ms: Int
    waiting: Int = 0
    """Calls that wait at this router."""


class RouteReply(Wire, frozen=True, kw_only=True):
    """Exactly one of the three; `queued` only to those who asked with `may_wait`."""

    placement: Placement | None = None
    verdict: Verdict | None = None
    queued: Queued | None = None


class CandidateCost(Wire, frozen=True, kw_only=True, gc=False):
    """One candidate's Eq. 1 terms, in ms, in decision events and for `talaria explain`."""

    iid: str
    req_ms: Float
    kv_ms: Float
    act_ms: Float
    total_ms: Float
    wait_ms: Float = 0.0
    """Predicted wait before its prefill."""
    kv: Literal["device", "host", "missing"] = "missing"
    reused: Int = 0
    """Prompt tokens whose KV was expected there."""
    model: str = ""
    """Where the model's weights are there, as `ModelState.state`."""
    calls: Int = 0
    """In the system there."""
    rejected: str = ""
    """The check that ruled it out; "": none did."""
