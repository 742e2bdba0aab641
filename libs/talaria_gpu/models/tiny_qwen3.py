"""A Qwen3 of three layers with random weights: grouped-query attention with per-head norms."""

from __future__ import annotations

from pathlib import Path

from transformers import Qwen3Config, Qwen3ForCausalLM

from talaria_gpu.models.random_weights import COMMON, save_random


def make(directory: Path) -> None:
    """Fill `directory` with the model."""
    config = Qwen3Config(
        **COMMON,
        intermediate_size=1024,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
    )
    save_random(Qwen3ForCausalLM, config, seed=1, directory=directory)
