"""What is simulated: instances, policies and how sessions start."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec

from talaria_gpu.sched.order import Order
from talaria_replay.ranges import Amount, Count, Positive
from talaria_replay.sim.arrivals import Bursts
from talaria_replay.sim.profiles import CalibrationName
from talaria_router.policies import POLICIES

MECHANISMS = {
    "sp": "mid-slot admission of returning calls",
    "hkvr": "KV in host memory over a switch",
    "staging": "weights staged on the device before a switch",
}
ABLATIONS: Mapping[str, frozenset[str]] = {
    "talaria": frozenset({"sp", "hkvr", "staging"}),
    "no-sp": frozenset({"hkvr", "staging"}),
    "no-hkvr": frozenset({"sp", "staging"}),
    "h2d-only": frozenset({"sp", "hkvr"}),
    "round-only": frozenset(),
    "sp-only": frozenset({"sp"}),
}
"""Configurations by name → the mechanisms that are on. The paper has all but the last."""


class ScenarioError(ValueError):
    """The scenario cannot be simulated; the message says why."""


def check_ablation(name: str) -> None:
    """Raises ScenarioError when `name` is unknown."""
    if name not in ABLATIONS:
        raise ScenarioError(f"no configuration {name!r}: there are {', '.join(ABLATIONS)}")


class Group(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Like instances: `count` GPU groups of one kind that serve the same models."""

    hardware: str
    models: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
    """Profile names, or .toml files."""
    count: Count = 1
    pool: Literal["hot", "cold"] = "cold"
    open: tuple[str, ...] | None = None
    """Those of `models` that are open at the start; the others are opened on demand (Eq. 2). None: all."""


class Scenario(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One simulation, but for its trace.

    Attributes:
        calibration: which timing of the model profiles.
        hardware: values of the hardware profiles that are other than in the file, for every group.
        ablation: configuration of the instances, by name.
        admission: False: the router refuses no call for its predicted wait (as on a single server, where there is no
            other place); T_TTFT is then without bound there.
        overload: what the router does with a call that no instance admits.
        mu_ms_per_gib, nu_ms, control_window_s, replica_idle_s: the router's, for Eq. 2.
        slot_ms, drain_ms: the slot scheduler's budgets; its round planner bounds them by Eq. 4 and 5.
        slot_order: what decides in which order models take their slots (talaria_gpu.sched.order).
        page_tokens, kv_block_tokens: of device and host KV; larger ones simulate faster, and reuse a little less.
        host_gib: host memory for KV of each instance; None: what weights leave of the hardware's.
        stagger_s, concurrent: as in `talaria replay`.
        sessions_per_s, bursts: starts as a Poisson process instead.
        detail: False: the result holds figures only, no calls, slots and switches; for millions of calls.
        deadline_s: of each call; one that is not answered by then, from when it was made last, fails.
        refused_s: a call that is refused for so long fails; None: for as long as `deadline_s`.
        hop_ms: one message on the bus; assumed.
        tokenize_ms_per_ktoken: at the instance; assumed.
    """

    groups: Annotated[tuple[Group, ...], msgspec.Meta(min_length=1)]
    calibration: CalibrationName = "paper"
    hardware: dict[str, int | float] = {}
    ablation: str = "talaria"
    policy: str = "talaria"
    tau_s: Amount = 1.0
    t_ttft_s: Positive = 10.0
    gamma: Annotated[float, msgspec.Meta(gt=0, lt=1)] = 0.9
    admission: bool = True
    overload: Literal["reject", "queue"] = "reject"
    max_queued: Count = 256
    mu_ms_per_gib: Amount = 2.0
    nu_ms: Amount = 500.0
    control_window_s: Positive = 10.0
    replica_idle_s: Positive = 300.0
    slot_ms: Positive = 2000.0
    drain_ms: Amount = 0.0
    t_tpot_ms: Positive = 100.0
    patience_s: Amount = 10.0
    slot_order: Order = "staging"
    page_tokens: Count = 64
    kv_block_tokens: Count = 64
    host_gib: Positive | None = None
    heartbeat_s: Positive = 0.5
    gap_cap_s: Amount = 10.0
    stagger_s: Amount = 0.0
    concurrent: Count | None = None
    sessions_per_s: Positive | None = None
    bursts: Bursts | None = None
    detail: bool = True
    deadline_s: Positive = 14_400.0
    refused_s: Positive | None = None
    hop_ms: Amount = 0.5
    tokenize_ms_per_ktoken: Amount = 0.7
    seed: int = 0

    def __post_init__(self) -> None:
        check_ablation(self.ablation)
        if self.policy not in POLICIES:
            raise ScenarioError(f"no policy {self.policy!r}: there are {', '.join(POLICIES)}")
        if self.bursts is not None and self.sessions_per_s is None:
            raise ScenarioError("bursts: expected a rate of sessions as well (sessions_per_s, --rate)")

    @property
    def longest_refused_s(self) -> float:
        """`refused_s`, or what stands in for it."""
        return self.deadline_s if self.refused_s is None else self.refused_s
