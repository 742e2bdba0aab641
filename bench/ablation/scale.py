"""The miniature's scaling, from measured costs: each stands to the others as the paper's do (2.1, 5.1, 5.6).

On a CPU a decode step is dear beside a prefill. So one of our tokens stands for several of the paper's: answers are
shorter by that factor, and a call's decode stands to its prefill, its gap and a reload as in the paper.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import mean
from typing import NamedTuple

from bench.ablation.job import Profile
from bench.report import Figure, figure

RECOMPUTE_S = 4.3
"""The paper's: prefill of the median prefix, 25K tokens."""
RESTORE_S = 0.02
"""Its bytes (192,512 a token, Qwen3-235B) over eight links of 30 GB/s, which are what 1.5 s for 470 GB comes to."""
RELOAD_S = 1.5
"""Weights from host, at the median (H2D-only)."""
DECODE_S = 0.02
T_TTFT_S, GAMMA, T_TPOT_S = 10.0, 0.9, 0.1
SLOT_S, DRAIN_S, PATIENCE_S = 2.0, 0.0, 10.0


class Scale(NamedTuple):
    """Constants for times, prompts and answers, and two links; the same for every configuration."""

    time: float
    """Our seconds for one of the paper's."""
    prompts: float
    """Our prompt tokens for one of the trace's."""
    answers: float
    """The trace's answer tokens for one of ours; at least 1."""
    recompute_ms: float
    """Of the median prefix."""
    decode_ms: float
    weights_bytes_per_s: float
    kv_bytes_per_s: float

    def figures(self) -> dict[str, Figure]:
        """What a result says of them."""
        return {
            "scale_time": figure([self.time], "x"),
            "scale_prompts": figure([self.prompts], "x"),
            "scale_answers": figure([self.answers], "x"),
            "emulated_weights_gb_per_s": figure([self.weights_bytes_per_s / 1e9], "GB/s"),
            "emulated_kv_gb_per_s": figure([self.kv_bytes_per_s / 1e9], "GB/s"),
        }

    def slots(self) -> dict[str, float]:
        """`SlotConfig`'s targets and budgets: the defaults, scaled."""
        ms = self.time * 1000
        return {
            "slot_ms": SLOT_S * ms,
            "drain_ms": DRAIN_S * ms,
            "patience_ms": PATIENCE_S * ms,
            "t_ttft_ms": T_TTFT_S * ms,
            "gamma": GAMMA,
            "t_tpot_ms": T_TPOT_S * ms * self.answers,
        }


def of(profiles: Mapping[str, Profile], median_prefix: float) -> Scale:
    """From costs measured at the length that the trace's median prefix is scaled to."""
    of_all = list(profiles.values())
    tokens, recompute_ms = of_all[0].prefix_tokens, mean(p.prefill_ms for p in of_all)
    decode_ms = mean(p.decode_ms for p in of_all)
    time = recompute_ms / 1000 / RECOMPUTE_S
    return Scale(
        time=time,
        prompts=tokens / median_prefix,
        answers=max(1.0, decode_ms / 1000 / (DECODE_S * time)),
        recompute_ms=recompute_ms,
        decode_ms=decode_ms,
        weights_bytes_per_s=mean(p.weight_bytes for p in of_all) / (RELOAD_S * time),
        kv_bytes_per_s=mean(p.kv_bytes_per_token for p in of_all) * tokens / (RESTORE_S * time),
    )
