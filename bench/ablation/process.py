"""A job in a process of its own: no engine leaves anything behind for the next."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TypeVar

import msgspec

from bench.ablation.job import Job
from bench.report import ROOT

TIMEOUT_S = 900
QUIET = {"PYTHONWARNINGS": "ignore", "TQDM_DISABLE": "1", "OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": "1"}
T = TypeVar("T")


def answer(module: str, job: Job, of: type[T], folder: Path) -> T:
    """What `python -m module JOB.json ANSWER.json` writes. Raises RuntimeError with the end of what it said."""
    asked, answered, log = folder / "job.json", folder / "answer.json", folder / "log"
    answered.unlink(missing_ok=True)
    asked.write_bytes(msgspec.json.encode(job))
    with log.open("wb") as out:
        done = subprocess.run(
            [sys.executable, "-m", module, str(asked), str(answered)],
            cwd=ROOT,
            env=os.environ | QUIET,
            stdout=out,
            stderr=subprocess.STDOUT,
            timeout=TIMEOUT_S,
            check=False,
        )
    if done.returncode:
        raise RuntimeError(f"{module}, {job.ablation}: " + log.read_text(errors="replace")[-2000:])
    return msgspec.json.decode(answered.read_bytes(), type=of)
