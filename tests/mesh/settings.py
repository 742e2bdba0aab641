"""talaria.toml data for meshes of tests."""

from __future__ import annotations

from typing import Any

REAL_MODELS: dict[str, Any] = {
    "smollm2-135m-instruct": {"source": "smollm2", "dtype": "float32", "context_tokens": 2048},
    "tiny-qwen3-random": {"source": "tiny-qwen3", "dtype": "float32", "context_tokens": 2048},
    "tiny-mla-random": {"source": "tiny-mla", "dtype": "float32", "context_tokens": 2048},
}


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


def real(*instances: dict[str, Any], **extra: Any) -> dict[str, Any]:
    """A mesh of real SGLang on CPU with the default models."""
    rows = list(instances) or [{"id": "cold-0"}]
    for row in rows:
        row.setdefault("pool", "cold")
        row.setdefault("models", list(REAL_MODELS))
        row.setdefault("kv_tokens", 4096)
        row.setdefault("buffer_mib", 780)
    return {
        "log": {"level": "info", "format": "console"},
        "models": REAL_MODELS,
        "instances": rows,
        "router": {"t_ttft_s": 60, "overload": "queue"},  # as talaria.toml has it
        **extra,
    }
