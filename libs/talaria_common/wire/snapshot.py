"""What an instance says of itself, and what telemetry makes of all of them (3.3, 4.1; DESIGN 3)."""

from __future__ import annotations

from typing import Literal

from talaria_common.wire.base import Float, Int, Name, Wire


class ModelState(Wire, frozen=True, kw_only=True):
    """One model on one instance."""

    name: str
    state: Literal["active", "host", "loading", "cold", "failed"]
    """active: its weights are in the device buffer; host: one switch away; cold: in the catalog, not loaded."""
    context_tokens: Int = 0
    """Longest prompt + completion that this instance accepts for the model."""
    kv_capacity_tokens: Int = 0
    kv_used_tokens: Int = 0
    queued: Int = 0
    running: Int = 0
    queued_tokens: Int = 0
    """Prompt tokens waiting for prefill, without those that are expected to be found cached."""
    kv_epoch: Int = 0
    """Rises when prefixes of this model are forgotten that neither device nor host has any more: older prefix handles
    are then missing. A switch alone does not raise it where the host keeps what the device loses."""
    prefill_ms_per_token: Float = 0.0
    """Of a prefill of typical size (512 tokens), its fixed cost included; 0 while nothing was measured."""
    decode_step_ms: Float = 0.0
    switch_ms: Float = 0.0
    """Measured time to make it active from host, EWMA."""
    cached_sessions: Int = 0
    max_running: Int = 0
    """Calls in one batch; 0: unknown."""
    weight_bytes: Int = 0
    """Added HBM footprint of a replica (Eq. 2); 0: unknown."""
    open_ms: Float = 0.0
    """Measured time to make it active from cold, EWMA; 0 while nothing was measured."""
    restore_ms_per_token: Float = 0.0
    """Measured time to restore KV from host, EWMA; 0 while nothing was measured."""
    host_kv_tokens: Int = 0
    """Tokens of its prefixes in host memory."""
    kv_held_tokens: Int = 0
    """Rows that its running and suspended calls need: they cannot be evicted, unlike the rest of `kv_used_tokens`."""
    staged: Float = 0.0
    """Share of its weights that lies staged on the device now, 0..1 (3.5)."""
    switch_now_ms: Float = 0.0
    """Predicted time to make it active from host now, what is staged counted; 0 while nothing was measured."""


class SeenPlacements(Wire, frozen=True, kw_only=True):
    """Placements of one router epoch that this snapshot counts: all of 1..upto except `missing`.

    Exact, so that the router's overlay drops what the snapshot already holds and nothing else (DESIGN 3).
    """

    upto: Int = 0
    missing: tuple[Int, ...] = ()


class Snapshot(Wire, frozen=True, kw_only=True):
    """One instance at one moment. `version` rises by one within an epoch."""

    iid: Name
    epoch: str
    version: Int
    at_ms: Int
    pool: Literal["hot", "cold"]
    status: Literal["starting", "ready", "draining", "failed"]
    reason: str = ""
    """Why it is not ready, for people."""
    models: tuple[ModelState, ...] = ()
    active_model: str | None = None
    round_remaining_ms: Float = 0.0
    round_planned_ms: Float = 0.0
    """R of the round in progress; 0: one model at most has work."""
    infeasible: str = ""
    """Targets that its plan gave up, comma-separated: ttft (Eq. 5), tpot (Eq. 4)."""
    deadline_risk: Int = 0
    """Calls that will probably be late: for their deadline, or with their first token for T_TTFT."""
    buffer_bytes: Int = 0
    kv_occupancy: Float = 0.0
    """Used share of the active model's device KV, 0..1."""
    staging_free_bytes: Int = 0
    max_queued: Int = 0
    """Calls that it accepts before it rejects with `overloaded`."""
    seen: dict[str, SeenPlacements] = {}
    """By "router/router_epoch"."""
    prefilled_tokens: Int = 0
    """Counted in the engine since its start; = prompt tokens - cached tokens of all calls."""
    switches: Int = 0
    engine_restarts: Int = 0
    idle_checks: Int = 0
    """Times that the engine, left without a call, looked for leaks and found none; since its start."""


class Presence(Wire, frozen=True, kw_only=True):
    """An instance's entry in the KV bucket talaria_instances, key = iid.

    Written at start and after each reconnect, deleted when it ends in order. Life itself is in the snapshots.
    """

    iid: str
    epoch: str
    pool: Literal["hot", "cold"]
    models: tuple[str, ...] = ()
    host: str = ""
    pid: Int = 0
    started_ms: Int = 0


class InstanceView(Wire, frozen=True, kw_only=True):
    """A snapshot as telemetry holds it."""

    snapshot: Snapshot
    age_ms: Int
    """Time since telemetry received it, by telemetry's clock."""
    health: Literal["ok", "stale", "gone"]
    gaps: Int = 0
    """Snapshot versions that never arrived, this epoch."""
    restarts: Int = 0
    """Epochs seen after the first."""


class ClusterView(Wire, frozen=True, kw_only=True):
    """The aggregated view. A delta carries the instances that changed; `full` carries all.

    One that would not fit in a message goes out in pages, each with its own version: deltas, and for a full view at the
    end a full one that names its `members`.
    """

    telemetry: str
    epoch: str
    version: Int
    at_ms: Int
    full: bool = True
    instances: tuple[InstanceView, ...] = ()
    removed: tuple[str, ...] = ()
    members: tuple[str, ...] = ()
    """Ids of all instances, on the last page of a full view; empty: `instances` are all of them."""
