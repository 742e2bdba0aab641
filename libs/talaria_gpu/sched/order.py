"""In which order models take their slots: so that each one's weights can be staged in the slot before (3.5).

A model is staged while the one before it has its slot. The order is chosen when a round begins from nothing, and then
kept: while anybody waits, a fixed rotation overtakes nobody twice, and what is staged stays the next model's. Two more
orders are there to be compared with: the one that is configured, and the one in which models got work.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Literal

_EXHAUSTIVE = 6
"""Models up to which all orders are tried: 120 of them."""
_GAIN = 1.05
"""An order is left for one that hides this much more only: estimates are noisy."""
Ms = Callable[[str], float]
Order = Literal["staging", "configured", "arrival"]
"""What decides it: how much staging is hidden; the configuration; since when a model has work."""


def hidden_ms(order: Sequence[str], stage_ms: Ms, slot_ms: Ms) -> float:
    """Staging per round that slots leave time for."""
    return sum(
        min(stage_ms(after), slot_ms(before)) for before, after in zip(order, [*order[1:], order[0]], strict=True)
    )


def for_staging(order: Sequence[str], stage_ms: Ms, slot_ms: Ms) -> list[str]:
    """The cyclic order in which most staging is hidden behind slots; `order` where none is better by a twentieth.

    Args:
        order: the present one.
        stage_ms: to stage a model whole; 0: unknown, or nothing is staged.
        slot_ms: a slot of a model, its switch left out.
    """
    first, *rest = order
    if len(rest) < 2 or len(order) > _EXHAUSTIVE:
        return list(order)
    best = max(itertools.permutations(rest), key=lambda others: hidden_ms([first, *others], stage_ms, slot_ms))
    gain = hidden_ms([first, *best], stage_ms, slot_ms)
    return [first, *best] if gain > _GAIN * hidden_ms(order, stage_ms, slot_ms) else list(order)


def joined(order: Sequence[str], model: str, active: str) -> list[str]:
    """The rotation from `active` on, with `model`, which has got work, behind all others."""
    at = order.index(active)
    return [name for name in [*order[at:], *order[:at]] if name != model] + [model]
