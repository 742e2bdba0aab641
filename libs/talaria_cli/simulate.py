"""`talaria simulate`: a trace on a described cluster, in virtual time."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from talaria_cli.replay import model_map, table
from talaria_replay import trace
from talaria_replay.generate import SHAPES, generate
from talaria_replay.live.results import write_text
from talaria_replay.sim import profiles
from talaria_replay.sim.run import SimResult, capacity_table, encode, simulate
from talaria_replay.sim.scenario import Group, Scenario, ScenarioError
from talaria_replay.trace import Call


@dataclass(frozen=True, slots=True)
class SimulateOptions:
    """As on the command line. `trace` is a file, or the name of a generated shape."""

    trace: str
    hardware: list[str]
    models: list[str]
    model_map: list[str]
    sessions: int
    max_calls: int | None
    scenario: dict[str, Any]
    out: Path | None
    as_json: bool


def groups(hardware: list[str], models: list[str]) -> tuple[Group, ...]:
    """Groups of "NAME", "NAMExCOUNT" or "NAME[xCOUNT]:model,model"; without models of its own, `models`."""
    out = []
    for spec in hardware:
        left, _, own = spec.partition(":") if not spec.endswith(".toml") else (spec, "", "")
        name, times, count = left.rpartition("x")
        counted = bool(times) and count.isdigit()
        chosen = tuple(m for m in own.split(",") if m) or tuple(models)
        if not chosen:
            raise ScenarioError(f"--hardware {spec!r}: no model; give --models, or NAME:model,model")
        pool = "hot" if len(chosen) == 1 else "cold"
        number = int(count) if counted else 1
        out.append(Group(hardware=name if counted else left, models=chosen, count=number, pool=pool))  # type: ignore[arg-type]
    return tuple(out)


def load_trace(options: SimulateOptions, scenario: Scenario) -> tuple[list[Call], str]:
    """The calls, their models those of the scenario, and how they were made ("": read)."""
    served = list(dict.fromkeys(profiles.model(m).name for g in scenario.groups for m in g.models))
    if options.trace in SHAPES:
        limit = min(tokens for _, _, tokens in capacity_table(scenario))
        limit = min([limit, *(profiles.model(m).context_tokens for g in scenario.groups for m in g.models)])
        made = generate(
            options.trace,
            sessions=options.sessions,
            models=served,
            seed=scenario.seed,
            max_calls=options.max_calls,
            max_context_tokens=limit,
        )
        said = f"shape {options.trace!r}, {options.sessions} sessions, seed {scenario.seed}"
        return list(made), said
    calls = trace.read(Path(options.trace))
    named = model_map(options.model_map)
    sessions = list(trace.sessions(calls).values())[: options.sessions]
    out = []
    for n, session in enumerate(sessions):
        for call in session[: options.max_calls]:
            name = named.get(call.model) or named.get("*") or call.model
            model = name if name in served else served[n % len(served)] if not named else name
            out.append(msgspec.structs.replace(call, model=model))
    return out, ""


def run_simulate(options: SimulateOptions) -> int:
    """Simulate; the figures go to stdout. Returns the exit code."""
    try:
        scenario = Scenario(groups=groups(options.hardware, options.models), **options.scenario)
        calls, generated = load_trace(options, scenario)
        started = time.process_time()
        result = simulate(scenario, calls, generated=generated)
        took = time.process_time() - started
    except (ScenarioError, profiles.ProfileError, trace.TraceError, ValueError, OSError) as e:
        for line in str(e).splitlines():
            print(f"talaria simulate: {line}", file=sys.stderr)
        return 2
    if options.out is not None:
        write_text(options.out, encode(result).decode())
    if options.as_json:
        print(json.dumps({"simulated": True, "notes": result.notes, "trace": result.trace, "summary": result.summary}))
    else:
        _show(result, took)
    return 1 if result.summary["failed_calls"] else 0


def _show(result: SimResult, took_s: float) -> None:
    console = Console()
    s = result.summary
    console.print(table(s, f"SIMULATED, calibration {result.scenario.calibration}, policy {result.scenario.policy}"))
    extra = Table(show_header=False)
    rows = {
        "calls, sessions": f"{s['calls']}, {s['sessions']} ({s['failed_calls']} failed, {s['retries']} retries)",
        "window": f"{s['window_s']:.1f} s simulated in {took_s:.1f} s of CPU",
        "slots, switches": f"{s['slots']}, {s['switches']}; switching takes {s['switch_share']:.1%} of slot time",
        "switch": f"p50 {s['switch_ms'].get('p50', 0):.0f} ms",
        "prefix reuse": f"{s['cached_share']:.1%} of prompt tokens",
        "returns to the same instance": f"{s['same_instance_share'] or 0:.1%}",
        "leases": ", ".join(f"{n} {what}" for what, n in s["leases"].items()),
        "avoidable opens": str(s["avoidable_opens"]),
        "peak KV": ", ".join(f"{name} {share:.0%}" for name, share in s["kv_peak_share"].items()),
    }
    for name, value in rows.items():
        extra.add_row(name, value)
    console.print(extra)
    for note in result.notes:
        console.print(f"- {note}", markup=False)


def run_list() -> int:
    """The shipped profiles and shapes."""
    console = Console()
    for kind in ("hardware", "models"):
        for row in profiles.describe(kind):
            console.print(f"{kind:9} {row['name']:16} {row['about']}", markup=False)
    console.print(f"{'shapes':9} {', '.join(SHAPES)}", markup=False)
    return 0
