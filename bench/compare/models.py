"""The ablation's three models with a tokenizer that knows no more ids than they do, so that they can be sent text.

SmolLM2's tokenizer is byte-level BPE whose ids count up in the order of its merges: its first ids are a tokenizer by
themselves, which spells rarer words in more pieces.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from bench.ablation import models as wide

NAMES = wide.NAMES
CONTEXT = wide.CONTEXT


def prepared() -> dict[str, Path]:
    """The models' directories, made if they are not in the cache yet."""
    from talaria_gpu.models.cache import make_once
    from talaria_gpu.models.prepare import default_cache_dir

    return {
        name: make_once(
            default_cache_dir(), f"bench-{name}-text-v1", lambda d, s=source: _make(s, d), f"bench: {name} for text"
        )
        for name, source in wide.prepared().items()
    }


def _make(source: Path, directory: Path) -> None:
    shutil.copytree(source, directory, dirs_exist_ok=True)
    file = directory / "tokenizer.json"
    tokenizer = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps(first_ids(tokenizer, wide.VOCAB), ensure_ascii=False), encoding="utf-8")


def first_ids(tokenizer: dict[str, Any], size: int) -> dict[str, Any]:
    """A tokenizer.json of byte-level BPE, cut to the ids below `size`."""
    model = tokenizer["model"]
    vocab = {piece: token for piece, token in model["vocab"].items() if token < size}

    def known(merge: str | list[str]) -> bool:
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        return {left, right, left + right} <= vocab.keys()

    return tokenizer | {
        "added_tokens": [token for token in tokenizer["added_tokens"] if token["id"] < size],
        "model": model | {"vocab": vocab, "merges": [merge for merge in model["merges"] if known(merge)]},
    }
