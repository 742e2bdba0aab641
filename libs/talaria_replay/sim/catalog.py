"""Catalogs of many models of uneven popularity, and which instance serves which of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec

from talaria_replay.ranges import Amount, Count
from talaria_replay.sim.scenario import Group, ScenarioError


class Catalog(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Many models on instances of one kind.

    Attributes:
        hardware: of every instance.
        base: profiles that the models are made of, in turn.
        size: number of models.
        exponent: of their Zipf popularity.
        per_instance: models on each instance.
    """

    hardware: str
    base: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
    size: Count
    exponent: Amount = 1.0
    per_instance: Count = 3

    @property
    def models(self) -> list[str]:
        """Their names, the most popular first."""
        return names(self.base, self.size)

    @property
    def shares(self) -> list[float]:
        """Of the sessions, by model."""
        return zipf(self.size, self.exponent)

    @property
    def least(self) -> int:
        """Instances that have a place for every model."""
        return -(-self.size // self.per_instance)

    def groups(self, instances: int) -> tuple[Group, ...]:
        """So many instances with the models placed on them. Raises ScenarioError when they have no place."""
        return place(
            self.models, self.shares, hardware=self.hardware, instances=instances, per_instance=self.per_instance
        )


def names(base: Sequence[str], size: int) -> list[str]:
    """`size` models, each a profile of `base` under a name of its own, in turn."""
    return [f"{base[n % len(base)]}:{n}" for n in range(size)]


def zipf(size: int, exponent: float) -> list[float]:
    """Shares of the calls: the n-th model's is proportional to n^-exponent. Sum 1."""
    raw = [(n + 1) ** -exponent for n in range(size)]
    total = sum(raw)
    return [w / total for w in raw]


def place(
    models: Sequence[str], shares: Sequence[float], *, hardware: str, instances: int, per_instance: int
) -> tuple[Group, ...]:
    """Instances of `per_instance` models each: replicas in proportion to the shares, at least one of each model.

    A deployment is configured and not decided by the product; this is the simulator's plain way to do it.

    Raises:
        ScenarioError: there are not enough places.
    """
    places = instances * per_instance
    if places < len(models):
        raise ScenarioError(f"{instances} instances of {per_instance} models have no place for {len(models)} models")
    replicas = [max(1, min(instances, int(places * share))) for share in shares]
    order = sorted(range(len(models)), key=lambda n: (-shares[n], n))
    while sum(replicas) > places:
        replicas[max(order, key=lambda n: replicas[n])] -= 1
    for n in order:
        if sum(replicas) == places:
            break
        replicas[n] = min(instances, replicas[n] + places - sum(replicas))
    held: list[list[str]] = [[] for _ in range(instances)]
    at = 0
    for n in order:
        for _ in range(replicas[n]):
            at = _next(held, at, models[n], per_instance)
            held[at].append(models[n])
            at = (at + 1) % instances
    return tuple(Group(hardware=hardware, models=tuple(m), pool="cold" if len(m) > 1 else "hot") for m in held if m)


def _next(held: Sequence[list[str]], start: int, model: str, most: int) -> int:
    """The next instance with room that does not serve the model yet; the fullest rule is the turn."""
    for step in range(len(held)):
        at = (start + step) % len(held)
        if len(held[at]) < most and model not in held[at]:
            return at
    raise ScenarioError(f"no instance has room for another {model}")
