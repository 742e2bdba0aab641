from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture
def traces() -> Path:
    """The folder of public trace files that $TALARIA_TRACES names."""
    folder = os.environ.get("TALARIA_TRACES")
    if not folder:
        pytest.skip(
            "no real traces here: set TALARIA_TRACES to a folder with them (docs/traces.md says where to get them)"
        )
    return Path(folder)
