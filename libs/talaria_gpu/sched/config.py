"""What the slot scheduler is configured with."""

from __future__ import annotations

from dataclasses import dataclass, field

from talaria_gpu.sched.ablation import Ablation
from talaria_gpu.sched.order import Order


@dataclass(frozen=True, slots=True)
class SlotConfig:
    """Targets and budgets, ms."""

    slot_ms: float = 2000.0
    """A slot's length when the round has room for it: long enough to be worth its switch."""
    drain_ms: float = 0.0
    """Decode that a slot protects beyond Eq. 4 when the round has room for it."""
    patience_ms: float = 10_000.0
    """A call that has waited for this long goes before every priority of its model."""
    t_ttft_ms: float = 10_000.0
    gamma: float = 0.9
    t_tpot_ms: float = 100.0
    ablation: Ablation = field(default_factory=Ablation)
    suspends: bool = False
    """The engine keeps a running call's KV over a switch, so that nothing of its prefill is lost with the slot."""
    order: Order = "staging"

    @property
    def round_limit_ms(self) -> float:
        """Eq. 5: the longest round that keeps a model's revisit time below the target."""
        return self.gamma * self.t_ttft_ms
