"""What a hybrid (gated delta net) model still takes from Triton or asks of the platform on a CPU without AMX.

Called once SGLang can be imported, and before a Scheduler is built.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

_installed: list[bool] = []


def install() -> None:
    """Replace SGLang's Triton kernels and platform checks for hybrids by torch. Once or many times."""
    if _installed:
        return
    from sglang.kernels.ops.attention.fla import fused_norm_gate, layernorm_gated
    from sglang.kernels.ops.elementwise import elementwise
    from sglang.srt.arg_groups import mamba_hook
    from sglang.srt.layers.attention import hybrid_linear_attn_backend

    # Its switch asks for AMX, but means: use torch.ops.sgl_kernel.fused_rmsnorm_gated_cpu, which stands in.
    fused_norm_gate._use_cpu = layernorm_gated._use_cpu = True
    elementwise.fused_gate_sigmoid_mul_add = _fused_gate_sigmoid_mul_add
    if (models := sys.modules.get("sglang.srt.models.qwen2_moe")) is not None:
        models.__dict__["fused_gate_sigmoid_mul_add"] = _fused_gate_sigmoid_mul_add
    # States at page boundaries need one copy between slots, and nothing else of the device.
    mamba_hook._platform_supports_mamba_cache_extra_buffer = _yes
    hybrid_linear_attn_backend.track_mamba_states_all_layers = _track_states
    if not torch.accelerator.is_available():
        # ScheduleBatch.prepare_for_decode pins without asking.
        torch.Tensor.pin_memory = _as_it_is
    _installed.append(True)


def _yes() -> bool:
    return True


def _as_it_is(self: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return self


def _fused_gate_sigmoid_mul_add(
    x: torch.Tensor, gate_weight: torch.Tensor, shared: torch.Tensor, out: torch.Tensor
) -> None:
    """The shared expert's share: [tokens, hidden] into `out`."""
    out.add_((x @ gate_weight).sigmoid()[:, None] * shared)


def _track_states(  # noqa: PLR0917 - SGLang's signature
    conv: torch.Tensor,
    temporal: torch.Tensor,
    source: torch.Tensor,
    mask: torch.Tensor,
    target: torch.Tensor,
    batch: int,
    check_freed_slots: bool = False,
) -> None:
    """Copy the states [layer, slot, ...] of those in `mask` to the slots that keep them."""
    del check_freed_slots
    chosen = mask[:batch]
    old, new = source[:batch][chosen].long(), target[:batch][chosen].long()
    conv[:, new], temporal[:, new] = conv[:, old], temporal[:, old]
