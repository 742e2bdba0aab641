"""Stands in for the compiled `sgl_kernel` on a CPU, where SGLang itself falls back to torch nearly everywhere.

The one operation that it has no fallback for is here. Every other name exists, for SGLang imports many, and raises
when called: never a silent wrong answer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch

TALARIA_STANDIN = True


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    *_: Any,
) -> None:
    """Write each request's new cache rows into its row of `req_to_token`.

    Args:
        req_pool_indices: [batch], a request's row in `req_to_token`.
        req_to_token: [requests, context], cache row of each token.
        start_offset: [batch], the first token whose row is new.
        end_offset: [batch], one past the last.
        out_cache_loc: [sum of lengths], the new rows, request after request.
    """
    taken = 0
    for index, start, end in zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True):
        req_to_token[index, start:end] = out_cache_loc[taken : taken + end - start]
        taken += end - start


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_args: Any, **_kwargs: Any) -> NoReturn:
        raise RuntimeError(f"sgl_kernel.{name} has no CPU stand-in")

    missing.__name__ = name
    return missing
