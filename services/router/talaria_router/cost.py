"""Eq. 1: Cost(r, i) = ΔR_req + C_KV + C_act in ms, each thing charged once, and the waits that admission looks at."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import msgspec

from talaria_common.wire import CandidateCost, ModelState, kv_residence
from talaria_router.cluster import Instance
from talaria_router.overlay import ModelOverlay, Overlay
from talaria_router.profiles import Profile, Profiles
from talaria_router.sessions import Entry

SLOT_CAP_MS = 2000.0
"""No other model is taken to hold the device longer than this before it is our model's turn."""

Kv = Literal["device", "host", "missing"]


class Call(msgspec.Struct, frozen=True, gc=False):
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
    shared_tokens: int = 0
    """Length of the prefix that it has in common with other sessions (a system prompt), estimated; 0: none known."""
    sharers: frozenset[str] = frozenset()
    """Instances where that common prefix was computed lately."""

    @property
    def prefix_tokens(self) -> int:
        """Prompt tokens whose KV somebody may have: at least one token is always computed."""
        kept = self.entry.kv_tokens if self.entry is not None else 0
        return min(max(kept, self.shared_tokens if self.sharers else 0), self.prompt_tokens - 1)


class Place(NamedTuple):
    """One model on one instance, as any call would find it: what of Eq. 1 does not depend on the call. Times in ms.

    Kept between calls and made anew when the instance's snapshot or our charges on it change (`talaria_router.board`).
    """

    iid: str
    instance: Instance
    model: ModelState
    unready: str
    """Why no new call may go there, whatever its size; "" if one may. Without the snapshot's age."""
    base_ms: float
    """All but the call's own prefill and recovery: no call costs less here, unless it finds its prefix."""
    act_ms: float
    queue_ms: float
    """Wait for the work of the same model: its queue, leases, a place in the batch."""
    round_ms: float
    """Wait for the other models' slots."""
    wait_ms: float
    """Predicted time before a call's own prefill can start, but for KV rows (`rows_wait_ms`)."""
    profile: Profile
    prefill_ms_per_token: float
    restore_ms_per_token: float
    calls: int
    queued: int
    floor_ms: float
    """`wait_ms` as the round check counts it (`admission.excess_ms`)."""
    full: bool
    """As many calls of the model wait there as the instance accepts: it would reject one more."""
    longest: float
    """HBM: longer prompts (tokens) can never fit the model's KV pool or context there. An estimate, not a proof."""
    free_tokens: float
    """KV rows that a call may have at once: those that neither calls there hold nor calls on their way will need.

    What prefixes hold counts as free, it can be evicted. Below 0: what waits there needs more than there is."""
    room_tokens: float
    """A prompt no longer than this and a typical answer fit into them."""
    batch_ms: float
    """Part of `queue_ms`: for a place in the batch."""
    measured: bool


class Candidate(msgspec.Struct, frozen=True, gc=False):
    """One instance as a place for one call. Terms in ms."""

    cost: CandidateCost
    """Eq. 1's terms, as an event tells them; `rejected` there: why it does not pass admission."""
    place: Place
    own_ms: float
    """The call's own prefill and recovery."""
    rows_ms: float
    """Part of `wait_ms`: until calls there have freed the KV rows that it needs."""
    prompt_tokens: int

    @property
    def iid(self) -> str:
        """The instance."""
        return self.cost.iid

    @property
    def state(self) -> str:
        """Where the model's weights are there."""
        return self.cost.model

    @property
    def calls(self) -> int:
        """Calls there now, all models: the plain pressure signal."""
        return self.cost.calls

    @property
    def wait_ms(self) -> float:
        """Predicted time before its own prefill can start."""
        return self.cost.wait_ms

    @property
    def floor_ms(self) -> float:
        """`wait_ms` less what the leases charge beyond their share: the round check's figure."""
        return self.place.floor_ms + self.rows_ms

    @property
    def queue_ms(self) -> float:
        """Part of `wait_ms`: work of its own model."""
        return self.place.queue_ms + self.rows_ms

    @property
    def context_tokens(self) -> int:
        """The longest prompt and completion that the instance accepts."""
        return self.place.model.context_tokens


def kv_of(entry: Entry | None, instance: Instance, model: ModelState) -> Kv:
    """Where the session's prefix is, as far as `instance` is concerned."""
    if entry is None or entry.iid != instance.snapshot.iid:
        return "missing"
    return kv_residence(entry.iid_epoch, entry.kv_epoch, entry.kv_tokens, instance.snapshot.epoch, model)


def handle_valid(entry: Entry, instance: Instance, model: ModelState) -> bool:
    """Whether the entry's prefix handle is still meant by `instance` (which must be the entry's)."""
    return kv_residence(entry.iid_epoch, entry.kv_epoch, 1, instance.snapshot.epoch, model) != "missing"


def place_of(
    instance: Instance, model: ModelState, overlay: Overlay, profiles: Profiles, budget_ms: float = math.inf
) -> Place:
    """`model` on `instance` as it stands: snapshot, overlay and profiles.

    `budget_ms`: gamma·T_TTFT, what the round check allows; leases may take half of it.
    """
    # Without a function call where the usual case needs none: this runs for every change of every instance.
    snapshot = instance.snapshot
    iid, name, state = snapshot.iid, model.name, model.state
    profile = instance.profiles.get(name) or profile_of(instance, model, profiles)
    charge, placed = overlay.on(iid, name)
    calls, queued = system_load(model, charge)
    prefill_ms, most = profile.prefill_ms_per_token, model.max_running
    batch_ms, lease_ms, lease_cap_ms = 0.0, charge.leases * profile.return_ms, budget_ms / 2
    queue_ms = (model.queued_tokens + charge.tokens) * prefill_ms
    queue_ms += lease_ms
    # Of all models there, and in their queues already: a reason to go elsewhere, and no wait of this model's.
    risk_ms = snapshot.deadline_risk * profile.return_ms
    peers = calls
    if 0 < most <= calls:
        batch_ms = batch_wait_ms(model, calls, profile)
        queue_ms += batch_ms
        peers = most
    act_ms = round_ms = switch_ms = 0.0
    if state != "active":
        act_ms = activation_ms(model, profile)
        round_ms = round_wait_ms(instance, model, overlay, profiles, budget_ms)
        switch_ms = act_ms if state == "host" else 0.0
    wait_ms = queue_ms + round_ms + switch_ms
    free = math.inf
    if model.kv_capacity_tokens:
        free = model.kv_capacity_tokens - model.kv_held_tokens - model.queued_tokens - charge.tokens
    return Place(
        iid,
        instance,
        model,
        "" if snapshot.status == "ready" and state != "failed" else unready(instance, model),
        queue_ms + risk_ms + round_ms + peers * profile.decode_step_ms + act_ms,
        act_ms,
        queue_ms,
        round_ms,
        wait_ms,
        profile,
        prefill_ms,
        profile.restore_ms_per_token,
        instance.calls + placed,
        queued,
        wait_ms - lease_ms + lease_cap_ms if lease_ms > lease_cap_ms else wait_ms,
        0 < snapshot.max_queued <= queued,
        min(model.kv_capacity_tokens or math.inf, model.context_tokens or math.inf) - 1,
        free,
        free - profile.output_tokens,
        batch_ms,
        profile.measured,
    )


def profile_of(instance: Instance, model: ModelState, profiles: Profiles) -> Profile:
    """What the model costs there, worked out once per snapshot."""
    found = instance.profiles.get(model.name)
    if found is None:
        found = instance.profiles[model.name] = profiles.of(instance.snapshot.iid, model, instance.snapshot.models)
    return found


def unready(instance: Instance, model: ModelState | None) -> str:
    """Why the instance takes no new call for the model, by its own word; "" if it may."""
    if instance.snapshot.status != "ready":
        return instance.snapshot.status
    return "failed_model" if model is None or model.state == "failed" else ""


def candidate_of(call: Call, place: Place, prefix: int) -> Candidate:
    """Eq. 1 for `call`, whose `prefix_tokens` are `prefix`, at `place`; before any admission check."""
    kv: Kv = "missing"
    reused, prefill_ms, act_ms, entry = 0, place.prefill_ms_per_token, place.act_ms, call.entry
    if entry is not None and entry.iid == place.iid:
        kv = kv_of(entry, place.instance, place.model)
        reused = min(prefix, entry.kv_tokens) if kv != "missing" else 0
    if call.sharers and place.iid in call.sharers and min(prefix, call.shared_tokens) > reused:
        reused = min(prefix, call.shared_tokens)
        kv = "device" if place.model.state == "active" else "host"
    kv_ms = (prefix - reused) * prefill_ms
    if kv == "host":
        kv_ms += reused * place.restore_ms_per_token
    suffix_ms = (call.prompt_tokens - prefix) * prefill_ms
    rows_ms = rows_wait_ms(call, place) if call.prompt_tokens > place.room_tokens else 0.0
    req_ms = place.base_ms - act_ms + suffix_ms + rows_ms
    own_ms = suffix_ms + kv_ms
    cost = CandidateCost(
        iid=place.iid,
        req_ms=req_ms,
        kv_ms=kv_ms,
        act_ms=act_ms,
        total_ms=req_ms + kv_ms + act_ms,
        wait_ms=place.wait_ms + rows_ms,
        kv=kv,
        reused=reused,
        model=place.model.state,
        calls=place.calls,
    )
    return Candidate(cost, place, own_ms, rows_ms, call.prompt_tokens)


def activation_ms(model: ModelState, profile: Profile) -> float:
    """C_act: nothing when active; a switch, less what is staged, when its state is on the host; else a full open."""
    if model.state == "active":
        return 0.0
    return profile.switch_now_ms if model.state == "host" else profile.open_ms


def rows_wait_ms(call: Call, place: Place) -> float:
    """Wait until calls there have freed the KV rows that `call` needs: HBM as a delay, for what fits at all gets in.

    It needs its whole prompt's, for prefixes that it finds are counted as free, and those of a typical answer. All rows
    are freed within the time of one. Beyond the wait for a place in the batch, which goes by the same calls' ends.
    """
    profile = place.profile
    answer = profile.output_tokens if call.max_tokens is None else min(call.max_tokens, profile.output_tokens)
    short = call.prompt_tokens + answer - place.free_tokens
    capacity = place.model.kv_capacity_tokens
    taken = min(capacity, capacity - place.free_tokens)
    if short <= 0 or taken <= 0:
        return 0.0
    return max(0.0, short / taken * profile.output_tokens * profile.decode_step_ms - place.batch_ms)


def system_load(model: ModelState, charge: ModelOverlay) -> tuple[int, int]:
    """(calls in the system, calls waiting) of one model: snapshot, corrected by what happened since."""
    running, ended, ours = model.running, charge.ended, charge.calls
    waiting = model.queued - ended
    calls = waiting + running
    calls = ours if calls < 0 else calls + ours
    if waiting > 0:
        return calls, waiting + ours
    room = model.max_running - running + ended if model.max_running else 0
    if room > 0:
        ours -= room
    return calls, max(0, ours)


def batch_wait_ms(model: ModelState, calls: int, profile: Profile) -> float:
    """Wait for a place in a full batch: calls leave it at the rate of (batch / time of a typical decode)."""
    if not model.max_running or calls < model.max_running:
        return 0.0
    per_place = profile.output_tokens * profile.decode_step_ms / model.max_running
    return (calls - model.max_running + 1) * per_place


def round_wait_ms(
    instance: Instance, model: ModelState, overlay: Overlay, profiles: Profiles, budget_ms: float = math.inf
) -> float:
    """Wait until the round reaches a model that is not active: the running slot, then the other models with work.

    At most all that is not our model's share of a round: as Eq. 5 bounds that, or as the instance has planned it where
    it gave the bound up.
    """
    snapshot = instance.snapshot
    if model.state == "active" or len(snapshot.models) < 2:
        return 0.0
    active_ms: float | None = None
    others, other_ms = 0, 0.0
    charges = overlay.models_on(snapshot.iid)
    for other in snapshot.models:
        if other.name == model.name:
            continue
        charge = charges.get(other.name)
        charged_calls, charged_tokens = (charge.calls, charge.tokens) if charge is not None else (0, 0)
        if not (other.queued or other.running or charged_calls):
            continue
        profile = profile_of(instance, other, profiles)
        prefill = (other.queued_tokens + charged_tokens) * profile.prefill_ms_per_token
        work = min(SLOT_CAP_MS, prefill + profile.output_tokens * profile.decode_step_ms)
        if other.state == "active":
            active_ms = work
        else:
            others += 1
            other_ms += work + profile.switch_ms
    if active_ms is not None and snapshot.round_remaining_ms > 0:
        active_ms = min(active_ms, snapshot.round_remaining_ms)
    busy = others + (active_ms is not None)
    share = busy / (busy + 1)
    return min((active_ms or 0.0) + other_ms, share * max(budget_ms, snapshot.round_planned_ms))
