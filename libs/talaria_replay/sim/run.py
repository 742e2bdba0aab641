"""One simulation from a scenario and a trace to figures. The same input gives the same output to the byte."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec
from pydantic import ValidationError

from talaria_common.errors import EngineError
from talaria_common.settings import InstanceSettings
from talaria_gpu.sched.ablation import Ablation
from talaria_gpu.sched.config import SlotConfig
from talaria_replay import trace
from talaria_replay.measure import CallRecord, Tally
from talaria_replay.ranges import checked
from talaria_replay.sim import profiles
from talaria_replay.sim.arrivals import offsets
from talaria_replay.sim.clients import Agent
from talaria_replay.sim.device import ProfiledDevice, kv_capacity_tokens
from talaria_replay.sim.events import EventHeap, VirtualClock
from talaria_replay.sim.laws import CallLaws, LawError
from talaria_replay.sim.mesh import SimMesh
from talaria_replay.sim.scenario import ABLATIONS, Scenario, ScenarioError
from talaria_replay.sim.tally import SlotTally, TraceTally
from talaria_replay.trace import Call

KIND = "talaria-simulation-2"
START = 1000.0
WARM_S = 2.0
"""Before the first session: the parts get to know each other; not in any figure."""
SLACK_S = 300.0
"""More than the last wait of a refused call, tokenising and messages take."""
Instances = Sequence[tuple[InstanceSettings, ProfiledDevice, SlotConfig]]


class SimResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a simulation gives. All of it is predicted, nothing measured."""

    kind: str = KIND
    simulated: bool = True
    scenario: Scenario
    trace: dict[str, Any]
    notes: list[str]
    summary: dict[str, Any]
    calls: list[CallRecord]
    """Empty without `Scenario.detail`, as are these:"""
    slots: list[dict[str, Any]]
    switches: list[dict[str, Any]]


def slot_config(scenario: Scenario) -> SlotConfig:
    """The scheduler's targets, budgets and ablation."""
    on = ABLATIONS[scenario.ablation]
    return SlotConfig(
        slot_ms=scenario.slot_ms,
        drain_ms=scenario.drain_ms,
        patience_ms=scenario.patience_s * 1000,
        t_ttft_ms=scenario.t_ttft_s * 1000,
        gamma=scenario.gamma,
        t_tpot_ms=scenario.t_tpot_ms,
        ablation=Ablation(sp="sp" in on, hkvr="hkvr" in on, staging="staging" in on),
        order=scenario.slot_order,
        suspends=True,  # as an instance with host_kv_mib; without hkvr the scheduler knows better
    )


def _instances(scenario: Scenario) -> Instances:
    out = []
    config = slot_config(scenario)
    for g, group in enumerate(scenario.groups):
        models = [profiles.model(name) for name in group.models]
        named = {m.name: m for m in models}
        if len(named) != len(models):
            raise ScenarioError(f"groups[{g}]: a model stands there twice")
        opened = None if group.open is None else tuple(profiles.model(name).name for name in group.open)
        if opened is not None and (not opened or not set(opened) <= named.keys() or group.pool == "hot"):
            raise ScenarioError(f"groups[{g}].open: expected one or more of {', '.join(named)}, in a cold pool")
        device = ProfiledDevice(
            profiles.changed(profiles.hardware(group.hardware), scenario.hardware),
            named,
            scenario.calibration,
            hkvr=config.ablation.hkvr,
            staging=config.ablation.staging,
            block_tokens=scenario.kv_block_tokens,
            host_gib=scenario.host_gib,
        )
        for n in range(group.count):
            try:
                settings = InstanceSettings(
                    id=f"{group.pool}-{g}-{n}",
                    pool=group.pool,
                    engine="sim",
                    models=tuple(named),
                    open=opened,
                    page_size=scenario.page_tokens,
                    max_queued=scenario.max_queued,
                    slot_ms=config.slot_ms,
                    drain_ms=config.drain_ms,
                )
            except ValidationError as e:
                raise ScenarioError(f"groups[{g}]: {e.errors()[0]['msg']}") from e
            out.append((settings, device, config))
    return out


def simulate(scenario: Scenario, calls: Sequence[Call], *, generated: str = "") -> SimResult:
    """Run it on a trace; its models are those of the scenario. See `simulate_sessions`."""
    return simulate_sessions(scenario, trace.sessions(calls).values(), generated=generated)


def simulate_sessions(scenario: Scenario, sessions: Iterable[Sequence[Call]], *, generated: str = "") -> SimResult:
    """Run it.

    Args:
        scenario: what to simulate.
        sessions: their calls, in the order in which they start; each is asked for when the one before has started.
        generated: how the trace was made, "" when it was read from a file.

    Raises:
        ScenarioError, ProfileError: it cannot be simulated.
        LawError: a bug, in the simulator or in a production core.
    """
    scenario = checked(scenario, ScenarioError)
    instances = _instances(scenario)
    heap = EventHeap(VirtualClock(START))
    opened = START + WARM_S
    slots = SlotTally(detail=scenario.detail)
    mesh = SimMesh(heap, scenario, instances, slots, opened)
    run = _Run(scenario, heap, mesh, _checked(instances, sessions), opened)
    collects = gc.isenabled()
    gc.disable()  # millions of small, acyclic objects: looking for cycles among them costs a tenth of the time
    try:
        mesh.start()
        run.start()
        heap.run(run.done)
        closed = heap.clock.now()
        settled = closed + max(2.0, 3 * scenario.heartbeat_s)
        heap.run(lambda: heap.clock.now() > settled)  # what is on its way arrives
    except EngineError as e:  # as the end of an engine process would be
        raise LawError(str(e)) from e
    finally:
        if collects:
            gc.enable()
    _check(mesh, run)
    return SimResult(
        scenario=scenario,
        trace=run.read.about(generated),
        notes=_notes(scenario, run, generated),
        summary=_summary(mesh, run, slots, closed - opened),
        calls=run.records,
        slots=sorted(slots.slots, key=lambda row: (row["end_s"], row["iid"])),
        switches=sorted(slots.switches, key=lambda row: (row["end_s"], row["iid"])),
    )


class _Run:
    """Starts sessions and takes their ends."""

    def __init__(
        self, scenario: Scenario, heap: EventHeap, mesh: SimMesh, sessions: Iterator[Sequence[Call]], opened: float
    ) -> None:
        self._scenario, self._heap, self._mesh, self._opened = scenario, heap, mesh, opened
        self._sessions = sessions
        self._offsets = offsets(
            stagger_s=scenario.stagger_s,
            sessions_per_s=scenario.sessions_per_s,
            bursts=scenario.bursts,
            seed=scenario.seed,
        )
        self._running = 0
        self._all_begun = False
        # The first attempt may wait for a place until it is refused, and so may the last, after all refusals.
        self.laws = CallLaws(2 * scenario.deadline_s + scenario.longest_refused_s + SLACK_S)
        self.read = TraceTally()
        self.tally = Tally()
        self.records: list[CallRecord] = []
        self.owed_tokens = 0
        """Prompt tokens that had to be computed, by the calls' own account."""
        self.parted = 0
        """Answered calls that no other call of their session and model follows: nobody comes back for their leases."""
        self.failed = 0
        self.failure = ""
        """Of the first call that failed."""

    def start(self) -> None:
        """The first sessions."""
        if self._scenario.concurrent is None:
            self._schedule()
        else:
            for _ in range(self._scenario.concurrent):
                self._heap.at(self._opened + next(self._offsets), self._next)

    def _schedule(self) -> None:
        """The next session, at its time; it schedules the one after it."""
        session = self._take()
        if session is None:
            return

        def begin() -> None:
            self._begin(session)
            self._schedule()

        self._heap.at(self._opened + next(self._offsets), begin)

    def _next(self) -> None:
        session = self._take()
        if session is not None:
            self._begin(session)

    def _take(self) -> Sequence[Call] | None:
        session = next(self._sessions, None)
        self._all_begun = session is None
        return session

    def _begin(self, session: Sequence[Call]) -> None:
        self._running += 1
        self.read.add(session)
        Agent(
            self._heap,
            self._mesh,
            session,
            seed=self._scenario.seed,
            gap_cap_s=self._scenario.gap_cap_s,
            refused_s=self._scenario.longest_refused_s,
            laws=self.laws,
            done=self._ended,
        ).start()

    def _ended(self, made: list[CallRecord]) -> None:
        self._running -= 1
        records = [_from(r, self._opened) for r in made]
        self.laws.closed(records[0].session)
        self.tally.add(records)
        for r in records:
            if r.error:
                self.failed += 1
                self.failure = self.failure or f"call {r.call} of {r.session}: {r.error}"
        self.owed_tokens += sum(r.prompt_tokens - r.cached_tokens for r in records)
        self.parted += sum(not last.error for last in {r.model: r for r in records}.values())
        if self._scenario.detail:
            self.records += records
        if self._scenario.concurrent is not None:
            self._heap.after(0.0, self._next)

    def done(self) -> bool:
        """Whether every session is over. Raises LawError when nothing moves any more."""
        self.laws.stands(self._heap.clock.now())
        return self._all_begun and not self._running


def _checked(instances: Instances, sessions: Iterable[Sequence[Call]]) -> Iterator[Sequence[Call]]:
    """The sessions. Raises ScenarioError unless each call's model is served and its context fits wherever it may go."""
    limits: dict[str, int] = {}
    for settings, device, _ in instances:
        for name in settings.models:
            limits[name] = min(device.spec(name).context_tokens, limits.get(name, 1 << 62))
    iterator = iter(sessions)
    first = list(itertools.islice(iterator, 1))  # at once, not when the first session starts

    def check(session: Sequence[Call]) -> Sequence[Call]:
        for c in session:
            if c.model not in limits:
                raise ScenarioError(f"no instance serves {c.model}; there are {', '.join(sorted(limits))}")
            if c.prompt_tokens + max(1, c.completion_tokens) > limits[c.model]:
                raise ScenarioError(
                    f"session {c.session!r} call {c.call}: {c.prompt_tokens} + {c.completion_tokens} tokens exceed the "
                    f"context of {c.model} ({limits[c.model]} tokens)"
                )
        return session

    return map(check, itertools.chain(map(check, first), iterator))


def _from(record: CallRecord, start: float) -> CallRecord:
    """Times from the window's start, µs."""
    moved = {
        f: round(getattr(record, f) - start, 6) if getattr(record, f) else 0.0
        for f in ("intended_s", "sent_s", "first_s", "done_s")
    }
    return msgspec.structs.replace(record, **moved)


def _check(mesh: SimMesh, run: _Run) -> None:
    run.laws.end()
    for instance in mesh.instances.values():
        instance.laws.end()
    if not run.failed:
        computed = sum(i.driver.status().prefilled_tokens for i in mesh.instances.values())
        if computed != run.owed_tokens:
            raise LawError(
                f"{computed} prompt tokens were computed; prompts less what was cached come to {run.owed_tokens}"
            )
    books = mesh.router.state.leases.books
    if books.installed != books.honoured + books.expired + sum(books.discarded.values()) + books.live:
        raise LawError(f"the books of leases do not balance: {books}")
    charged = mesh.router.state.overlay.total()
    if charged != (0, 0, books.live):
        raise LawError(f"nothing is under way, but the router's overlay holds (calls, tokens, leases) {charged}")


def _summary(mesh: SimMesh, run: _Run, slots: SlotTally, window_s: float) -> dict[str, Any]:
    counts, books = mesh.router.state.counts, mesh.router.state.leases.books
    placed = sum(counts.routed.values())
    gpus = sum(i.gpus for i in mesh.instances.values())
    figures = run.tally.summary()
    answered = figures["sessions"] - figures["failed_sessions"]
    peaks: dict[str, float] = {}
    for i in mesh.instances.values():
        for name, peak in i.laws.kv_peak.items():
            share = round(peak / i.engine.capacities[name], 4)
            peaks[name] = max(share, peaks.get(name, 0.0))
    reserved = max(0, books.installed - run.parted)
    hosts = [i.engine.kept.host for i in mesh.instances.values() if i.engine.kept is not None]
    host_counts = [h.registry.counts for h in hosts if h is not None]
    return (
        figures
        | slots.summary()
        | {
            "window_s": round(window_s, 4),
            "gpus": gpus,
            "gpu_s_per_session": round(gpus * window_s / answered, 2) if answered else None,
            "recomputed_share": run.tally.recomputed_share,
            "leases": {
                "installed": books.installed,
                "honoured": books.honoured,
                "expired": books.expired,
                "discarded": sum(books.discarded.values()),
            },
            "unused_lease_share": round(1 - books.honoured / reserved, 4) if reserved else 0.0,
            "avoidable_opens": counts.avoidable_opens,
            "model_opens": sum(counts.opens.values()),
            "residency_hit_share": round(1 - sum(counts.opens.values()) / placed, 4) if placed else 0.0,
            "kv_peak_share": peaks,
            "replicas": mesh.replicas,
            "host_kv": {
                name: sum(getattr(c, name) for c in host_counts)
                for name in ("saved", "restored", "restored_tokens", "evicted", "refused")
            },
            "events": mesh.events,
        }
    )


def _notes(scenario: Scenario, run: _Run, generated: str) -> list[str]:
    notes = ["every figure is simulated: predicted from component figures, not measured"]
    notes.append(f"calibration {scenario.calibration}: {profiles.CALIBRATIONS[scenario.calibration]}")
    if generated:
        notes.append(f"the trace is generated: {generated}")
    gaps = run.read.gap_sources
    if gaps.get("synthetic"):
        notes.append(f"{gaps['synthetic']} of {sum(gaps.values())} gaps are synthetic")
    if missing := trace.missing_gaps(gaps):
        notes.append(missing)
    if run.failed:
        notes.append(f"{run.failed} calls failed, and with each the rest of its session; first {run.failure}")
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
