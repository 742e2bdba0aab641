"""sglangmux from PyPI: a daemon before one SGLang server per model, of which one is awake.

What version 0.1.1 does, as seen from its servers: calls of the awake model go to it; a call of another one closes the
door, waits until the calls under way have ended, then `pause_generation`, `release_memory_occupation` (weights and KV,
which flushes the prefix cache), and for the next model `resume_memory_occupation`, `update_weights_from_disk`,
`continue_generation`. Models are served in the order in which their first call came. A stream is held back until its
end, so that a client sees the first token together with the last.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from bench.report import ROOT

VERSION = "0.1.1"
DIRECTORY = ROOT / ".talaria" / f"bench-sglangmux-{VERSION}"
BINARY = DIRECTORY / "sglangmux" / "bin" / "sglangmuxd"


def prepare() -> str:
    """Install it into a directory of its own if it is not there. Returns "" or why it cannot be used."""
    if not BINARY.is_file():
        print("compare: installing sglangmux (once)", flush=True)
        shutil.rmtree(DIRECTORY, ignore_errors=True)
        pip = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "-q", "--no-deps"]
        try:
            done = subprocess.run(
                [*pip, "--target", str(DIRECTORY), f"sglangmux=={VERSION}"],
                capture_output=True,
                text=True,
                check=False,
                timeout=300,
            )
        except (OSError, subprocess.SubprocessError) as e:
            return f"{type(e).__name__}: {e}"
        if done.returncode != 0:
            return "pip failed: " + " ".join(done.stderr.split())[-400:]
    BINARY.chmod(0o755)
    return ""


def script(model: str, port: int, folder: Path) -> str:
    """The launch script of a model's server, as sglangmux reads it. `folder` has the model's directory by its name.

    The model's name is also the path that sglangmux reloads weights from, so the server has to run in that folder.
    """
    command = f"exec {sys.executable} -m bench.compare.server"
    return (
        f'#!/bin/bash\nMODEL_NAME="{model}"\nPORT={port}\ncd "{folder}"\n'
        f'export PYTHONPATH="{ROOT}${{PYTHONPATH:+:$PYTHONPATH}}"\n{command} "$MODEL_NAME" "$PORT"\n'
    )


def command(port: int, logs: Path, scripts: list[Path], wait_s: int) -> list[str]:
    """The daemon's command line; `wait_s`: the longest that anything may take."""
    limits = [f"--{what}-timeout-secs" for what in ("upstream", "model-ready", "model-switch")]
    return [
        str(BINARY),
        *("--host", "127.0.0.1", "--listen-port", str(port), "--log-dir", str(logs)),
        *(part for limit in limits for part in (limit, str(wait_s))),
        *map(str, scripts),
    ]
