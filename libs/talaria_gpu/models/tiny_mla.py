"""A DeepSeek-V2 of two dense layers with random weights: multi-head latent attention (MLA).

Its KV is one latent row per token and layer.
"""

from __future__ import annotations

from pathlib import Path

from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

from talaria_gpu.models.random_weights import COMMON, save_random


def make(directory: Path) -> None:
    """Fill `directory` with the model."""
    layers = 2
    config = DeepseekV2Config(
        **COMMON,
        intermediate_size=1024,
        moe_intermediate_size=64,
        num_hidden_layers=layers,
        first_k_dense_replace=layers,  # no expert layers: SGLang's CPU path has no kernels for them
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        num_attention_heads=8,
        num_key_value_heads=8,
        kv_lora_rank=64,
        q_lora_rank=None,
        qk_rope_head_dim=32,
        qk_nope_head_dim=32,
        v_head_dim=32,
        rope_theta=10000.0,
        # SGLang's DeepSeek code reads its softmax scale and its rope from yarn's parameters.
        rope_scaling={
            "type": "yarn",
            "rope_type": "yarn",
            "factor": 2.0,
            "original_max_position_embeddings": 4096,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "beta_fast": 32,
            "beta_slow": 1,
        },
    )
    # SGLang reads these from config.json; transformers' own class has no such parameters.
    for key, value in {
        "moe_layer_freq": 1,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "greedy",
        "scoring_func": "softmax",
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
    }.items():
        setattr(config, key, value)
    save_random(DeepseekV2ForCausalLM, config, seed=3, directory=directory)
