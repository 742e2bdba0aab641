"""The result file of a replay: always whole on disk, and never mistaken for complete when it is not.

JSON: {"kind", "complete", "plan", "runs", "wall_s", "notes", "summary", "calls"}. It is written to a temporary file
beside it and renamed, after each finished session and at the end. `complete` is true only in the last version, and only
if every session has all its calls. A run that was stopped, or in which sessions failed, is resumed by session: finished
sessions stay as they were measured, the others run again from their first call. A resumed run's times go on where the
window of the run before ended, so that records do not overlap.
"""

from __future__ import annotations

import os
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from talaria_replay.measure import CallRecord, summary

KIND = "talaria-replay-2"
"""Counted up whenever the digests of bodies or the plan change their meaning, so that two kinds are not compared."""


class ResultError(ValueError):
    """The result file cannot be used as asked; the message says why."""


class Results(msgspec.Struct, kw_only=True):
    """A run's results so far.

    Attributes:
        plan: what determines the run: trace digest, options, url. A resumed run must have the same.
        runs: how many starts it took; more than one means that contention differed between them.
        wall_s: the windows of all runs, one after the other, from the first that has sessions here.
        notes: what to know before using the figures.
        summary: empty in a run that was stopped.
    """

    kind: str = KIND
    complete: bool = False
    plan: dict[str, Any]
    runs: int = 1
    wall_s: float = 0.0
    notes: list[str] = []
    summary: dict[str, Any] = {}
    calls: list[CallRecord] = []

    def finished_sessions(self, sizes: dict[str, int]) -> set[str]:
        """Sessions whose every call (`sizes`: calls by session) was answered."""
        good: dict[str, int] = {}
        for r in self.calls:
            good[r.session] = good.get(r.session, 0) + (not r.error)
        return {s for s, n in sizes.items() if good.get(s) == n}


def close(results: Results, sizes: dict[str, int]) -> None:
    """The run is over: no session has calls left to make. `sizes`: calls by session."""
    results.complete = results.finished_sessions(sizes) == sizes.keys()
    not_made = sum(sizes.values()) - len(results.calls)
    results.summary = summary(results.calls) | {"calls_not_made": not_made}


class Saver:
    """Writes results in a thread of its own, one version at a time; of those that wait, the latest wins."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._thread = ThreadPoolExecutor(1, "results")
        self._last: Future[None] | None = None

    def soon(self, results: Results) -> BaseException | None:
        """Write them as they are now. Returns why the version before could not be written, if that is known by now."""
        failed = None
        if self._last is not None and not self._last.cancel() and self._last.done():
            failed = self._last.exception()
        version = msgspec.structs.replace(results, calls=list(results.calls))
        self._last = self._thread.submit(write, self._path, version)
        return failed

    def close(self) -> None:
        """Return when the last version is on disk. Raises OSError if it cannot be written."""
        self._thread.shutdown()
        if self._last is not None:
            self._last.result()


def write(path: Path, results: Results) -> None:
    """Replace the file at once."""
    write_text(path, msgspec.json.format(msgspec.json.encode(results), indent=1).decode())


def check_writable(path: Path) -> None:
    """Raise OSError unless a file could be put there."""
    if path.is_dir():
        raise IsADirectoryError(f"{path}: is a folder; expected a file's name")
    path.parent.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=path.parent).close()


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
        raise ResultError(f"{path}: kind: expected {KIND!r}, got {found.kind!r} (of another version of Talaria)")
    return found


def resume(path: Path, plan: dict[str, Any], sizes: dict[str, int]) -> Results:
    """The stopped run in `path`, its unfinished sessions removed.

    Raises:
        ResultError: every session is complete, it is no result file, or it has another plan.
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
    found.complete, found.summary = False, {}
    if not found.calls:
        found.wall_s = 0.0
    return found
