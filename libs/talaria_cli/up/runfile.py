"""What a running `talaria up` leaves in its state directory, so that other commands find it."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path
from typing import IO

import msgspec

NAME = "up.json"


class RunningPart(msgspec.Struct, frozen=True, kw_only=True):
    """One process."""

    role: str
    pid: int
    log: str
    http: str | None = None
    restarts: int = 0


class Running(msgspec.Struct, frozen=True, kw_only=True):
    """One `talaria up`."""

    pid: int
    config: str
    url: str
    """Base URL of the api."""
    bus_url: str
    started_ms: int
    parts: dict[str, RunningPart] = {}


def write(state_dir: Path, running: Running) -> None:
    """Replace the run file in one step: a reader never sees half of it."""
    temporary = state_dir / f"{NAME}.{os.getpid()}"
    temporary.write_bytes(msgspec.json.format(msgspec.json.encode(running)))
    temporary.replace(state_dir / NAME)


def read(state_dir: Path) -> Running | None:
    """The run file, or None where nothing runs (a file left by a killed `up` counts as nothing)."""
    try:
        running = msgspec.json.decode((state_dir / NAME).read_bytes(), type=Running)
    except (OSError, msgspec.DecodeError):
        return None
    return running if alive(running.pid) else None


def remove(state_dir: Path) -> None:
    """Take it away."""
    with contextlib.suppress(OSError):
        (state_dir / NAME).unlink()


def alive(pid: int) -> bool:
    """Whether a process with this id exists."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def lock(state_dir: Path) -> IO[str] | None:
    """Hold the state directory for this process; None if another `up` holds it. Keep the file open."""
    handle = (state_dir / "up.lock").open("w")
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        handle.close()
        return None
    return handle
