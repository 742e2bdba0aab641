"""`talaria report`: the paper's figures and tables beside simulated ones."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from talaria_replay import trace
from talaria_replay.live.results import write_text
from talaria_replay.report import markdown, spec
from talaria_replay.report.figures import draw
from talaria_replay.report.run import Runner
from talaria_replay.sim.laws import LawError
from talaria_replay.sim.profiles import ProfileError
from talaria_replay.sim.scenario import ScenarioError


@dataclass(frozen=True, slots=True)
class ReportOptions:
    """As on the command line."""

    name: str
    out: Path
    trace: Path | None
    only: list[str]
    issues: int
    seed: int


def run_report(options: ReportOptions) -> int:
    """Simulate, draw and write `report.md`; returns the exit code."""
    try:
        chosen = spec.load(options.name)
        experiments = spec.select(chosen, options.only)
        calls = trace.read(options.trace) if options.trace else None
        runner = Runner(
            chosen,
            calls=calls,
            source=f"{options.issues} issues of {options.trace.name} on each model" if options.trace else "",
            issues=options.issues,
            seed=options.seed,
            tell=lambda what: print(f"report: {what}", file=sys.stderr, flush=True),
            keep=options.out / "runs",
        )
        print(f"report: {runner.gaps}", file=sys.stderr, flush=True)
        outcomes = [runner.run(e) for e in experiments]
    except (spec.SpecError, ScenarioError, ProfileError, trace.TraceError, OSError) as e:
        for line in str(e).splitlines():
            print(f"talaria report: {line}", file=sys.stderr)
        return 2
    except LawError as e:
        print(f"talaria report: {e}", file=sys.stderr)
        return 3
    options.out.mkdir(parents=True, exist_ok=True)
    figures: dict[str, str] = {}
    for outcome in outcomes:
        file = f"{outcome.experiment.id}.png"
        try:
            if draw(outcome, options.out / file):
                figures[outcome.experiment.id] = file
        except ImportError:
            print("report: no figures: matplotlib is not installed", file=sys.stderr)
            break
    write_text(options.out / "report.md", markdown.page(outcomes, figures, runner.source, runner.gaps))
    print(options.out / "report.md")
    return 0
