"""Token equality: what a model really says, by a full recompute with Hugging Face transformers (DESIGN 8).

Greedy, float32, an explicit attention mask, no cache and no `generate` (which suppresses EOS and masks pad ids inside a
prompt). Where the reference's two best logits are closer than `TIE`, either token counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from talaria_gpu.models import torchvision_ops

TIE = 1e-4
"""Difference of the two best logits below which either counts."""


class HasLogits(Protocol):
    """What a comparison needs of a reference model."""

    def logits(self, ids: Sequence[int]) -> torch.Tensor:
        """[len(ids), vocabulary] float32: at i, what follows ids[: i + 1]."""
        ...


class Reference:
    """One model in transformers. Loading takes a second or two per 100 MB."""

    def __init__(self, path: Path) -> None:
        torchvision_ops.declare_missing()
        from transformers import AutoModelForCausalLM  # noqa: PLC0415 - the line above has to come first

        self._model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    @property
    def end_tokens(self) -> frozenset[int]:
        """The ids that end an answer."""
        known = self._model.generation_config.eos_token_id
        return frozenset(known if isinstance(known, list) else [] if known is None else [known])

    def logits(self, ids: Sequence[int]) -> torch.Tensor:
        """[len(ids), vocabulary] float32: at i, what follows ids[: i + 1]."""
        x = torch.tensor([list(ids)])
        with torch.inference_mode():
            out: torch.Tensor = self._model(x, attention_mask=torch.ones_like(x), use_cache=False).logits[0]
        return out


@dataclass(frozen=True, slots=True)
class Difference:
    """The first position where an output is not the reference's."""

    index: int
    got: int
    expected: int
    gap: float
    """Between the reference's two best logits there."""
    tie: bool
    """`got` is one of the two, and they are closer than `TIE`."""


def first_difference(reference: HasLogits, prompt: Sequence[int], output: Sequence[int]) -> Difference | None:
    """Where `output` first differs from the reference's greedy continuation of `prompt`; None: nowhere."""
    if not output:
        return None
    rows = reference.logits([*prompt, *output[:-1]])[len(prompt) - 1 :]
    best = rows.topk(2, dim=-1)
    for index, got in enumerate(output):
        first, second = best.indices[index].tolist()
        if got != first:
            gap = float(best.values[index][0] - best.values[index][1])
            return Difference(index, got, first, gap, tie=gap < TIE and got == second)
    return None


def assert_greedy(
    reference: HasLogits,
    prompt: Sequence[int],
    output: Sequence[int],
    go_on: Callable[[list[int], int], Sequence[int]] | None = None,
) -> int:
    """`output` is the reference's greedy continuation of `prompt`. Returns the ties met.

    Args:
        reference: the model.
        prompt: token ids.
        output: token ids, without a stop token.
        go_on: generates (prompt, n) anew. After a tie the comparison goes on from the reference's token, with what
            `go_on` gives for that; without it, from the output's own.

    Raises:
        AssertionError: with the first real difference.
    """
    ids, rest, ties = list(prompt), list(output), 0
    while (difference := first_difference(reference, ids, rest)) is not None:
        assert difference.tie, f"after {len(ids) + difference.index} tokens: {difference}"
        ties += 1
        agreed, left = difference.index + 1, len(rest) - difference.index - 1
        ids += rest[: difference.index]
        if go_on is None:
            ids.append(difference.got)
            rest = rest[agreed:]
        else:
            ids.append(difference.expected)
            rest = list(go_on(ids, left)) if left else []
    return ties
