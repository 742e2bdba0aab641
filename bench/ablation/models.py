"""Three small models with random weights: what a prefill costs beside a decode step matters here, not what they say.

One wide layer and a small vocabulary: on a CPU, SGLang's own work per layer and attention over a long context are most
of a decode step, and would leave too little for a prefill to stand out against.
"""

from __future__ import annotations

from pathlib import Path

VOCAB = 4096
CONTEXT = 16_384
LAYERS = 1
SHAPE = {
    "vocab_size": VOCAB,
    "max_position_embeddings": CONTEXT,
    "intermediate_size": 12_288,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
SEEDS = {"wide-a": 11, "wide-b": 12, "wide-c": 13}
NAMES = tuple(SEEDS)


def prepared() -> dict[str, Path]:
    """The models' directories, made if they are not in the cache yet."""
    from talaria_gpu.models.cache import make_once
    from talaria_gpu.models.prepare import default_cache_dir

    return {
        name: make_once(default_cache_dir(), f"bench-{name}-v1", lambda d, s=seed: _make(s, d), f"bench: {name}")  # type: ignore[misc]
        for name, seed in SEEDS.items()
    }


def _make(seed: int, directory: Path) -> None:
    from talaria_gpu.models import torchvision_ops

    torchvision_ops.declare_missing()  # transformers asks for them
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from talaria_gpu.models.random_weights import COMMON, save_random

    save_random(Qwen3ForCausalLM, Qwen3Config(**(COMMON | SHAPE)), seed=seed, directory=directory)
