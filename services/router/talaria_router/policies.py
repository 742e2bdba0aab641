"""Placement policies by name, pure: from candidates that passed admission to an order of preference (5.3, Table 1).

A policy sees the same candidates, checks and overlay as any other, so that an experiment varies the signal alone. The
last four follow one signal each of a system that Table 1 compares with; what else those systems do is not here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from talaria_router.cost import Call, Candidate

Rank = Callable[[Call, Sequence[Candidate]], list[Candidate]]
"""(call, admitted candidates sorted by iid) → best first."""

_RESIDENCE = {"active": 0, "host": 1, "loading": 2, "cold": 3}


class Policy(NamedTuple):
    """A placement policy."""

    name: str
    rank: Rank
    leases: bool = False
    """Whether completions install leases and returns consume them."""
    eq2: bool = False
    """Whether a fresh replica must pass Eq. 2."""
    by_cost: bool = False
    """It orders by `total_ms` before all else: `rank` then needs to see the cheapest candidates only."""


def _talaria(call: Call, candidates: Sequence[Candidate]) -> list[Candidate]:
    """Eq. 1; among equals the emptier one."""
    del call
    return sorted(candidates, key=lambda c: (c.cost.total_ms, c.cost.calls, c.cost.iid))


def _least_pressure(call: Call, candidates: Sequence[Candidate]) -> list[Candidate]:
    """Fewest calls in the system, whatever is resident there."""
    del call
    return sorted(candidates, key=lambda c: (c.calls, c.iid))


def _session_sticky(call: Call, candidates: Sequence[Candidate]) -> list[Candidate]:
    """The session's first instance, always; a new session goes to the emptiest."""
    home = call.entry.home if call.entry is not None else ""
    return sorted(candidates, key=lambda c: (c.iid != home, c.calls, c.iid))


def _round_robin(call: Call, candidates: Sequence[Candidate]) -> list[Candidate]:
    """Each in turn."""
    start = call.turn % len(candidates) if candidates else 0
    return [*candidates[start:], *candidates[:start]]


def _model_residency(call: Call, candidates: Sequence[Candidate]) -> list[Candidate]:
    """Aegaeon's: where the model is nearest to its next slot; no KV decides.

    The device before host before what is not loaded; among equals the shortest wait for the slot and in it.
    """
    del call
    return sorted(candidates, key=lambda c: (_RESIDENCE.get(c.state, 3), c.wait_ms, c.calls, c.iid))


def _prompt_prefix(call: Call, candidates: Sequence[Candidate]) -> list[Candidate]:
    """Preble's: exploit the longest cached prefix if it is at least half of the prompt, else explore the emptiest.

    Where the model is resident does not count.
    """
    longest = max((c.cost.reused for c in candidates), default=0)
    if 2 * longest >= call.prompt_tokens:
        return sorted(candidates, key=lambda c: (-c.cost.reused, c.calls, c.iid))
    return _least_pressure(call, candidates)


def _kv_object(call: Call, candidates: Sequence[Candidate]) -> list[Candidate]:
    """Mooncake's: the shortest time to first token of a cache-aware prefill: queue, restore, what must be computed.

    Models are taken to be resident everywhere: neither an activation nor other models' slots count.
    """
    del call
    return sorted(candidates, key=lambda c: (c.queue_ms + c.own_ms, c.calls, c.iid))


def _locality(call: Call, candidates: Sequence[Candidate]) -> list[Candidate]:
    """ServerlessLLM's: the shortest start of the model, from where its checkpoint lies; no KV, no queue of its own."""
    del call
    return sorted(candidates, key=lambda c: (c.cost.act_ms + c.place.round_ms, c.calls, c.iid))


POLICIES: dict[str, Policy] = {
    p.name: p
    for p in (
        Policy("talaria", _talaria, leases=True, eq2=True, by_cost=True),
        Policy("least-pressure", _least_pressure),
        Policy("session-sticky", _session_sticky),
        Policy("round-robin", _round_robin),
        Policy("model-residency", _model_residency),
        Policy("prompt-prefix", _prompt_prefix),
        Policy("kv-object", _kv_object),
        Policy("locality", _locality),
    )
}


def policy(name: str) -> Policy:
    """The policy named `name`. Raises ValueError with the names there are."""
    found = POLICIES.get(name)
    if found is None:
        raise ValueError(f"router.policy = {name!r}: there are {', '.join(POLICIES)}")
    return found
