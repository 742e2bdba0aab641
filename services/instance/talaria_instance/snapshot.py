"""The snapshot: the core's state as telemetry and the routers see it (3.3, 4.1)."""

from __future__ import annotations

from typing import Literal, NamedTuple

from talaria_common.clock import to_ms
from talaria_common.settings import InstanceSettings
from talaria_common.wire import ModelState, SeenPlacements, Snapshot
from talaria_instance.engine_state import EngineState

Status = Literal["starting", "ready", "draining", "failed"]


class CallLoad(NamedTuple):
    """What a snapshot counts of one call."""

    model: str
    running: bool
    """Past its first token."""
    fresh_tokens: int
    """Prompt tokens that are expected to be computed."""
    tokens_left: int
    deadline: float
    """Seconds."""
    rows: int = 0
    """KV rows that it needs to go on: its prompt's and its answer's so far."""


class Identity(NamedTuple):
    """Who speaks, and the how-manieth time."""

    epoch: str
    version: int
    status: Status
    reason: str


class Counted(NamedTuple):
    """The calls accepted here, and the placements that they and all refused ones came with."""

    calls: list[CallLoad]
    seen: dict[str, SeenPlacements]


def build(now: float, who: Identity, settings: InstanceSettings, engine: EngineState, counted: Counted) -> Snapshot:
    """The snapshot of this moment.

    Queued and running are counted from the calls accepted here, not from the engine's last report: so they agree
    exactly with `seen`, whatever is on its way to the engine.
    """
    calls, status = counted.calls, engine.status
    models = tuple(_model(name, engine, [c for c in calls if c.model == name]) for name in settings.models)
    active = next((m for m in models if status and m.name == status.active), None)
    return Snapshot(
        iid=settings.id,
        epoch=who.epoch,
        version=who.version,
        at_ms=to_ms(now),
        pool=settings.pool,
        status=who.status,
        reason=who.reason,
        models=models,
        active_model=status.active if status else None,
        round_remaining_ms=status.slot_remaining_ms if status else 0.0,
        round_planned_ms=status.round_planned_ms if status else 0.0,
        infeasible=status.infeasible if status else "",
        deadline_risk=max(
            status.at_risk if status else 0,  # the scheduler's view: queues, slots and T_TTFT
            sum(_at_risk(now, call, engine) for call in calls),
        ),
        buffer_bytes=engine.buffer_bytes,
        kv_occupancy=(
            min(1.0, active.kv_used_tokens / active.kv_capacity_tokens) if active and active.kv_capacity_tokens else 0.0
        ),
        staging_free_bytes=status.staging_slack_bytes if status else 0,
        max_queued=settings.max_queued,
        seen=counted.seen,
        prefilled_tokens=status.prefilled_tokens if status else 0,
        switches=status.switches if status else 0,
        engine_restarts=engine.restarts,
        idle_checks=status.idle_checked if status else 0,
    )


def _model(name: str, engine: EngineState, calls: list[CallLoad]) -> ModelState:
    info, status = engine.infos.get(name), engine.status
    load = status.loads.get(name) if status else None
    state: Literal["active", "host", "loading", "cold", "failed"]
    if engine.phase == "failed" or name in engine.broken:
        state = "failed"
    elif info is None:
        state = "loading" if engine.phase == "starting" or name in engine.opening else "cold"
    else:
        state = "active" if status and status.active == name else "host"
    queued = [c for c in calls if not c.running]
    held = sum(c.rows for c in calls if c.running)  # of a model that is not active: suspended calls come back
    staged = status.staged.bytes if status and status.staged.model == name else 0
    return ModelState(
        name=name,
        state=state,
        context_tokens=info.context_tokens if info else 0,
        kv_capacity_tokens=info.kv_capacity_tokens if info else 0,
        kv_used_tokens=load.kv_used_tokens if load else 0,
        queued=len(queued),
        running=len(calls) - len(queued),
        queued_tokens=sum(c.fresh_tokens for c in queued),
        kv_epoch=engine.kv_epoch(name),
        prefill_ms_per_token=status.prefill_ms_per_token.get(name, 0.0) if status else 0.0,
        decode_step_ms=status.decode_step_ms.get(name, 0.0) if status else 0.0,
        switch_ms=status.switch_ms.get(name, 0.0) if status else 0.0,
        cached_sessions=load.cached_sessions if load else 0,
        restore_ms_per_token=load.restore_ms_per_token if load else 0.0,
        host_kv_tokens=load.host_kv_tokens if load else 0,
        max_running=info.max_running if info else 0,
        weight_bytes=info.weight_bytes if info else 0,
        open_ms=engine.open_ms.get(name, 0.0),
        kv_held_tokens=load.kv_held_tokens if load and state == "active" else held,
        staged=min(1.0, staged / info.weight_bytes) if info and info.weight_bytes else 0.0,
        switch_now_ms=status.switch_now_ms.get(name, 0.0) if status else 0.0,
    )


def _at_risk(now: float, call: CallLoad, engine: EngineState) -> bool:
    """Whether the call's own remaining work, with nobody else in the way, ends after its deadline."""
    status = engine.status
    if status is None:
        return False
    left_ms = call.tokens_left * status.decode_step_ms.get(call.model, 0.0)
    if not call.running:
        left_ms += call.fresh_tokens * status.prefill_ms_per_token.get(call.model, 0.0)
    return now + left_ms / 1000 > call.deadline
