"""The mesh as a gateway, measured beside a direct call, LiteLLM's proxy and sglang-router.

    python -m bench.mesh [--quick] [--runs N] [--out bench/results/mesh.json]

All on loopback: one load generator, and behind every system the same pace (the sim engine behind Talaria, a mock
worker behind the others). Within a run each case visits all systems in turn: what else the machine does meets all.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from bench.gateway import cases as all_cases
from bench.gateway import venv
from bench.gateway.cases import Case
from bench.gateway.figures import Run, gateway_cpu_ms, make, verdicts
from bench.gateway.load import Job, Result
from bench.gateway.processes import Processes, StartError
from bench.gateway.systems import (
    DIRECT,
    LITELLM,
    SGLANG_ROUTER,
    TALARIA,
    System,
    start_litellm,
    start_sglang_router,
    start_talaria,
    start_worker,
)
from bench.report import ROOT, machine, percentile, write

BUDGET_S = 600.0
QUICK_BUDGET_S = 50.0
"""Seconds of measurement; starting the systems comes on top."""
PATIENCE = 1.8
"""No run is begun that would take longer than so many budgets in all: calls in flight at a window's end are waited for,
and a slow system's take seconds."""
OVERHEAD_S = 0.35
"""Per job beside its window: connections, warm-up, the last answers."""
SHORTEST_S, LONGEST_S = 0.4, 3.0


class Load:
    """The load generator's process."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.gateway.load"], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def run(self, job: Job) -> Result:
        """One job. Raises RuntimeError with the reason when it could not be carried out."""
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError("the load generator has no pipes")
        self._process.stdin.write(msgspec.json.encode(job) + b"\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the load generator has ended")
        answer = msgspec.json.decode(line)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return msgspec.convert(answer, Result)

    def close(self) -> None:
        """End it."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait(10)
        if self._process.stdout is not None:
            self._process.stdout.close()


@contextlib.contextmanager
def running(wanted: set[str]) -> Iterator[dict[str, System]]:
    """The wanted systems, started; what cannot start is reported and left out, except the direct reference."""
    with tempfile.TemporaryDirectory(prefix="talaria-bench-") as directory, Processes(Path(directory)) as processes:
        worker = start_worker(processes)
        systems = {DIRECT: worker}
        starts: dict[str, Callable[[], System]] = {
            TALARIA: lambda: start_talaria(processes),
            SGLANG_ROUTER: lambda: start_sglang_router(processes, worker),
            LITELLM: lambda: start_litellm(processes, worker),
        }
        missing = venv.prepare() if wanted & {LITELLM, SGLANG_ROUTER} else ""
        for name, start in starts.items():
            if name not in wanted:
                continue
            if missing and name != TALARIA:
                print(f"bench: {name} is left out: {missing}", flush=True)
                continue
            began, before = time.monotonic(), processes.names
            try:
                systems[name] = start()
            except StartError as e:
                processes.stop(*[n for n in processes.names[::-1] if n not in before])
                print(f"bench: {name} is left out: {e}", flush=True)
            else:
                print(f"bench: {name} is up after {time.monotonic() - began:.1f} s", flush=True)
        yield systems


def window_s(cases: list[Case], systems: int, runs: int, budget_s: float) -> float:
    """Length of a window of weight 1, so that all runs together stay within `budget_s`."""
    jobs = len(cases) * systems * runs
    weights = sum(c.weight for c in cases) * systems * runs
    return min(LONGEST_S, max(SHORTEST_S, (budget_s - jobs * OVERHEAD_S) / weights))


def measure(load: Load, system: System, case: Case, seconds: float) -> Result:
    """One case on one system."""
    job = Job(
        port=system.port,
        model=case.model,
        size_bytes=case.size_bytes,
        clients=case.clients,
        stream=case.stream,
        tokens=case.tokens,
        seconds=seconds * case.weight,
        bursts=case.bursts,
        warm=min(4, case.clients),
        sessions=case.sessions,
        cpu=system.cpu(),
    )
    return load.run(job)


def describe(result: Result) -> str:
    """A sample in one line."""
    parts = [f"{result.requests / result.wall_s:8.1f} req/s", f"{gateway_cpu_ms(result):7.2f} ms CPU/req"]
    if result.ttft_ms:
        parts.append(f"ttft {percentile(result.ttft_ms, 0.5):7.2f} / {percentile(result.ttft_ms, 0.95):7.2f} ms")
    elif result.total_ms:
        parts.append(f"total {percentile(result.total_ms, 0.5):6.2f} / {percentile(result.total_ms, 0.95):7.2f} ms")
    parts.append(f"load {result.load_cpu_s / result.wall_s:4.0%}")
    if result.failed:
        parts.append(f"{result.failed} FAILED: {result.errors[0]}")
    return "  ".join(parts)


def warm_up(load: Load, systems: dict[str, System]) -> None:
    """Every system has served every size once, streamed and whole, before anything counts."""
    for system in systems.values():
        for case in (
            all_cases.unpaced("1kb", 16, stream=True),
            all_cases.unpaced("1kb", 16, stream=False),
            all_cases.unpaced("400kb", 1, stream=True),
            all_cases.paced("1kb", 1),
        ):
            with contextlib.suppress(RuntimeError):
                measure(load, system, case, 0.5)


def collect(
    load: Load, systems: dict[str, System], cases: list[Case], runs: int, budget_s: float
) -> tuple[list[Run], int]:
    """All cases on all systems, in turn, `runs` times or until time is over; and how many answers were wrong."""
    seconds = window_s(cases, len(systems), runs, budget_s)
    print(f"bench: {len(cases)} cases, {len(systems)} systems, {runs} runs, windows of {seconds:.2f} s", flush=True)
    began = time.monotonic()
    done: list[Run] = []
    failed = 0
    hopeless: set[tuple[str, str]] = set()
    for number in range(runs):
        one: Run = {}
        for case in cases:
            names = list(systems)
            turn = number % len(names)
            for name in names[turn:] + names[:turn]:
                if (case.name, name) in hopeless:
                    continue
                try:
                    result = measure(load, systems[name], case, seconds)
                except RuntimeError as e:
                    print(f"  {number + 1} {case.name:28} {name:14} {e}", flush=True)
                    failed += name in {DIRECT, TALARIA}
                    hopeless.add((case.name, name))  # it took the whole time-out, and would again
                    continue
                print(f"  {number + 1} {case.name:28} {name:14} {describe(result)}", flush=True)
                failed += result.failed if name in {DIRECT, TALARIA} else 0
                if not result.failed:
                    one.setdefault(case.name, {})[name] = result
        done.append(one)
        spent = time.monotonic() - began
        if len(done) < runs and spent + spent / len(done) > budget_s * PATIENCE:
            print(f"bench: time is over; {len(done)} runs count", flush=True)
            break
    return done, failed


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.mesh", description="The mesh as a gateway, beside others.")
    parser.add_argument("--runs", type=int, default=0, help="repeats (default 3, with --quick 2)")
    parser.add_argument("--quick", action="store_true", help="only what the goals name, in two minutes")
    parser.add_argument("--budget-s", type=float, default=0.0, help="seconds of measurement")
    parser.add_argument("--only", default="", metavar="REGEX", help="cases whose name matches")
    parser.add_argument("--systems", default=f"{TALARIA},{LITELLM},{SGLANG_ROUTER}", help="beside direct")
    parser.add_argument("--out", type=Path, default=None, help="default bench/results/mesh.json")
    args = parser.parse_args()
    where = machine()
    cases = [c for c in (all_cases.quick() if args.quick else all_cases.every()) if re.search(args.only, c.name)]
    runs = args.runs or (2 if args.quick else 3)
    load = Load()
    try:
        with running(set(args.systems.split(","))) as systems:
            warm_up(load, systems)
            budget_s = args.budget_s or (QUICK_BUDGET_S if args.quick else BUDGET_S)
            samples, failed = collect(load, systems, cases, runs, budget_s)
    finally:
        load.close()
    figures = make(cases, samples)
    path = write("mesh", len(samples), figures, args.out, where=where)
    for line in verdicts(figures):
        print(line)
    print(f"bench: {len(figures)} figures in {path}")
    if failed:
        print(f"bench: {failed} answers of talaria or the direct worker were wrong")
    return 1 if failed or (TALARIA in args.systems and TALARIA not in systems) else 0


if __name__ == "__main__":
    sys.exit(main())
