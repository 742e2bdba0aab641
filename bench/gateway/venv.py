"""The environment of the systems that Talaria is measured beside (requirements/bench.txt)."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import venv
from pathlib import Path

from bench.report import ROOT

DIRECTORY = ROOT / ".talaria" / "bench-venv"
REQUIREMENTS = ROOT / "requirements" / "bench.txt"


def python() -> Path:
    """Its interpreter, which may not be there yet."""
    return DIRECTORY / "bin" / "python"


def prepare() -> str:
    """Make it if it is missing or older than its requirements. Returns "" or why it cannot be used."""
    stamp = DIRECTORY / ".stamp"
    want = hashlib.sha256(REQUIREMENTS.read_bytes() + sys.version.encode()).hexdigest()
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == want:
        return ""
    print("bench: making the environment for LiteLLM and sglang-router (once, a few minutes)", flush=True)
    try:
        venv.create(DIRECTORY, with_pip=True, clear=not python().is_file())
        done = subprocess.run(
            [str(python()), "-m", "pip", "install", "--disable-pip-version-check", "-q", "-r", str(REQUIREMENTS)],
            capture_output=True,
            text=True,
            check=False,
            timeout=900,
        )
    except (OSError, subprocess.SubprocessError) as e:
        return f"{type(e).__name__}: {e}"
    if done.returncode != 0:
        return "pip failed: " + " ".join(done.stderr.split())[-400:]
    stamp.write_text(want, encoding="utf-8")
    return ""
