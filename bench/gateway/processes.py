"""Child processes of a benchmark: started on free ports, logged, always stopped."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import psutil

from bench.report import ROOT


def free_port() -> int:
    """A TCP port that was free a moment ago."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


class StartError(RuntimeError):
    """A system did not come up; the message ends with its log's last lines."""


class Processes:
    """Children by name, each with a log file in `directory`. Use as a context manager: leaving it stops them all."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        self.directory.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop(*reversed(list(self._running)))

    def start(self, name: str, args: Sequence[str], env: dict[str, str] | None = None) -> int:
        """Start a child and return its pid."""
        with self._log(name).open("wb") as log:
            self._running[name] = subprocess.Popen(
                args,
                cwd=ROOT,
                env=os.environ | {"PYTHONUNBUFFERED": "1"} | (env or {}),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return self._running[name].pid

    @property
    def names(self) -> tuple[str, ...]:
        """Children, in the order of their start."""
        return tuple(self._running)

    def wait_http(self, url: str, names: Sequence[str], timeout_s: float) -> None:
        """Until `url` answers 200. Raises StartError when one of `names` has ended or the time is over."""
        deadline = time.monotonic() + timeout_s
        said = "nothing listens"
        while time.monotonic() < deadline:
            for name in names:
                if self._running[name].poll() is not None:
                    raise StartError(f"{name} exited with {self._running[name].returncode}\n{self.tail(name)}")
            try:
                with urllib.request.urlopen(url, timeout=5) as answer:
                    if answer.status == 200:
                        return
            except urllib.error.HTTPError as e:
                said = f"{e.code} {e.read(500).decode(errors='replace')}"
            except OSError as e:
                said = str(e)
            time.sleep(0.2)
        logs = "\n".join(self.tail(name) for name in names)
        raise StartError(f"{url} not ready after {timeout_s:.0f} s: {said}\n{logs}")

    def tree(self, name: str) -> list[int]:
        """Pids of the child, which comes first, and of all its descendants."""
        root = psutil.Process(self._running[name].pid)
        return [root.pid, *(p.pid for p in root.children(recursive=True))]

    def tail(self, name: str, lines: int = 15) -> str:
        """The end of a child's log."""
        text = self._log(name).read_text(errors="replace").splitlines()[-lines:]
        return "\n".join([f"--- {name}", *text])

    def stop(self, *names: str) -> None:
        """Terminate children and what they started, by force after 10 s."""
        for name in names:
            process = self._running.pop(name)
            if process.poll() is None:
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(10)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _log(self, name: str) -> Path:
        return self.directory / f"{name}.log"
