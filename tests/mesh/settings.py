"""talaria.toml data for meshes of tests."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

DEFAULT: dict[str, Any] = tomllib.loads((Path(__file__).parents[2] / "talaria.toml").read_text(encoding="utf-8"))
REAL_MODELS: dict[str, Any] = DEFAULT["models"]
PATIENT = {"silence_s": 8.0}
"""For `api`, where a silence of seconds is no death: a process may stand still so long on a busy machine."""


def sim(
    *instances: dict[str, Any], models: tuple[str, ...] = ("model-a", "model-b", "model-c"), **extra: Any
) -> dict[str, Any]:
    """A mesh of sim engines; an instance without `models` serves all of them from the cold pool."""
    rows = [{"id": f"cold-{n}"} for n in range(1)] if not instances else list(instances)
    for row in rows:
        row.setdefault("engine", "sim")
        row.setdefault("pool", "cold")
        row.setdefault("models", list(models))
        row.setdefault("max_running", 64)
    return {
        "log": {"level": "info", "format": "console"},
        "models": {m: {"source": "tiny-qwen3"} for m in models},
        "instances": rows,
        **extra,
    }


def real(*iids: str) -> dict[str, Any]:
    """talaria.toml with its cold instance alone, once under each of these ids."""
    cold = next(row for row in DEFAULT["instances"] if row["pool"] == "cold")
    return {
        "log": {"level": "info", "format": "console"},
        "models": REAL_MODELS,
        "instances": [cold | {"id": iid} for iid in iids],
        "router": DEFAULT["router"],
        "api": {"silence_s": DEFAULT["api"]["silence_s"]},
    }
