"""The only place where subjects are made (DESIGN 3). `docs/subjects.md` is generated from this module.

Each constructor checks or hashes what goes into its subject, so no id can smuggle a dot or a wildcard (NATS trap 5).
"""

from __future__ import annotations

from typing import NamedTuple

from talaria_common.ids import PARTITIONS, check_name

ROOT = "talaria.v1"

CLUSTER = f"{ROOT}.cluster"
"""telemetry -> routers and apis: `ClusterView`, deltas and periodic full state."""

ALL_COMPLETIONS = f"{ROOT}.completion.*"
ALL_SNAPSHOTS = f"{ROOT}.snapshot.*"
ALL_FORWARDS = f"{ROOT}.rpc.instance.*.forward"
"""For captures that want bodies; a listener there hides "nobody listens" from callers (NATS trap 1)."""
ALL_EVENTS = f"{ROOT}.event.>"
"""The only filter of the JetStream stream: it must never overlap an RPC subject (NATS trap 2)."""

EVENTS_STREAM = "TALARIA_EVENTS"
KV_SESSIONS = "talaria_sessions"
KV_PARTITIONS = "talaria_partitions"
KV_INSTANCES = "talaria_instances"

EVENT_KINDS = ("switch", "round", "lease", "route", "health", "forward", "completion")
CONTROL_VERBS = ("health", "open", "close", "drain", "resume")


def route(partition: int) -> str:
    """`RouteRequest` from an api to the router that owns `partition` (0..255); answered by `RouteReply`."""
    if not 0 <= partition < PARTITIONS:
        raise ValueError(f"partition {partition} is not in 0..{PARTITIONS - 1}")
    return f"{ROOT}.rpc.route.{partition}"


def forward(iid: str) -> str:
    """A call's body with its `ForwardHead`, from an api to the instance `iid`; answered by `ForwardReply`."""
    return f"{ROOT}.rpc.instance.{check_name(iid, 'instance')}.forward"


def cancel(iid: str) -> str:
    """`Cancel` from an api to the instance `iid`; no answer."""
    return f"{ROOT}.rpc.instance.{check_name(iid, 'instance')}.cancel"


def control(iid: str, verb: str) -> str:
    """`ControlRequest` to the instance `iid`: health, open, close, drain or resume; answered by `ControlReply`."""
    if verb not in CONTROL_VERBS:
        raise ValueError(f"control verb {verb!r} is none of {CONTROL_VERBS}")
    return f"{ROOT}.rpc.instance.{check_name(iid, 'instance')}.{verb}"


def tokens(api: str) -> str:
    """`TokenBatch` from an instance to the api that asked: one publish per engine step and api."""
    return f"{ROOT}.tokens.{check_name(api, 'api')}"


def completion(iid: str) -> str:
    """`Completion` from the instance `iid` to routers and telemetry: the completion hook."""
    return f"{ROOT}.completion.{check_name(iid, 'instance')}"


def snapshot(iid: str) -> str:
    """`Snapshot` from the instance `iid` to telemetry, each heartbeat."""
    return f"{ROOT}.snapshot.{check_name(iid, 'instance')}"


def event(kind: str, source: str) -> str:
    """`Event` of one of EVENT_KINDS from the part named `source`, kept in the stream TALARIA_EVENTS."""
    if kind not in EVENT_KINDS:
        raise ValueError(f"event kind {kind!r} is none of {EVENT_KINDS}")
    return f"{ROOT}.event.{kind}.{check_name(source, 'source')}"


class Doc(NamedTuple):
    """A row of docs/subjects.md."""

    subject: str
    sender: str
    receiver: str
    schema: str
    says: str


DOCS: tuple[Doc, ...] = (
    Doc(
        f"{ROOT}.rpc.route.P",
        "api",
        "the router that owns partition P",
        "RouteRequest → RouteReply",
        "a call's routing facts; the answer is a placement or a verdict. P = hash(tenant, session, model) mod 256",
    ),
    Doc(
        f"{ROOT}.rpc.instance.IID.forward",
        "api",
        "instance",
        "body + ForwardHead → ForwardReply",
        "the HTTP body once, as bytes, with the placement in the header `Talaria-Forward`",
    ),
    Doc(f"{ROOT}.rpc.instance.IID.cancel", "api", "instance", "Cancel", "client gone, or deadline passed"),
    Doc(
        f"{ROOT}.rpc.instance.IID.{{health,open,close,drain,resume}}",
        "router, operator",
        "instance",
        "ControlRequest → ControlReply",
        "control; open and close bring a model of the catalog in and out",
    ),
    Doc(f"{ROOT}.tokens.API", "instance", "api", "TokenBatch", "frames of all of an api's calls on one instance"),
    Doc(
        f"{ROOT}.completion.IID", "instance", "routers, telemetry", "Completion", "the completion hook: installs leases"
    ),
    Doc(f"{ROOT}.snapshot.IID", "instance", "telemetry", "Snapshot", "versioned state of one instance, each heartbeat"),
    Doc(CLUSTER, "telemetry", "routers, apis", "ClusterView", "all instances, with each snapshot's age"),
    Doc(
        f"{ROOT}.event.KIND.SOURCE",
        "all",
        "stream TALARIA_EVENTS",
        "Event",
        "what happened, for taps and replay; KIND is one of " + ", ".join(EVENT_KINDS),
    ),
)


def markdown() -> str:
    """The text of docs/subjects.md."""
    rows = "\n".join(f"| `{d.subject}` | {d.sender} → {d.receiver} | {d.schema} | {d.says} |" for d in DOCS)
    buckets = f"`{KV_SESSIONS}` (session table), `{KV_PARTITIONS}` (router ownership), `{KV_INSTANCES}` (presence)"
    return (
        "# Subjects\n\nGenerated from `talaria_common.subjects` by `python -m talaria_common.docs docs`; "
        "a test fails when it is stale.\n\n"
        f"| subject | from → to | carries | says |\n|---|---|---|---|\n{rows}\n\n"
        f"KV buckets: {buckets}. JetStream stream: `{EVENTS_STREAM}`, filter `{ALL_EVENTS}` and nothing else.\n"
    )
