"""Stands in for `sgl_kernel.mamba` and the fused operators of gated delta nets on a CPU: plain torch, float32 inside.

Token by token where the compiled kernels work in chunks: slow and clear. Layouts are SGLang's: a conv state is
[slot, dim, width - 1] with the oldest column first, a recurrent state [slot, value heads, V, K]; both are updated in
place.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch.nn import functional

CHUNK_TOKENS = 64
"""Of the compiled kernel: the state at the start of every so many tokens is returned, for checkpoints."""


def _stretches(starts: torch.Tensor) -> Iterator[tuple[int, int, int]]:
    """(index, first token, one past the last) of each sequence of a ragged batch."""
    ends = starts.tolist()
    for index, (first, last) in enumerate(pairwise(ends)):
        yield index, first, last


def causal_conv1d_fn_cpu(  # noqa: PLR0917 - SGLang's signature
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    conv_states: torch.Tensor | None = None,
    has_initial_state: torch.Tensor | None = None,
    cache_indices: torch.Tensor | None = None,
    query_start_loc: torch.Tensor | None = None,
    **_: Any,
) -> torch.Tensor:
    """A prefill's depthwise convolution. x: [dim, tokens], ragged by `query_start_loc`; returns the same shape."""
    assert conv_states is not None
    assert has_initial_state is not None
    assert cache_indices is not None
    assert query_start_loc is not None
    out, past_tokens = torch.zeros_like(x), weight.shape[1] - 1
    for index, first, last in _stretches(query_start_loc):
        slot = int(cache_indices[index])
        past = conv_states[slot] if has_initial_state[index] else x.new_zeros(x.shape[0], past_tokens)
        seen = torch.cat([past.to(x.dtype), x[:, first:last]], dim=1)
        mixed = functional.conv1d(seen[None], weight[:, None].to(x.dtype), bias, groups=x.shape[0])[0]
        out[:, first:last] = functional.silu(mixed) if activation in {"silu", "swish"} else mixed
        conv_states[slot] = seen[:, seen.shape[1] - past_tokens :].to(conv_states.dtype)
    return out


def causal_conv1d_update_cpu(  # noqa: PLR0917 - SGLang's signature
    x: torch.Tensor,
    conv_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    conv_state_indices: torch.Tensor | None = None,
) -> torch.Tensor:
    """A decode's: one token a sequence. x: [batch, dim]."""
    seen = torch.cat([conv_states[conv_state_indices].to(x.dtype), x[..., None]], dim=-1)
    conv_states[conv_state_indices] = seen[..., 1:].to(conv_states.dtype)
    mixed = (seen * weight.to(x.dtype)).sum(-1) + (0 if bias is None else bias)
    return functional.silu(mixed) if activation in {"silu", "swish"} else mixed


def fused_gdn_gating_cpu(
    a_log: torch.Tensor, a: torch.Tensor, b: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decay (as a logarithm) and write strength of each head, [1, tokens, value heads]."""
    decay = -a_log.float().exp() * functional.softplus(a.float() + dt_bias.float())
    return decay[None], b.sigmoid()[None]


def _heads(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, normed: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries and keys repeated to the value heads, normed and scaled."""
    q, k, v = q.float(), k.float(), v.float()
    if normed:
        q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    repeat = v.shape[-2] // q.shape[-2]
    return q.repeat_interleave(repeat, -2) * q.shape[-1] ** -0.5, k.repeat_interleave(repeat, -2), v


def _delta(
    state: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    decay: torch.Tensor,
    strength: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token of the gated delta rule: the new state [..., heads, V, K] and what is read, [..., heads, V]."""
    state = state * decay.exp()[..., None, None]
    change = (v - (state * k[..., None, :]).sum(-1)) * strength[..., None]
    state = state + change[..., None] * k[..., None, :]
    return state, (state * q[..., None, :]).sum(-1)


def chunk_gated_delta_rule_cpu(  # noqa: PLR0917 - SGLang's signature
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor,
    cu_seqlens: torch.Tensor,
    head_first: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    initial_state_indices: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A prefill's. q, k, v: [1, tokens, heads, size], ragged. Returns what is read, last states, states at chunks."""
    assert not head_first
    assert initial_state_indices is not None
    read = torch.zeros_like(v)
    at_chunks: list[torch.Tensor] = []
    last_states: list[torch.Tensor] = []
    queries, keys, values = (x[0] for x in _heads(q, k, v, normed=use_qk_l2norm_in_kernel))
    decay, strength = g[0].float(), beta[0].float()
    for index, first, last in _stretches(cu_seqlens):
        slot = int(initial_state_indices[index])
        state = initial_state[slot].to(torch.float32, copy=True)
        for t in range(first, last):
            if (t - first) % CHUNK_TOKENS == 0:
                at_chunks.append(state)
            state, y = _delta(state, queries[t], keys[t], values[t], decay=decay[t], strength=strength[t])
            read[0, t] = y.to(read.dtype)
        initial_state[slot] = state.to(initial_state.dtype)
        last_states.append(state)
    return read, torch.stack(last_states), torch.stack(at_chunks)[None]


def fused_sigmoid_gating_delta_rule_update_cpu(  # noqa: PLR0917 - SGLang's signature
    A_log: torch.Tensor,  # noqa: N803 - SGLang's name
    dt_bias: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    initial_state_source: torch.Tensor,
    initial_state_indices: torch.Tensor,
    cu_seqlens: torch.Tensor,
    use_qk_l2norm_in_kernel: bool,
    softplus_beta: float = 1.0,
    softplus_threshold: float = 20.0,
    **_: Any,
) -> torch.Tensor:
    """A decode's: one token a sequence. q: [1, batch, heads, size]."""
    del cu_seqlens, softplus_beta, softplus_threshold  # one token each; torch's own defaults
    queries, keys, values = (x[0] for x in _heads(q, k, v, normed=use_qk_l2norm_in_kernel))
    decay, strength = (x[0].float() for x in fused_gdn_gating_cpu(A_log, a, b, dt_bias))
    state = initial_state_source[initial_state_indices].float()
    state, y = _delta(state, queries, keys, values, decay=decay, strength=strength)
    initial_state_source[initial_state_indices] = state.to(initial_state_source.dtype)
    return y[:, None].to(v.dtype)


def fused_rmsnorm_gated_cpu(x: torch.Tensor, weight: torch.Tensor, gate: torch.Tensor, eps: float) -> torch.Tensor:
    """RMS norm, times silu of the gate."""
    normed = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps) * weight.float()
    return (normed * functional.silu(gate.float())).to(x.dtype)


def fused_sigmoid_mul_cpu(x: torch.Tensor, gate: torch.Tensor) -> None:
    """In place."""
    x.mul_(gate.sigmoid())


def fused_qkvzba_split_reshape_cat_contiguous_cpu(  # noqa: PLR0917 - SGLang's signature
    qkvz: torch.Tensor, ba: torch.Tensor, hk: int, hv: int, dk: int, dv: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Qwen3.5's projections, taken apart: q, k and v together; the gate; write strength; decay."""
    qkv, z = qkvz.split([2 * hk * dk + hv * dv, hv * dv], dim=-1)
    b, a = ba.chunk(2, dim=-1)
    return qkv, z.reshape(-1, hv, dv), b.contiguous(), a.contiguous()


def _gemma_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, head_dim: int) -> torch.Tensor:
    x = x.reshape(-1, head_dim)
    normed = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps) * (1 + weight.float())
    return normed.to(x.dtype)


def fused_qk_gemma_rmsnorm_cpu(  # noqa: PLR0917 - SGLang's signature
    q: torch.Tensor, k: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, eps: float, head_dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Norms of queries and keys, head by head."""
    return _gemma_norm(q, q_weight, eps, head_dim), _gemma_norm(k, k_weight, eps, head_dim)


def fused_qk_gemma_rmsnorm_with_gate_cpu(  # noqa: PLR0917 - SGLang's signature
    q_gate: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    head_dim: int,
    num_heads: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same where each head's query is followed by its gate, which comes back last."""
    del num_heads
    q, gate = q_gate.reshape(-1, 2 * head_dim).chunk(2, dim=-1)
    return *fused_qk_gemma_rmsnorm_cpu(q, k, q_weight, k_weight, eps, head_dim), gate.contiguous()


OPERATORS = (
    fused_gdn_gating_cpu,
    fused_sigmoid_gating_delta_rule_update_cpu,
    fused_rmsnorm_gated_cpu,
    fused_sigmoid_mul_cpu,
    fused_qkvzba_split_reshape_cat_contiguous_cpu,
    fused_qk_gemma_rmsnorm_cpu,
    fused_qk_gemma_rmsnorm_with_gate_cpu,
)
"""What SGLang reaches as `torch.ops.sgl_kernel.NAME`."""
