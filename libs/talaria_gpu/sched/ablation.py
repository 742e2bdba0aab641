"""The configurations that are compared by name (DESIGN 6): which of the three mechanisms are on, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Name = Literal["talaria", "no-sp", "no-hkvr", "h2d-only", "round-only"]


@dataclass(frozen=True, slots=True)
class Ablation:
    """Switches for the scheduler (`sp`) and for the engine's memory substrate (`hkvr`, `staging`)."""

    sp: bool = True
    """Returning calls may enter the open slot (3.4)."""
    hkvr: bool = True
    """KV outlives the switch: the host registry keeps prefixes, and suspended calls keep their rows (4.3)."""
    staging: bool = True
    """The next model's weights are staged on the device before the switch (4.4)."""

    @classmethod
    def named(cls, name: Name) -> Ablation:
        """The configuration of that name."""
        return _BY_NAME[name]


_BY_NAME: dict[Name, Ablation] = {
    "talaria": Ablation(),
    "no-sp": Ablation(sp=False),
    "no-hkvr": Ablation(hkvr=False),
    "h2d-only": Ablation(staging=False),
    "round-only": Ablation(sp=False, hkvr=False, staging=False),
}
NAMES: tuple[Name, ...] = tuple(_BY_NAME)
