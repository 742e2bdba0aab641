"""Lines 10 to 24 of Algorithm 1: all instances become candidates, checks thin them out, the policy orders the rest."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from talaria_router.admission import Demand, check, replica_gain_ms, replica_price_ms
from talaria_router.cluster import Cluster
from talaria_router.config import RouterConfig
from talaria_router.cost import Call, Candidate, evaluate
from talaria_router.overlay import Overlay
from talaria_router.policies import Policy
from talaria_router.profiles import Profiles

HELD = ("active", "host", "loading")
"""States in which a replica exists already or is on its way."""


@dataclass(slots=True)
class Ranking:
    """What was found for one call."""

    order: list[Candidate] = field(default_factory=list)
    """Candidates that may take it, best first."""
    refused: list[Candidate] = field(default_factory=list)
    """Candidates that a check ruled out, with `rejected` set."""
    reasons: Counter[str] = field(default_factory=Counter)
    """How many instances each reason ruled out, those without a cost included."""
    avoidable_open: bool = False
    """The best one must activate the model although another healthy instance has it active (5.3)."""

    def to_be_refused_there(self) -> Candidate | None:
        """Where to send a call that nobody can hold: the instance with the longest context, to say so exactly.

        Only if length is the one thing that ruled candidates out: the router's token count is an estimate, and the
        person is owed the instance's exact one (HTTP 400), not a 429.
        """
        if not self.refused or any(c.rejected != "context" for c in self.refused):
            return None
        return max(self.refused, key=lambda c: (c.context_tokens, c.iid))


@dataclass(frozen=True, slots=True)
class Ranker:
    """Ranks calls over live tables, which it only reads."""

    cluster: Cluster
    overlay: Overlay
    profiles: Profiles
    config: RouterConfig
    policy: Policy

    def rank(self, call: Call, now: float, demand: Demand) -> Ranking:
        """Rank all instances whose catalog has the call's model. Linear in their number."""
        result = Ranking()
        admitted: list[Candidate] = []
        fresh: list[Candidate] = []
        held = False
        anywhere_active = False
        for iid in self.cluster.serving(call.model):
            reason = "excluded" if iid in call.exclude else unfit(self.cluster, iid, call.model, now)
            if reason:
                result.reasons[reason] += 1
                continue
            instance = self.cluster.get(iid)
            assert instance is not None
            model = instance.models[call.model]
            candidate = evaluate(call, instance, model, self.overlay, self.profiles)
            held = held or model.state in HELD
            anywhere_active = anywhere_active or model.state == "active"
            reason = check(call, candidate, instance, model, self.config)
            if reason:
                result.reasons[reason] += 1
                result.refused.append(candidate._replace(rejected=reason))
            elif self.policy.eq2 and model.state not in HELD:
                fresh.append(candidate)
            else:
                admitted.append(candidate)
        if fresh:
            best_wait = min((c.wait_ms for c in admitted), default=None)
            for candidate in fresh:
                instance = self.cluster.get(candidate.iid)
                assert instance is not None
                price = replica_price_ms(instance.snapshot, instance.models[call.model], candidate.act_ms, self.config)
                # A model that nobody holds is opened whatever it costs: the alternative is not to serve it.
                if not held or replica_gain_ms(demand, best_wait, candidate.wait_ms, self.config) > price:
                    admitted.append(candidate)
                else:
                    result.reasons["replica"] += 1
                    result.refused.append(candidate._replace(rejected="replica"))
            admitted.sort(key=lambda c: c.iid)
        result.order = self.policy.rank(call, admitted)
        result.avoidable_open = bool(result.order) and result.order[0].state != "active" and anywhere_active
        return result


def unfit(cluster: Cluster, iid: str, model: str, now: float) -> str:
    """Why the instance takes no new call for `model` now, "" if it may: health, its status, the model's state."""
    instance = cluster.get(iid)
    if instance is None:
        return "gone"
    health = cluster.health(iid, now)
    if health != "ok":
        return health
    return unready(cluster, iid, model)


def unready(cluster: Cluster, iid: str, model: str) -> str:
    """As `unfit`, but for the snapshot's age."""
    instance = cluster.get(iid)
    if instance is None:
        return "gone"
    if instance.snapshot.status != "ready":
        return instance.snapshot.status
    state = instance.models.get(model)
    if state is None or state.state == "failed":
        return "failed_model"
    return ""
