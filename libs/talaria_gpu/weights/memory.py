"""Host memory for images: page-locked where a GPU is to copy from it."""

from __future__ import annotations

import torch

from talaria_common.errors import EngineError


def allocate(size: int, *, pin: bool) -> torch.Tensor:
    """`size` bytes, uint8. With `pin` page-locked in place: torch's own pinned allocator rounds up to powers of two.

    Raises:
        EngineError: there is not so much, or the driver refuses to lock it.
    """
    try:
        memory = torch.empty(size, dtype=torch.uint8)
    except RuntimeError as e:
        raise EngineError(f"{size} B of host memory are not to be had: {e}") from e
    if pin and size:
        status = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), size, 0)
        if int(status) != 0:
            raise EngineError(f"{size} B of host memory could not be page-locked (CUDA error {int(status)})")
    return memory


def release(memory: torch.Tensor, *, pin: bool) -> None:
    """Unlock what `allocate` locked; the memory goes with its last tensor."""
    if pin and memory.numel():
        torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())
