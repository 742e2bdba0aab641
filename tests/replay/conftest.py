from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def traces() -> Path:
    """Where the public trace files lie: $TALARIA_TRACES, else shared/data/traces beside the checkout."""
    folder = Path(os.environ.get("TALARIA_TRACES") or ROOT.parent / "shared" / "data" / "traces")
    if not (folder / "swebench_verified.calls.jsonl.gz").exists():
        pytest.skip("no real traces here: set TALARIA_TRACES (docs/traces.md says where to get them)")
    return folder
