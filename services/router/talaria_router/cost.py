"""Eq. 1: Cost(r, i) = ΔR_req + C_KV + C_act in ms, each thing charged once, and the waits that admission looks at."""

from __future__ import annotations

from typing import Literal, NamedTuple

from talaria_common.wire import ModelState, Snapshot
from talaria_router.cluster import Instance
from talaria_router.overlay import ModelOverlay, Overlay
from talaria_router.profiles import Profile, Profiles
from talaria_router.sessions import Entry

SLOT_CAP_MS = 2000.0
"""No other model is taken to hold the device longer than this before it is our model's turn."""

Kv = Literal["device", "host", "missing"]


class Call(NamedTuple):
    """What cost and policies may know of the call."""

    rid: str
    model: str
    prompt_tokens: int
    """Estimated from bytes."""
    max_tokens: int | None = None
    entry: Entry | None = None
    """The session's entry, None for a new session."""
    exclude: tuple[str, ...] = ()
    """Instances that failed it before."""
    turn: int = 0
    """Number of earlier decisions for this model."""


class Candidate(NamedTuple):
    """One instance as a place for one call. Terms in ms."""

    iid: str
    req_ms: float
    kv_ms: float
    act_ms: float
    total_ms: float
    wait_ms: float
    """Predicted time before its own prefill can start: the round check's figure."""
    own_ms: float
    """Its own prefill and recovery."""
    lease_ms: float
    """Part of `wait_ms`: what the live leases of its model charge there."""
    kv: Kv
    calls: int
    """Calls there now, all models: the plain pressure signal."""
    queued: int
    """Calls of its model that wait there now."""
    state: str
    context_tokens: int
    measured: bool
    """Whether the times come from measurements."""
    rejected: str = ""
    """Why it does not pass admission; "" if it does."""


def kv_of(entry: Entry | None, instance: Instance, model: ModelState) -> Kv:
    """Where the session's prefix is, as far as `instance` is concerned.

    Its handle means something only in the life and KV epoch in which it was made. An entry may be newer than the
    snapshot, so a higher epoch is valid. A prefix that survives while its model is not active is restored from host.
    """
    if entry is None or entry.kv_tokens <= 0 or entry.iid != instance.snapshot.iid:
        return "missing"
    if not handle_valid(entry, instance, model):
        return "missing"
    return "device" if model.state == "active" else "host"


def handle_valid(entry: Entry, instance: Instance, model: ModelState) -> bool:
    """Whether the entry's prefix handle is still meant by `instance` (which must be the entry's)."""
    return entry.iid_epoch == instance.snapshot.epoch and entry.kv_epoch >= model.kv_epoch


def evaluate(call: Call, instance: Instance, model: ModelState, overlay: Overlay, profiles: Profiles) -> Candidate:
    """The cost of `call` on `instance`, before any admission check."""
    snapshot = instance.snapshot
    profile = profiles.of(snapshot.iid, model)
    charge = overlay.of(snapshot.iid, model.name)
    kv = kv_of(call.entry, instance, model)
    prefix = min(call.entry.kv_tokens, call.prompt_tokens - 1) if call.entry is not None else 0
    suffix_ms = (call.prompt_tokens - prefix) * profile.prefill_ms_per_token
    if kv == "device":
        kv_ms = 0.0
    elif kv == "host":
        kv_ms = prefix * profile.restore_ms_per_token
    else:
        kv_ms = prefix * profile.prefill_ms_per_token
    act_ms = activation_ms(model, profile)
    calls, queued = system_load(model, charge)
    queue_ms = (model.queued_tokens + charge.tokens) * profile.prefill_ms_per_token
    lease_ms = charge.leases * profile.return_ms
    queue_ms += lease_ms + snapshot.deadline_risk * profile.return_ms
    queue_ms += batch_wait_ms(model, calls, profile)
    queue_ms += round_wait_ms(snapshot, model, overlay, profiles)
    peers = min(calls, model.max_running) if model.max_running else calls
    req_ms = queue_ms + suffix_ms + peers * profile.decode_step_ms
    return Candidate(
        iid=snapshot.iid,
        req_ms=req_ms,
        kv_ms=kv_ms,
        act_ms=act_ms,
        total_ms=req_ms + kv_ms + act_ms,
        wait_ms=queue_ms + (profile.switch_ms if model.state == "host" else 0.0),
        own_ms=suffix_ms + kv_ms,
        lease_ms=lease_ms,
        kv=kv,
        calls=sum(m.queued + m.running for m in snapshot.models) + overlay.calls_on(snapshot.iid),
        queued=queued,
        state=model.state,
        context_tokens=model.context_tokens,
        measured=profile.measured,
    )


def activation_ms(model: ModelState, profile: Profile) -> float:
    """C_act: nothing when active, a switch when its state is on the host, a full open otherwise."""
    if model.state == "active":
        return 0.0
    return profile.switch_ms if model.state == "host" else profile.open_ms


def system_load(model: ModelState, charge: ModelOverlay) -> tuple[int, int]:
    """(calls in the system, calls waiting) of one model: snapshot, corrected by what happened since."""
    calls = max(0, model.queued + model.running - charge.ended) + charge.calls
    room = max(0, model.max_running - model.running + charge.ended) if model.max_running else 0
    waiting = max(0, model.queued - charge.ended)
    return calls, max(0, waiting + charge.calls - (room if waiting == 0 else 0))


def batch_wait_ms(model: ModelState, calls: int, profile: Profile) -> float:
    """Wait for a place in a full batch: calls leave it at the rate of (batch / time of a typical decode)."""
    if not model.max_running or calls < model.max_running:
        return 0.0
    per_place = profile.output_tokens * profile.decode_step_ms / model.max_running
    return (calls - model.max_running + 1) * per_place


def round_wait_ms(snapshot: Snapshot, model: ModelState, overlay: Overlay, profiles: Profiles) -> float:
    """Wait until the round reaches a model that is not active: the running slot, then the other models with work."""
    if model.state == "active" or len(snapshot.models) < 2:
        return 0.0
    active_ms = other_ms = 0.0
    charges = overlay.models_on(snapshot.iid)
    for other in snapshot.models:
        if other.name == model.name:
            continue
        charge = charges.get(other.name)
        charged_calls, charged_tokens = (charge.calls, charge.tokens) if charge is not None else (0, 0)
        if not (other.queued or other.running or charged_calls):
            continue
        profile = profiles.of(snapshot.iid, other)
        prefill = (other.queued_tokens + charged_tokens) * profile.prefill_ms_per_token
        work = min(SLOT_CAP_MS, prefill + profile.output_tokens * profile.decode_step_ms)
        if other.state == "active":
            active_ms = work
        else:
            other_ms += work + profile.switch_ms
    if snapshot.round_remaining_ms > 0:
        active_ms = min(active_ms, snapshot.round_remaining_ms) if active_ms else 0.0
    return active_ms + other_ms
