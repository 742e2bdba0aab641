"""What the random-weight models share: SmolLM2's tokenizer, and weights that depend on a seed alone.

They exist to have other architectures at hand, and weights too large to be resident together: two untied embeddings of
49152 x 512 float32 are 201 MB, while two or three layers keep a step quick. With weights of deviation 0.1 and unit
norms before the head, logits have a deviation of about 2.3 and their two best differ by 0.5 on average: ties below
1e-4 (DESIGN 8) come about twice in ten thousand tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from transformers.utils import logging

from talaria_gpu.models.smollm2 import save_tokenizer

VOCAB_SIZE = 49152
BOS, EOS, PAD = 1, 2, 2
"""<|im_start|>, <|im_end|>, and SmolLM2's choice of pad."""

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 512,
    "max_position_embeddings": 8192,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
    "tie_word_embeddings": False,
    "initializer_range": 0.1,
}


def save_random(
    model_class: Any,
    config: Any,
    seed: int,
    directory: Path,
    *,
    vary: Callable[[Any], None] = lambda _: None,
    config_extra: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """A `model_class(config)` with the weights of `seed`, and the tokenizer, as files of `directory`.

    `vary` changes the new model's weights in place, with the same seed; `config_extra` is added to config.json.
    """
    logging.disable_progress_bar()  # the caller reports progress, in one line
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = model_class(config).to(torch.float32)
        vary(model)
    model.save_pretrained(directory)
    if config_extra:
        file = directory / "config.json"
        written = json.loads(file.read_text(encoding="utf-8")) | dict(config_extra)
        file.write_text(json.dumps(written, indent=2), encoding="utf-8")
    save_tokenizer(directory)
