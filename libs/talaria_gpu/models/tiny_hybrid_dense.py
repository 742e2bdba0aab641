"""A Qwen3.5 (text) of four layers with random weights: gated delta nets and attention in turn, without experts."""

from __future__ import annotations

from pathlib import Path

from transformers.models.qwen3_5 import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from talaria_gpu.models.random_weights import COMMON, save_random
from talaria_gpu.models.tiny_hybrid import LAYERS, READ_BY_SGLANG, vary_constants


def make(directory: Path) -> None:
    """Fill `directory` with the model."""
    config = Qwen3_5TextConfig(**COMMON, **LAYERS, intermediate_size=1024)
    save_random(
        Qwen3_5ForCausalLM, config, seed=5, directory=directory, vary=vary_constants, config_extra=READ_BY_SGLANG
    )
