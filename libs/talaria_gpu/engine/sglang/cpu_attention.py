"""Prefill behind a cached prefix on a CPU, for what it costs: SGLang's fallback computes attention for the prefix, too.

Its torch-native backend pads the new queries to the whole sequence and throws most of the result away, so that a hit
of 8,000 tokens saves the projections but none of the quadratic part. Here only the new tokens are queries: the same
operator and operands, and the same result up to rounding.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from torch.nn.functional import scaled_dot_product_attention

_original = TorchNativeAttnBackend._run_sdpa_forward_extend


def install() -> None:
    """Replace the fallback's extend. Once or many times."""
    TorchNativeAttnBackend._run_sdpa_forward_extend = _extend


def _extend(  # noqa: PLR0917 - SGLang's signature
    self: Any,
    query: torch.Tensor,
    output: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    extend_prefix_lens: torch.Tensor,
    extend_seq_lens: torch.Tensor,
    encoder_lens: torch.Tensor | None = None,
    scaling: float | None = None,
    enable_gqa: bool = False,
    causal: bool = False,
    is_cross_attn: bool = False,
    sliding_window_size: int | None = None,
) -> Any:
    """[tokens, heads, head size] into `output`, one request after another, as SGLang's own."""
    windowed = sliding_window_size is not None and sliding_window_size > -1
    if not causal or is_cross_attn or encoder_lens is not None or windowed:
        return _original(
            self,
            query,
            output,
            k_cache,
            v_cache,
            req_to_token,
            req_pool_indices,
            seq_lens,
            extend_prefix_lens,
            extend_seq_lens,
            encoder_lens,
            scaling=scaling,
            enable_gqa=enable_gqa,
            causal=causal,
            is_cross_attn=is_cross_attn,
            sliding_window_size=sliding_window_size,
        )
    start = 0
    rows = zip(req_pool_indices.tolist(), seq_lens.tolist(), extend_prefix_lens.tolist(), strict=True)
    for row, total, prefix in rows:
        end = start + total - prefix
        tokens = req_to_token[row, :total]
        key, value = (cache[tokens].movedim(0, 1).unsqueeze(0).to(query.dtype) for cache in (k_cache, v_cache))
        attended = scaled_dot_product_attention(
            query[start:end].movedim(0, 1).unsqueeze(0),
            key,
            value,
            attn_mask=_mask(total, prefix) if 0 < prefix < total - 1 else None,
            is_causal=prefix == 0,
            scale=scaling,
            enable_gqa=enable_gqa,
        )
        output[start:end] = attended.squeeze(0).movedim(0, 1)
        start = end
    return output


@lru_cache(maxsize=4)  # the layers of a step ask for the same ones
def _mask(total: int, prefix: int) -> torch.Tensor:
    """[new, total] bool: token i of the new ones sees the prefix and the new ones up to itself."""
    return torch.ones((total - prefix, total), dtype=torch.bool).tril(prefix)
