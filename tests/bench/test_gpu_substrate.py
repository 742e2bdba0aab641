"""The GPU script's code, walked through on CPU: with torch alone, as on a machine that has nothing else of ours."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ALONE = """
import runpy, sys
for name in ("msgspec", "pydantic", "pydantic_settings", "structlog", "prometheus_client", "nats", "sglang", "transformers"):
    sys.modules[name] = None  # importing it fails
sys.argv = ["bench.gpu.substrate", *sys.argv[1:]]
runpy.run_module("bench.gpu.substrate", run_name="__main__")
"""


@pytest.mark.engine
@pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")
def test_it_needs_torch_alone(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    sizes = ["--weights-gib", "0.03", "--kv-gib", "0.25", "--chunk-kib", "128", "--runs", "2"]
    done = subprocess.run(
        [sys.executable, "-c", ALONE, "--device", "cpu", *sizes, "--out", str(out)],
        cwd=ROOT, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    figures = json.loads(out.read_text())["figures"]
    paths = {f"switch_{path}_ms" for path in ("h2d", "partial", "d2d")}
    assert paths | {"restore_over_link_limit", "save_over_link_limit", "gather_over_limit"} <= figures.keys()
    assert all(f["median"] > 0 for f in figures.values())
