"""A `talaria up` as a process, over scripted or real parts."""

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from talaria_cli.up import ports, runfile

HERE = Path(__file__).parent
ROLES = ("telemetry", "router", "api", "instance")


class Up:
    """A running `talaria up`: its output so far, its run file, its end."""

    def __init__(self, state: Path, args: list[str], env: dict[str, str]) -> None:
        self.state = state
        self.process = subprocess.Popen(
            [sys.executable, "-m", "talaria_cli.main", "up", "--state-dir", str(state), *args],
            env=os.environ | env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.lines: list[str] = []
        self._more = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._more:
                self.lines.append(line.rstrip())
                self._more.notify_all()
        with self._more:
            self.lines.append("<end of output>")
            self._more.notify_all()

    def wait_for(self, text: str, timeout_s: float = 40.0, after: int = 0) -> int:
        """Until a line after number `after` holds `text`; returns the number of lines read by then."""

        def seen() -> bool:
            return any(text in line for line in self.lines[after:]) or "<end of output>" in self.lines

        with self._more:
            self._more.wait_for(seen, timeout_s)
            assert any(text in line for line in self.lines[after:]), f"{text!r} not in:\n" + "\n".join(self.lines)
            return len(self.lines)

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def running(self) -> runfile.Running:
        found = runfile.read(self.state)
        assert found is not None
        return found

    def pid(self, part: str) -> int:
        return self.running().parts[part].pid

    def family(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self, timeout_s: float = 25.0) -> int:
        code = self.process.wait(timeout_s)
        self._reader.join(5)
        return code

    def close(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in self.family():
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        self.process.kill()
        self.process.wait(5)
        self._reader.join(5)
        assert self.process.stdout is not None
        self.process.stdout.close()


def gone(processes: list[psutil.Process], timeout_s: float = 5.0) -> bool:
    """Whether all of them end within the time."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes):
            return True
        time.sleep(0.05)
    return False


@pytest.fixture
def scripted(tmp_path: Path) -> dict[str, str]:
    """Environment in which the parts are scripted ones."""
    for role in ROLES:
        package = tmp_path / "parts" / f"talaria_{role}"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("")
        (package / "__main__.py").write_text(
            f"import runpy, sys\nsys.argv.insert(1, {role!r})\n"
            f"runpy.run_path({str(HERE / 'scripted_part.py')!r}, run_name='__main__')\n"
        )
    return {"PYTHONPATH": str(tmp_path / "parts")}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """One sim instance; free ports for api, router and bus."""
    file = tmp_path / "talaria.toml"
    api, router, bus = ports.free_port(), ports.free_port(), ports.free_port()
    file.write_text(
        f'[api]\nport = {api}\n[bus]\nurl = "nats://127.0.0.1:{bus}"\n'
        f"[mesh]\nheartbeat_s = 0.2\n[mesh.metrics_ports]\nrouter-0 = {router}\n"
        '[models.m]\nsource = "tiny-qwen3"\n[[instances]]\nid = "cold-0"\nengine = "sim"\nmodels = ["m"]\n'
    )
    return file


@pytest.fixture
def up(tmp_path: Path, config: Path) -> Iterator[Callable[..., Up]]:
    """Start `talaria up`; ends it, and all it started, whatever the test does."""
    started: list[Up] = []

    def start(env: dict[str, str], *args: str) -> Up:
        started.append(Up(tmp_path / "state", ["--config", str(config), *args], env))
        return started[-1]

    yield start
    for each in started:
        each.close()
