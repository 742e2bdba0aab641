"""Make `import torchvision` work beside a torch of another build.

PyPI's torchvision links CUDA. Beside a CPU-only torch its compiled part cannot be loaded, and the import then fails on
one operator whose shape function it registers. transformers and SGLang both import torchvision; neither uses the
operator on text. Declaring it, without an implementation, is enough: a call of it fails loudly.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch

_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_declared: list[torch.library.Library] = []  # a Library takes its operators along when it is collected


def declare_missing() -> bool:
    """Declare torchvision's operators if its compiled part cannot be loaded. True if that was needed.

    Must run before transformers or sglang is imported; further calls do nothing.
    """
    if _declared:
        return True
    spec = importlib.util.find_spec("torchvision")
    if spec is None or _loads(spec.submodule_search_locations or []):
        return False
    library = torch.library.Library("torchvision", "DEF")
    for schema in _SCHEMAS:
        library.define(schema)
    _declared.append(library)
    return True


def _loads(folders: list[str]) -> bool:
    for folder in folders:
        for file in Path(folder).glob("_C*.so"):
            try:
                torch.ops.load_library(str(file))
            except OSError:
                continue
            return True
    return False
