"""The format of bench/results/NAME.json (see the README of this folder)."""

from __future__ import annotations

import datetime as dt
import json
import os
import platform
import statistics
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"


class Figure(TypedDict):
    """One figure over all runs. A ratio's unit is "x" and its name says what is over what."""

    median: float
    min: float
    max: float
    unit: str


def figure(values: Sequence[float], unit: str) -> Figure:
    """Median, min and max of one value per run, to five significant digits. Raises ValueError if there is none."""
    if not values:
        raise ValueError("a figure needs at least one run")

    def short(value: float) -> float:
        return float(f"{value:.5g}")

    return {
        "median": short(statistics.median(values)),
        "min": short(min(values)),
        "max": short(max(values)),
        "unit": unit,
    }


def percentile(values: Sequence[float], q: float) -> float:
    """The smallest value that at least `q` (0..1) of `values` do not exceed."""
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    return ordered[max(0, min(len(ordered) - 1, -(-int(q * 1000) * len(ordered) // 1000) - 1))]


def commit() -> str:
    """The commit measured, "-dirty" when the tree (results aside) differs from it."""

    def git(*args: str) -> str:
        return subprocess.run(
            ["git", "-C", str(ROOT), *args], capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        head = git("rev-parse", "HEAD")
        changed = git("status", "--porcelain", "--", ".", ":(exclude)bench/results")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head + ("-dirty" if changed else "")


def machine() -> str:
    """Processor, its count, memory, Python and the load when the run began."""
    model = ""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
        memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    except OSError:
        memory_gib = 0.0
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return (
        f"{cpus} cpus of {model or platform.machine()}, {memory_gib:.0f} GiB, {platform.system()} {platform.release()},"
        f" Python {platform.python_version()}, load {os.getloadavg()[0]:.1f} at the start"
    )


def write(name: str, runs: int, figures: dict[str, Figure], out: Path | None = None, *, where: str = "") -> Path:
    """Write a benchmark's result; `where` is `machine()` taken at its start. Returns the file."""
    path = out or RESULTS / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    result = {
        "name": name,
        "when": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": where or machine(),
        "runs": runs,
        "figures": dict(sorted(figures.items())),
    }
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return path
