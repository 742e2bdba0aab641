"""One simulation from a scenario and a trace to figures. The same input gives the same output to the byte."""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Sequence
from typing import Any

import msgspec

from talaria_common.settings import InstanceSettings
from talaria_gpu.sched.ablation import Ablation
from talaria_gpu.sched.config import SlotConfig
from talaria_replay import trace
from talaria_replay.measure import CallRecord, percentiles, summary
from talaria_replay.sim import profiles
from talaria_replay.sim.clients import Agent
from talaria_replay.sim.device import ProfiledDevice, kv_capacity_tokens
from talaria_replay.sim.events import EventHeap, VirtualClock
from talaria_replay.sim.laws import CallLaws, LawError
from talaria_replay.sim.mesh import SimMesh
from talaria_replay.sim.scenario import ABLATIONS, Scenario, ScenarioError, check_ablation
from talaria_replay.trace import Call

KIND = "talaria-simulation-1"
START = 1000.0
WARM_S = 2.0
"""Before the first session: the parts get to know each other; not in any figure."""
STALL_S = 7200.0
"""Virtual time in which no call ends, though some are under way: the mesh is stuck, which is a bug."""


class SimResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a simulation gives. All of it is predicted, nothing measured."""

    kind: str = KIND
    simulated: bool = True
    scenario: Scenario
    trace: dict[str, Any]
    notes: list[str]
    summary: dict[str, Any]
    calls: list[CallRecord]
    slots: list[dict[str, Any]]
    switches: list[dict[str, Any]]


def slot_config(scenario: Scenario) -> SlotConfig:
    """The scheduler's targets, budgets and ablation."""
    on = ABLATIONS[scenario.ablation]
    return SlotConfig(
        slot_ms=scenario.slot_ms,
        drain_ms=scenario.drain_ms,
        t_ttft_ms=scenario.t_ttft_s * 1000,
        gamma=scenario.gamma,
        t_tpot_ms=scenario.t_tpot_ms,
        ablation=Ablation(sp="sp" in on, hkvr="hkvr" in on, staging="staging" in on),
        suspends=True,  # as an instance with host_kv_mib; without hkvr the scheduler knows better
    )


def _instances(scenario: Scenario) -> list[tuple[InstanceSettings, ProfiledDevice, SlotConfig]]:
    out = []
    config = slot_config(scenario)
    for g, group in enumerate(scenario.groups):
        models = [profiles.model(name) for name in group.models]
        named = {m.name: m for m in models}
        if len(named) != len(models):
            raise ScenarioError(f"groups[{g}]: a model stands there twice")
        device = ProfiledDevice(
            profiles.hardware(group.hardware),
            named,
            scenario.calibration,
            hkvr=config.ablation.hkvr,
            staging=config.ablation.staging,
            block_tokens=scenario.kv_block_tokens,
            host_gib=scenario.host_gib,
        )
        for n in range(group.count):
            settings = InstanceSettings(
                id=f"{group.pool}-{g}-{n}",
                pool=group.pool,
                engine="sim",
                models=tuple(named),
                page_size=scenario.page_tokens,
                max_queued=scenario.max_queued,
                slot_ms=config.slot_ms,
                drain_ms=config.drain_ms,
            )
            out.append((settings, device, config))
    return out


def simulate(scenario: Scenario, calls: Sequence[Call], *, generated: str = "") -> SimResult:
    """Run it.

    Args:
        scenario: what to simulate.
        calls: the trace; its models are those of the scenario.
        generated: how the trace was made, "" when it was read from a file.

    Raises:
        ScenarioError, ProfileError: it cannot be simulated.
        LawError: a bug, in the simulator or in a production core.
    """
    check_ablation(scenario.ablation)
    instances = _instances(scenario)
    _check_calls(instances, calls)
    heap = EventHeap(VirtualClock(START))
    mesh = SimMesh(heap, scenario, instances)
    laws = CallLaws()
    records: list[CallRecord] = []
    waiting = list(trace.sessions(calls).values())
    left = len(waiting)
    opened = START + WARM_S

    def begin(session: Sequence[Call]) -> None:
        agent = Agent(heap, mesh, session, seed=scenario.seed, gap_cap_s=scenario.gap_cap_s, laws=laws, done=ended)
        agent.start()

    def ended(made: list[CallRecord]) -> None:
        nonlocal left
        left -= 1
        records.extend(_from(r, opened) for r in made)
        if scenario.concurrent is not None and waiting:
            session = waiting.pop(0)
            heap.after(0.0, lambda: begin(session))

    mesh.start()
    first, waiting = waiting[: scenario.concurrent], waiting[scenario.concurrent or len(waiting) :]
    for n, session in enumerate(first):
        heap.at(opened + n * scenario.stagger_s, lambda s=session: begin(s))  # type: ignore[misc]

    def done() -> bool:
        if heap.clock.now() - laws.last_end > STALL_S and laws.last_end:
            raise LawError(f"no call has ended for {STALL_S:g} s of virtual time")
        return left == 0

    laws.last_end = opened
    collects = gc.isenabled()
    gc.disable()  # millions of small, acyclic objects: looking for cycles among them costs a tenth of the time
    try:
        heap.run(done)
        closed = heap.clock.now()
        heap.run(lambda: heap.clock.now() > closed + 2.0)  # what is on its way arrives; idle engines look for leaks
    finally:
        if collects:
            gc.enable()
    _check(mesh, laws, records)
    return SimResult(
        scenario=scenario,
        trace=_about(calls, generated),
        notes=_notes(scenario, calls, generated),
        summary=_summary(mesh, records, closed - opened, heap.count),
        calls=records,
        slots=_slots(mesh, opened),
        switches=_switches(mesh, opened),
    )


def _check_calls(
    instances: Sequence[tuple[InstanceSettings, ProfiledDevice, SlotConfig]], calls: Sequence[Call]
) -> None:
    """Raises ScenarioError unless each call's model is served and its context fits wherever it may go."""
    served = {m for settings, _, _ in instances for m in settings.models}
    unknown = sorted({c.model for c in calls} - served)
    if unknown:
        raise ScenarioError(f"no instance serves {', '.join(unknown)}; there are {', '.join(sorted(served))}")
    limits = {
        name: min(device.spec(name).context_tokens for settings, device, _ in instances if name in settings.models)
        for name in served
    }
    for c in calls:
        if c.prompt_tokens + max(1, c.completion_tokens) > limits[c.model]:
            raise ScenarioError(
                f"session {c.session!r} call {c.call}: {c.prompt_tokens} + {c.completion_tokens} tokens exceed the "
                f"context of {c.model} ({limits[c.model]} tokens)"
            )


def _from(record: CallRecord, start: float) -> CallRecord:
    """Times from the window's start, µs."""
    moved = {
        f: round(getattr(record, f) - start, 6) if getattr(record, f) else 0.0
        for f in ("intended_s", "sent_s", "first_s", "done_s")
    }
    return msgspec.structs.replace(record, **moved)


def _check(mesh: SimMesh, laws: CallLaws, records: Sequence[CallRecord]) -> None:
    laws.end()
    for instance in mesh.instances.values():
        instance.laws.end()
    if not any(r.error for r in records):
        computed = sum(i.driver.status().prefilled_tokens for i in mesh.instances.values())
        owed = sum(r.prompt_tokens - r.cached_tokens for r in records)
        if computed != owed:
            raise LawError(f"{computed} prompt tokens were computed; prompts less what was cached come to {owed}")
    books = mesh.router.state.leases.books
    if books.installed != books.honoured + books.expired + sum(books.discarded.values()) + books.live:
        raise LawError(f"the books of leases do not balance: {books}")


def _summary(mesh: SimMesh, records: Sequence[CallRecord], wall_s: float, events: int) -> dict[str, Any]:
    counts, books = mesh.router.state.counts, mesh.router.state.leases.books
    slots = [s.slot for i in mesh.instances.values() for s in i.slots]
    timings = [t for i in mesh.instances.values() for _, t in i.switches]
    active = sum(s.active_ms for s in slots)
    switch = sum(t.total_ms for t in timings)
    return summary(records) | {
        "window_s": round(wall_s, 4),
        "slots": len(slots),
        "slot_wall_ms": percentiles([s.wall_ms for s in slots]),
        "slot_active_s": round(active / 1000, 3),
        "switches": len(timings),
        "switch_ms": percentiles([t.total_ms for t in timings]),
        "switch_s": round(switch / 1000, 3),
        "switch_share": round(switch / (active + switch), 4) if slots else 0.0,
        "retracted": sum(t.retracted for t in timings),
        "suspended": sum(t.suspended for t in timings),
        "admitted": sum(s.admitted for s in slots),
        "deferred": sum(s.deferred for s in slots),
        "recomputed_share": _recomputed(records),
        "leases": {
            "installed": books.installed,
            "honoured": books.honoured,
            "expired": books.expired,
            "discarded": sum(books.discarded.values()),
        },
        "avoidable_opens": counts.avoidable_opens,
        "kv_peak_share": {
            f"{i.iid}/{m}": round(peak / i.engine.models()[m].kv_capacity_tokens, 4)
            for i in mesh.instances.values()
            for m, peak in i.laws.kv_peak.items()
        },
        "events": events,
    }


def _recomputed(records: Sequence[CallRecord]) -> float:
    """Share of the reusable prefix tokens of returns that were not in the cache."""
    returns = [r for r in records if r.call and not r.error]
    prompt = sum(r.prompt_tokens for r in returns)
    return round(1 - sum(r.cached_tokens for r in returns) / prompt, 4) if prompt else 0.0


def _slots(mesh: SimMesh, start: float) -> list[dict[str, Any]]:
    rows = [
        {
            "iid": i.iid,
            "end_s": round(ended.end - start, 3),
            "model": ended.slot.model,
            "active_ms": round(ended.slot.active_ms, 3),
            "switch_ms": round(ended.slot.switch_ms, 3),
            "reason": ended.slot.reason,
            "round": ended.slot.round,
            "sp_admitted": ended.slot.sp_admitted,
            "sp_deferred": ended.slot.sp_deferred,
            "hbm_gib": round(ended.hbm_bytes / i.gpus / (1 << 30), 2),
        }
        for i in mesh.instances.values()
        for ended in i.slots
    ]
    return sorted(rows, key=lambda r: (r["end_s"], r["iid"]))


def _switches(mesh: SimMesh, start: float) -> list[dict[str, Any]]:
    rows = [
        {"iid": i.iid, "end_s": round(at - start, 3), "source": t.source, "target": t.target, "path": t.path}
        | {"total_ms": round(t.total_ms, 3), "phases_ms": [round(ms, 3) for ms in t.phases_ms]}
        | {name: getattr(t, name) for name in ("d2d_bytes", "dirty_bytes", "missing_bytes", "suspended", "retracted")}
        for i in mesh.instances.values()
        for at, t in i.switches
    ]
    return sorted(rows, key=lambda r: (r["end_s"], r["iid"]))


def _about(calls: Sequence[Call], generated: str) -> dict[str, Any]:
    h = hashlib.blake2b(digest_size=16)
    for call in calls:
        h.update(msgspec.json.encode(call))
    return {
        "generated": generated,
        "digest": h.hexdigest(),
        "sessions": len({c.session for c in calls}),
        "calls": len(calls),
        "prompt_tokens": percentiles([c.prompt_tokens for c in calls]),
        "gap_sources": sorted({c.gap_source for c in calls if c.call}),
    }


def _notes(scenario: Scenario, calls: Sequence[Call], generated: str) -> list[str]:
    notes = ["every figure is simulated: predicted from component figures, not measured"]
    notes.append(f"calibration {scenario.calibration}: {profiles.CALIBRATIONS[scenario.calibration]}")
    if generated:
        notes.append(f"the trace is generated: {generated}")
    if any(c.gap_source == "synthetic" for c in calls):
        notes.append("gaps are synthetic")
    return notes


def capacity_table(scenario: Scenario) -> list[tuple[str, str, int]]:
    """(hardware, model, KV tokens beside its weights) of a scenario."""
    return [
        (g.hardware, name, kv_capacity_tokens(profiles.model(name), profiles.hardware(g.hardware)))
        for g in scenario.groups
        for name in g.models
    ]


def encode(result: SimResult) -> bytes:
    """Canonical JSON: the same result, the same bytes."""
    return msgspec.json.format(msgspec.json.encode(result, order="deterministic"), indent=1)
