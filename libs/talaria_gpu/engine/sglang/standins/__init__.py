"""What SGLang needs on a CPU and cannot get: installed by device, in memory, never beside the real thing.

The files here are not importable under the names they stand in for; `install` puts them into `sys.modules`. On a
machine that has the compiled `sgl_kernel`, it refuses.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

from talaria_common.errors import EngineError

_KERNEL = "sgl_kernel"
_FILE = Path(__file__).with_name("sgl_kernel_cpu.py")
_HYBRIDS = Path(__file__).with_name("gated_delta_cpu.py")
"""`sgl_kernel.mamba`."""


def install() -> None:
    """Put the stand-ins in place, once per process.

    Raises:
        EngineError: the compiled `sgl_kernel` is installed here.
    """
    present = sys.modules.get(_KERNEL)
    if present is not None and getattr(present, "TALARIA_STANDIN", False):
        return
    if present is not None or importlib.util.find_spec(_KERNEL) is not None:
        raise EngineError(
            "the compiled sgl_kernel is installed here, and device = 'cpu' would put a stand-in before it: "
            "use device = 'cuda', or an environment without sglang-kernel"
        )
    from talaria_gpu.models import torchvision_ops  # imports torch

    torchvision_ops.declare_missing()
    kernel = _load(_KERNEL, _FILE)
    kernel.mamba = mamba = _load(f"{_KERNEL}.mamba", _HYBRIDS)
    import torch

    for operator in mamba.OPERATORS:
        setattr(torch.ops.sgl_kernel, operator.__name__, operator)


def _load(name: str, file: Path) -> Any:
    spec = importlib.util.spec_from_file_location(name, file, submodule_search_locations=[])
    if spec is None or spec.loader is None:
        raise EngineError(f"cannot load {file}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
