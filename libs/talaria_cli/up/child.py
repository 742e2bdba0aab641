"""One supervised process."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from talaria_cli.up.plan import Part

_PR_SET_PDEATHSIG = 1


def _tied_to(parent: int) -> Callable[[], None] | None:
    """A pre-exec hook: the kernel kills the child when its supervisor dies, however that happens (Linux)."""
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None, use_errno=True)

    def hook() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the line above
            os._exit(1)

    return hook


class Child:
    """A running part in its own process group, so that the terminal's Ctrl-C reaches only the supervisor."""

    def __init__(self, part: Part, process: asyncio.subprocess.Process, log: Path) -> None:
        self.part = part
        self.log = log
        self._process = process

    @classmethod
    async def start(cls, part: Part, log: Path) -> Child:
        """Start `part`, its output appended to `log`. Raises OSError when the program cannot be run."""
        with log.open("ab") as out:
            process = await asyncio.create_subprocess_exec(
                *part.argv,
                env=os.environ | part.env,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
                preexec_fn=_tied_to(os.getpid()),  # only prctl and getppid: no locks
            )
        return cls(part, process, log)

    @property
    def pid(self) -> int:
        """Process id, which is also the id of its group."""
        return self._process.pid

    async def wait(self) -> int:
        """Its exit code (negative: a signal). What it left behind in its group is killed."""
        code = await self._process.wait()
        self.kill()
        return code

    def terminate(self) -> None:
        """Ask it to stop; only the process itself, which then stops its own children in order."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()

    def kill(self) -> None:
        """End its whole group at once."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def last_words(self, lines: int = 12) -> list[str]:
        """The end of its log."""
        return tail(self.log, lines)


def fresh_log(path: Path) -> Path:
    """`path`, with what an earlier run left there moved to `….log.1`."""
    if path.exists():
        path.replace(path.with_suffix(".log.1"))
    return path


def tail(path: Path, lines: int) -> list[str]:
    """The last `lines` lines of a text file; [] if there is none."""
    try:
        with path.open("rb") as f:
            f.seek(0, os.SEEK_END)
            f.seek(max(0, f.tell() - 200 * lines - 2000))
            text = f.read().decode("utf-8", "replace")
    except OSError:
        return []
    return [line.rstrip() for line in text.splitlines() if line.strip()][-lines:]


def ending(code: int) -> str:
    """An exit code in words."""
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return f"killed by {signal.Signals(-code).name}"
    return f"killed by signal {-code}"
