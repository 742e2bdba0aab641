"""What the engine is told about a model. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

SGLANG_VERSION = "0.5.23"
"""The only release this adapter knows: internals move between releases."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """One model to open."""

    path: Path
    """Hugging Face directory: config.json and safetensors."""
    dtype: str = "auto"
    context_tokens: int | None = None
    """Longest prompt + completion; None: the model's own."""
