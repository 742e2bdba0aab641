"""Placement policies by name, pure: from candidates that passed admission to an order of preference (5.3).

A policy sees the same candidates, checks and overlay as any other, so that an experiment varies the signal alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from talaria_router.cost import Call, Candidate

Rank = Callable[[Call, Sequence[Candidate]], list[Candidate]]
"""(call, admitted candidates sorted by iid) → best first."""


class Policy(NamedTuple):
    """A placement policy."""

    name: str
    rank: Rank
    leases: bool
    """Whether completions install leases and returns consume them."""
    eq2: bool = False
    """Whether a fresh replica must pass Eq. 2."""


def _talaria(call: Call, candidates: Sequence[Candidate]) -> list[Candidate]:
    """Eq. 1; among equals the emptier one."""
    del call
    return sorted(candidates, key=lambda c: (c.total_ms, c.calls, c.iid))


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


POLICIES: dict[str, Policy] = {
    p.name: p
    for p in (
        Policy("talaria", _talaria, leases=True, eq2=True),
        Policy("least-pressure", _least_pressure, leases=False),
        Policy("session-sticky", _session_sticky, leases=False),
        Policy("round-robin", _round_robin, leases=False),
    )
}


def policy(name: str) -> Policy:
    """The policy named `name`. Raises ValueError with the names there are."""
    found = POLICIES.get(name)
    if found is None:
        raise ValueError(f"router.policy = {name!r}: there are {', '.join(POLICIES)}")
    return found
