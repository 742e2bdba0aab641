"""`talaria simulate`: a trace on a described cluster, in virtual time."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from rich.console import Console
from rich.table import Table

from talaria_cli.replay import model_map, table
from talaria_replay import trace
from talaria_replay.generate import SHAPES, generate
from talaria_replay.live.results import write_text
from talaria_replay.ranges import checked
from talaria_replay.sim import catalog, profiles
from talaria_replay.sim.arrivals import Bursts
from talaria_replay.sim.capacity import Capacity, search
from talaria_replay.sim.laws import LawError
from talaria_replay.sim.run import SimResult, capacity_table, encode, simulate_sessions
from talaria_replay.sim.scenario import Group, Scenario, ScenarioError
from talaria_replay.sim.store import ResultStore
from talaria_replay.trace import Call

SHAPE_SESSIONS = 30
"""As many as the paper's replay has."""


@dataclass(frozen=True, slots=True)
class CatalogOptions:
    """`size` models of Zipf popularity, `per_instance` on each instance; size 0: no catalog."""

    size: int = 0
    exponent: float = 1.0
    per_instance: int = 3


@dataclass(frozen=True, slots=True)
class SimulateOptions:
    """As on the command line. `trace` is a file, or the name of a generated shape; `sessions` None: all, or 30."""

    trace: str
    hardware: list[str]
    models: list[str]
    model_map: list[str]
    sessions: int | None
    max_calls: int | None
    scenario: dict[str, Any]
    out: Path | None
    as_json: bool
    catalog: CatalogOptions = CatalogOptions()
    capacity_s: float | None = None
    """The capacity question's bound on p95 SCT; None: it is not asked."""
    most_instances: int = 64
    keep: Path | None = None
    """Folder of whole results, from which a stopped command goes on."""


def parse_bursts(text: str | None) -> Bursts | None:
    """EVERY_S,LENGTH_S,FACTOR. Exits with a message on anything else."""
    if text is None:
        return None
    try:
        every, length, factor = (float(part) for part in text.split(","))
    except ValueError:
        raise SystemExit(f"talaria simulate: --bursts {text!r}: expected EVERY_S,LENGTH_S,FACTOR") from None
    return Bursts(every_s=every, length_s=length, factor=factor)


def groups(hardware: list[str], models: list[str]) -> tuple[Group, ...]:
    """Groups of "NAME", "NAMExCOUNT" or "NAME[xCOUNT]:model,model"; without models of its own, `models`.

    A model with a minus before it is closed at the start, and opened on demand.
    """
    out = []
    for spec in hardware:
        name, count, own = _hardware(spec)
        chosen = own or tuple(models)
        if not chosen:
            raise ScenarioError(f"--hardware {spec!r}: no model; give --models, or NAME:model,model")
        models_of = tuple(m.removeprefix("-") for m in chosen)
        opened = None if models_of == chosen else tuple(m for m in chosen if not m.startswith("-"))
        pool = "hot" if len(chosen) == 1 else "cold"
        out.append(Group(hardware=name, models=models_of, open=opened, count=count, pool=pool))  # type: ignore[arg-type]
    return tuple(out)


def _hardware(spec: str) -> tuple[str, int, tuple[str, ...]]:
    """(profile, count, models)."""
    left, _, own = spec.partition(":")
    name, times, count = left.rpartition("x")
    counted = bool(times) and count.isdigit()
    return name if counted else left, int(count) if counted else 1, tuple(m for m in own.split(",") if m)


def _scenario(options: SimulateOptions) -> tuple[Scenario, catalog.Catalog | None]:
    """The scenario, and the catalog that was placed for it."""
    c = options.catalog
    if not c.size:
        scenario = Scenario(groups=groups(options.hardware, options.models), **options.scenario)
        return checked(scenario, ScenarioError), None
    if len(options.hardware) != 1:
        raise ScenarioError("a catalog needs one --hardware NAMExCOUNT")
    name, count, own = _hardware(options.hardware[0])
    made = catalog.Catalog(
        hardware=name,
        base=own or tuple(options.models),
        size=c.size,
        exponent=c.exponent,
        per_instance=c.per_instance,
    )
    made = checked(made, ScenarioError)
    count = count if options.capacity_s is None else made.least
    return checked(Scenario(groups=made.groups(count), **options.scenario), ScenarioError), made


class Loaded(NamedTuple):
    """What is simulated."""

    sessions: Iterable[Sequence[Call]]
    """Their models are those of the scenario."""
    generated: str = ""
    """How they were made; "": read from a file."""
    cut: str = ""
    """What the options left of the file; "": all of it."""


def load_trace(options: SimulateOptions, scenario: Scenario, of: catalog.Catalog | None = None) -> Loaded:
    """The trace, read or made."""
    served = list(dict.fromkeys(profiles.model(m).name for g in scenario.groups for m in g.models))
    served = served if of is None else of.models
    if options.trace in SHAPES:
        limit = min(tokens for _, _, tokens in capacity_table(scenario))
        limit = min([limit, *(profiles.model(m).context_tokens for g in scenario.groups for m in g.models)])
        count = options.sessions or SHAPE_SESSIONS
        made = generate(
            options.trace,
            sessions=count,
            models=served,
            seed=scenario.seed,
            max_calls=options.max_calls,
            max_context_tokens=limit,
            shares=None if of is None else of.shares,
        )
        said = f"shape {options.trace!r}, {count} sessions, seed {scenario.seed}"
        if of is not None:
            said += f", {of.size} models, Zipf {of.exponent:g}"
        return Loaded(trace.grouped(made), said)
    calls = trace.read(Path(options.trace))
    named = model_map(options.model_map)
    sessions = list(trace.sessions(calls).values())
    out = []
    for n, session in enumerate(sessions[: options.sessions]):
        changed = []
        for call in session[: options.max_calls]:
            name = named.get(call.model) or named.get("*") or call.model
            model = name if name in served else served[n % len(served)] if not named else name
            changed.append(msgspec.structs.replace(call, model=model))
        out.append(changed)
    kept, cut = sum(map(len, out)), ""
    if kept < len(calls):
        cut = f"of the trace's {len(sessions)} sessions, {len(out)}; of its {len(calls)} calls, {kept}"
    return Loaded(out, cut=cut)


def _simulated(options: SimulateOptions, scenario: Scenario, of: catalog.Catalog | None) -> SimResult:
    sessions, generated, cut = load_trace(options, scenario, of)
    if options.keep is None:
        result = simulate_sessions(scenario, sessions, generated=generated)
    else:
        calls = [call for session in sessions for call in session]
        result = ResultStore(options.keep).simulate(scenario, calls, generated=generated)
    return msgspec.structs.replace(result, notes=[*result.notes, cut]) if cut else result


def run_simulate(options: SimulateOptions) -> int:
    """Simulate; the figures go to stdout. Returns the exit code: 1 calls failed, 2 it cannot be simulated, 3 a bug."""
    try:
        scenario, of = _scenario(options)
        if options.capacity_s is not None:
            return _capacity(options, scenario, of)
        started = time.process_time()
        result = _simulated(options, scenario, of)
        took = time.process_time() - started
    except (ScenarioError, profiles.ProfileError, trace.TraceError, ValueError, OSError) as e:
        for line in str(e).splitlines():
            print(f"talaria simulate: {line}", file=sys.stderr)
        return 2
    except LawError as e:
        print(f"talaria simulate: {e}", file=sys.stderr)
        return 3
    if options.out is not None:
        write_text(options.out, encode(result).decode())
    if options.as_json:
        print(json.dumps({"simulated": True, "notes": result.notes, "trace": result.trace, "summary": result.summary}))
    else:
        _show(result, took)
    return 1 if result.summary["failed_calls"] else 0


def _capacity(options: SimulateOptions, scenario: Scenario, of: catalog.Catalog | None) -> int:
    assert options.capacity_s is not None
    found = search(
        scenario,
        options.capacity_s,
        lambda sized: _simulated(options, sized, of),
        most=options.most_instances,
        size=None if of is None else lambda count: msgspec.structs.replace(scenario, groups=of.groups(count)),
        least=1 if of is None else of.least,
        tell=lambda t: print(
            f"simulate: {t.instances} instances: p95 SCT {t.sct_p95_s:.1f} s, {t.failed_calls} calls failed",
            file=sys.stderr,
            flush=True,
        ),
    )
    if options.out is not None and found.result is not None:
        write_text(options.out, encode(found.result).decode())
    if options.as_json:
        tried = [t._asdict() for t in found.tried]
        notes = found.result.notes if found.result is not None else []
        answer = {"bound_s": options.capacity_s, "instances": found.instances, "tried": tried, "notes": notes}
        print(json.dumps({"simulated": True} | answer))
    else:
        _show_capacity(found, options.capacity_s)
    return 0 if found.instances is not None else 1


def _show_capacity(found: Capacity, bound_s: float) -> None:
    console = Console()
    shown = Table("instances", "p95 SCT, s", "failed calls", "GPU-s per session", title="SIMULATED")
    for t in found.tried:
        row = (str(t.instances), f"{t.sct_p95_s:.1f}", str(t.failed_calls), _whole(t.gpu_s_per_session))
        shown.add_row(*row, style="bold" if t.instances == found.instances else "")
    console.print(shown)
    if found.instances is None:
        console.print(f"p95 SCT stays above {bound_s:g} s, or calls fail, with {found.tried[-1].instances} instances")
    else:
        console.print(f"{found.instances} instances keep p95 SCT under {bound_s:g} s")
    for note in found.result.notes if found.result is not None else []:
        console.print(f"- {note}", markup=False)


def _show(result: SimResult, took_s: float) -> None:
    console = Console()
    s = result.summary
    console.print(table(s, f"SIMULATED, calibration {result.scenario.calibration}, policy {result.scenario.policy}"))
    extra = Table(show_header=False)
    paths = ", ".join(f"{path} {of['share']:.0%}" for path, of in s["switch_paths"].items())
    rows = {
        "calls, sessions": f"{s['calls']}, {s['sessions']} ({s['failed_calls']} failed, {s['retries']} retries)",
        "window": f"{s['window_s']:.1f} s simulated in {took_s:.1f} s of CPU",
        "slots, switches": f"{s['slots']}, {s['switches']}; switching takes {s['switch_share']:.1%} of slot time",
        "switch": f"p50 {s['switch_ms'].get('p50', 0):.0f} ms; {paths}",
        "calls over a switch": f"{s['suspended']} suspended, {s['retracted']} retracted",
        "prefix reuse": f"{s['cached_share']:.1%} of prompt tokens; {s['host_kv']['restored_tokens']} from host",
        "returns into the open slot": f"{s['sp_admission_rate']:.1%}",
        "returns to the same instance": f"{s['same_instance_share'] or 0:.1%}",
        "leases": ", ".join(f"{n} {what}" for what, n in s["leases"].items()),
        "avoidable opens": str(s["avoidable_opens"]),
        "models opened, closed": ", ".join(f"{n} {what}" for what, n in s["replicas"].items()),
        "cost": f"{_whole(s['gpu_s_per_session'])} GPU-s per session on {s['gpus']} GPUs",
        "peak KV": ", ".join(f"{name} {share:.0%}" for name, share in list(s["kv_peak_share"].items())[:8]),
    }
    for name, value in rows.items():
        extra.add_row(name, value)
    console.print(extra)
    for note in result.notes:
        console.print(f"- {note}", markup=False)


def _whole(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def run_list() -> int:
    """The shipped profiles and shapes."""
    console = Console()
    for kind in ("hardware", "models"):
        for row in profiles.describe(kind):
            console.print(f"{kind:9} {row['name']:16} {row['about']}", markup=False)
    console.print(f"{'shapes':9} {', '.join(SHAPES)}", markup=False)
    return 0
