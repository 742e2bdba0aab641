"""A Qwen3-Next of four layers with random weights: gated delta nets and attention in turn, and experts.

The recurrent layers keep one state per sequence, whatever its length; the attention layers keep KV per token.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

from talaria_gpu.models.random_weights import COMMON, save_random

LAYERS = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}
"""What the hybrids share."""
READ_BY_SGLANG = {"full_attention_interval": 2, "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
"""SGLang reads these from config.json; transformers' own class writes them no more."""


def make(directory: Path) -> None:
    """Fill `directory` with the model."""
    config = Qwen3NextConfig(
        **COMMON,
        **LAYERS,
        intermediate_size=512,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=128,
        shared_expert_intermediate_size=128,
        norm_topk_prob=True,
    )
    save_random(
        Qwen3NextForCausalLM, config, seed=4, directory=directory, vary=vary_constants, config_extra=READ_BY_SGLANG
    )


def vary_constants(model: Any) -> None:
    """Make what is initialised to constants matter: decay, time step and norms."""
    for name, parameter in model.named_parameters():
        if name.endswith(("dt_bias", "A_log")):
            parameter.copy_(torch.empty_like(parameter).uniform_(-2, 1))
        if "norm" in name:
            parameter.add_(torch.randn_like(parameter) * 0.1)
