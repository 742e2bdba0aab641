"""The result file of a replay: always whole on disk, and never mistaken for complete when it is not.

JSON: {"kind", "complete", "plan", "runs", "summary", "calls"}. It is written to a temporary file beside it and renamed,
after each finished session and at the end; `complete` is true only in the last version. A stopped run is resumed by
session: finished sessions stay as they were measured, the others run again from their first call.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from talaria_replay.measure import CallRecord, summary

KIND = "talaria-replay-1"


class ResultError(ValueError):
    """The result file cannot be used as asked; the message says why."""


class Results(msgspec.Struct, kw_only=True):
    """A run's results so far.

    Attributes:
        plan: what determines the run: trace digest, options, url. A resumed run must have the same.
        runs: how many starts it took; more than one means that contention differed between them.
    """

    kind: str = KIND
    complete: bool = False
    plan: dict[str, Any]
    runs: int = 1
    summary: dict[str, Any] = {}
    calls: list[CallRecord] = []

    def finished_sessions(self, sizes: dict[str, int]) -> set[str]:
        """Sessions whose every call (`sizes`: calls by session) was answered."""
        good: dict[str, int] = {}
        for r in self.calls:
            good[r.session] = good.get(r.session, 0) + (not r.error)
        return {s for s, n in sizes.items() if good.get(s) == n}


def close(results: Results) -> None:
    """The run is over: every session was replayed."""
    results.complete, results.summary = True, summary(results.calls)


def write(path: Path, results: Results) -> None:
    """Replace the file at once."""
    write_text(path, msgspec.json.format(msgspec.json.encode(results), indent=1).decode())


def write_text(path: Path, text: str) -> None:
    """Write a whole file or nothing: a temporary file in the same folder, synced, then renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        os.fchmod(handle, 0o644)  # mkstemp's are for the owner alone
        with os.fdopen(handle, "w", encoding="utf-8") as out:
            out.write(text)
            out.flush()
            os.fsync(out.fileno())
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def read(path: Path) -> Results:
    """The results in `path`.

    Raises:
        ResultError: it is no result file.
    """
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Results)
    except (OSError, msgspec.DecodeError) as e:
        raise ResultError(f"{path}: {e}") from e
    if found.kind != KIND:
        raise ResultError(f"{path}: kind {found.kind!r}, expected {KIND!r}")
    return found


def resume(path: Path, plan: dict[str, Any], sizes: dict[str, int]) -> Results:
    """The stopped run in `path`, its unfinished sessions removed.

    Raises:
        ResultError: it is complete, is no result file, or has another plan.
    """
    found = read(path)
    if found.complete:
        raise ResultError(f"{path}: the run is complete; there is nothing to resume")
    differs = sorted(k for k in plan.keys() | found.plan.keys() if plan.get(k) != found.plan.get(k))
    if differs:
        raise ResultError(f"{path}: it was made with another {', '.join(differs)}")
    done = found.finished_sessions(sizes)
    found.calls = [r for r in found.calls if r.session in done]
    found.runs += 1
    return found
