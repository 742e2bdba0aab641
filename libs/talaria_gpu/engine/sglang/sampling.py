"""Picking tokens: the same call with the same seed gets the same tokens, whatever else is in the batch.

SGLang honours seeds only in its deterministic mode, which it does not offer here. So every call has a seed (its own, or
one drawn by the engine), and a row's random number is a hash of (seed, position): nothing depends on the batch, on the
step's kind, or on whether the call was retracted in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.layers.sampler import Sampler
from sglang.srt.sampling.penaltylib import BatchedFrequencyPenalizer, BatchedPresencePenalizer
from sglang.srt.sampling.sampling_params import SamplingParams

from talaria_gpu.engine.contract import Sampling

_MASK64 = (1 << 64) - 1
_GOLDEN, _MIX1, _MIX2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def sampling_params(sampling: Sampling, seed: int) -> SamplingParams:
    """SGLang's form. Raises ValueError on values out of range."""
    params = SamplingParams(
        max_new_tokens=sampling.max_new_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        stop_token_ids=set(sampling.stop_token_ids),
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        sampling_seed=_signed(seed),
    )
    params.normalize(None)
    return params


class SeededSampler(Sampler):  # type: ignore[misc]  # SGLang is untyped here
    """SGLang's sampler with its draw from probabilities replaced. Greedy batches never get here."""

    def _sample_from_probs(
        self, probs: torch.Tensor, sampling_info: Any, positions: torch.Tensor, _simple: bool
    ) -> tuple[torch.Tensor, None]:
        """One token per row.

        Args:
            probs: [batch, vocabulary] after temperature.
            sampling_info: SGLang's; `sampling_seed` is [batch].
            positions: [batch], of each row's last token.
        """
        weights = _nucleus(probs, sampling_info.top_ps) if sampling_info.need_top_p_sampling else probs
        drawn = draw(weights, sampling_info.sampling_seed, positions)
        greedy = sampling_info.top_ks.view(-1) == 1
        return torch.where(greedy, probs.argmax(dim=-1), drawn).to(torch.int32), None


def draw(weights: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """One index per row, [batch] int64, in proportion to `weights` [batch, vocabulary], by inverting the sum."""
    rising = weights.to(torch.float64).cumsum(dim=-1)
    mark = uniform(seeds, positions).unsqueeze(-1) * rising[:, -1:]
    index = torch.searchsorted(rising, mark, right=True).squeeze(-1)
    last = weights.shape[-1] - 1 - (weights > 0).flip(-1).to(torch.int8).argmax(dim=-1)
    return torch.minimum(index, last)


def uniform(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """[batch] float64 in [0, 1): SplitMix64 of (seed, position), in integers that wrap."""
    x = seeds.to(torch.int64) * _signed(_GOLDEN) + positions.to(torch.int64)
    for _ in range(2):
        x = x + _signed(_GOLDEN)
        x = (x ^ _shift(x, 30)) * _signed(_MIX1)
        x = (x ^ _shift(x, 27)) * _signed(_MIX2)
        x = x ^ _shift(x, 31)
    return _shift(x, 11).to(torch.float64) * 2.0**-53


def attach_seeds(batch: Any) -> None:
    """Give a new prefill batch its rows' seeds; SGLang carries them through merge and filter from there."""
    seeds = [request.sampling_params.sampling_seed for request in batch.reqs]
    batch.sampling_info.sampling_seed = torch.tensor(seeds, dtype=torch.int64, device=batch.device)


def restore_penalties(batch: Any) -> None:
    """Count what retracted requests of a new prefill batch have said already: SGLang starts from nothing again."""
    penalizers = batch.sampling_info.penalizer_orchestrator.penalizers
    for row, request in enumerate(batch.reqs):
        if not request.output_ids:
            continue
        said = torch.tensor(list(request.output_ids), dtype=torch.int64, device=batch.device)
        params = request.sampling_params
        frequency = penalizers[BatchedFrequencyPenalizer]
        if frequency.is_prepared() and params.frequency_penalty:
            step = torch.full((len(said),), params.frequency_penalty, device=batch.device)
            frequency.cumulated_frequency_penalties[row].scatter_add_(0, said, step)
        presence = penalizers[BatchedPresencePenalizer]
        if presence.is_prepared() and params.presence_penalty:
            presence.cumulated_presence_penalties[row][said] = params.presence_penalty


def reported_logprobs(request: Any, start: int, count: int) -> tuple[list[float], list[list[tuple[int, float]]]]:
    """Log probabilities of output tokens [start, start + count): the chosen, and the best with their ids."""
    kept, end = request.logprob, start + count
    chosen = [float(value) for value in kept.output_token_logprobs_val[start:end]]
    if not kept.top_logprobs_num:
        return chosen, [[] for _ in chosen]
    values: Sequence[Any] = kept.output_top_logprobs_val[start:end]
    ids: Sequence[Any] = kept.output_top_logprobs_idx[start:end]
    best = [
        [(int(i), float(v)) for i, v in zip(row_ids, row, strict=True)]
        for row_ids, row in zip(ids, values, strict=True)
    ]
    return chosen, best


def _nucleus(probs: torch.Tensor, top_ps: torch.Tensor) -> torch.Tensor:
    """`probs` with everything outside the smallest set of mass top_p zeroed, in the vocabulary's order."""
    ranked, order = probs.sort(dim=-1, descending=True, stable=True)
    before = ranked.cumsum(dim=-1) - ranked
    ranked = ranked.masked_fill(before > top_ps.view(-1, 1), 0.0)
    return torch.zeros_like(probs).scatter_(-1, order, ranked)


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift: torch's keeps the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    """The int64 with the same low 64 bits."""
    value &= _MASK64
    return value - (1 << 64) if value >> 63 else value
