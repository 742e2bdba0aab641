"""Lines 10 to 24 of Algorithm 1: all instances become candidates, checks thin them out, the policy orders the rest."""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import islice

import msgspec
from msgspec.structs import replace

from talaria_router.admission import Demand, check, excess_ms, replica_gain_ms, replica_price_ms
from talaria_router.board import HELD, Board, Boards
from talaria_router.cluster import Cluster
from talaria_router.config import EVENT_CANDIDATES, RANKED, RouterConfig
from talaria_router.cost import Call, Candidate, Place, candidate_of
from talaria_router.policies import Policy
from talaria_router.replicas import Replicas

_NONE: Counter[str] = Counter()
"""Stands for no reasons; never changed."""


class Ranking(msgspec.Struct):
    """What was found for one call."""

    reasons: Counter[str]
    """To be read only. How many instances each reason ruled out, those without a cost included.

    With many instances those that are stale, too small or too busy are counted as far as they were looked at: the
    search ends when enough better ones were found.
    """
    order: list[Candidate] = []
    """Candidates that may take it, best first; of many, the best ones."""
    refused: list[Candidate] = []
    """Candidates that a check ruled out, with `rejected` set; of many, the cheapest ones."""
    excess_ms: float | None = None
    """By how much the least loaded of those refused by the round check passes it; None: nobody was."""
    longest: Candidate | None = None
    """The refused one with the longest context."""

    def to_be_refused_there(self) -> Candidate | None:
        """Where to send a call that nobody can hold: the instance with the longest context, to say so exactly.

        Only if length is the one thing that ruled candidates out: the router's token count is an estimate, and the
        person is owed the instance's exact one (HTTP 400), not a 429.
        """
        others = any(self.reasons[r] for r in ("queue", "round", "replica"))
        return None if others else self.longest

    def spill(self) -> Candidate | None:
        """Where the call can go although the round check rules it out: the cheapest that holds the model, if any."""
        return min(
            (c for c in self.refused if c.cost.rejected == "round" and c.state != "cold"),
            key=lambda c: (c.cost.total_ms, c.calls, c.iid),
            default=None,
        )

    def rule_out(self, reason: str, many: int = 1) -> None:
        """So many instances are ruled out."""
        if self.reasons is _NONE:
            self.reasons = Counter()
        self.reasons[reason] += many

    def refuse(self, candidate: Candidate, reason: str) -> None:
        """A check rules `candidate` out."""
        self.rule_out(reason)
        refused = replace(candidate, cost=replace(candidate.cost, rejected=reason))
        if self.longest is None or (refused.context_tokens, refused.iid) > (
            self.longest.context_tokens,
            self.longest.iid,
        ):
            self.longest = refused
        if len(self.refused) < EVENT_CANDIDATES:
            self.refused.append(refused)


class _Scan(msgspec.Struct):
    """One pass over the places of one call's model: what fits, and what does not."""

    call: Call
    result: Ranking
    prefix_tokens: int
    fresh_from: float
    """Instances must have been seen since."""
    budget_ms: float
    admitted: list[Candidate] = []
    held: bool = False
    """Someone who is fit holds the model."""

    def take(self, place: Place) -> Candidate | None:
        """Look at one place; the candidate if it passes all checks but Eq. 2."""
        call, instance = self.call, place.instance
        if instance.reported != "ok" or instance.seen_at < self.fresh_from or place.iid in call.exclude:
            self.result.rule_out(self._unfit(place))
            return None
        if not self.held:
            self.held = place.model.state in HELD
        candidate = candidate_of(call, place, self.prefix_tokens)
        reason = check(call, candidate, place, self.budget_ms)
        if not reason:
            return candidate
        if reason == "round":
            excess = excess_ms(candidate, self.budget_ms)
            known = self.result.excess_ms
            self.result.excess_ms = excess if known is None else min(known, excess)
        self.result.refuse(candidate, reason)
        return None

    def _unfit(self, place: Place) -> str:
        if place.iid in self.call.exclude:
            return "excluded"
        return "stale" if place.instance.reported == "ok" else place.instance.reported


class Ranker:
    """Ranks calls over live tables, which it only reads."""

    def __init__(
        self, cluster: Cluster, boards: Boards, config: RouterConfig, policy: Policy, replicas: Replicas
    ) -> None:
        self._cluster = cluster
        self.boards = boards
        self._config = config
        self._budget_ms = config.budget_ms
        self._policy = policy
        self._replicas = replicas

    def rank(self, call: Call, now: float, demand: Callable[[str, float], Demand]) -> Ranking:
        """Rank the instances whose catalog has the call's model. `demand`: of a model at a time.

        With a policy that orders by cost the work grows with the instances that changed since the last decision and
        with those that a check refuses, not with the number of instances.
        """
        board = self.boards.of(call.model)
        prefix_tokens = call.prefix_tokens if call.entry is not None or call.sharers else 0
        fresh_from = self._cluster.judged_at(now) - self._cluster.stale_after_s
        scan = _Scan(call, Ranking(_NONE), prefix_tokens, fresh_from, self._budget_ms)
        for reason, many in board.unready.items():
            scan.result.rule_out(reason, many)
        self._held(scan, board)
        if board.full or board.busy:
            self._shut(scan, board)
        if board.fresh:
            if self._policy.eq2:
                self._worth_opening(scan, board, now, demand(call.model, now))
            else:
                self._may_be_opened(scan, board, now)
        result = scan.result
        if not self._policy.by_cost:
            scan.admitted.sort(key=lambda c: c.iid)
        result.order = self._policy.rank(call, scan.admitted)
        return result

    def _held(self, scan: _Scan, board: Board) -> None:
        """Those that hold the model: first where a prefix may be found, then the others, cheapest first."""
        call, places, admitted, take = scan.call, board.places, scan.admitted, scan.take
        near: Iterable[str] = ()
        if call.entry is not None or call.sharers:
            near = call.sharers | {call.entry.iid} if call.entry is not None else call.sharers
            near = {iid for iid in near if board.open(iid)}
        totals: list[float] = []
        for iid in sorted(near):
            candidate = take(places[iid])
            if candidate is not None:
                admitted.append(candidate)
                insort(totals, candidate.cost.total_ms)
        enough = RANKED if self._policy.by_cost else len(places) + 1
        least_ms = call.prompt_tokens * board.least_prefill
        for base_ms, _, iid in board.held:
            if len(totals) >= enough and base_ms + least_ms >= totals[RANKED - 1]:
                break  # nobody further down can be among the best
            if iid not in near:
                candidate = take(places[iid])
                if candidate is not None:
                    admitted.append(candidate)
                    insort(totals, candidate.cost.total_ms)

    @staticmethod
    def _shut(scan: _Scan, board: Board) -> None:
        """Those that a check refuses whatever the call: a few are looked at, the others counted."""
        for reason, many, iids in board.shut():
            for iid in islice(iids, EVENT_CANDIDATES):
                scan.take(board.places[iid])
            if many > EVENT_CANDIDATES:
                scan.result.rule_out(reason, many - EVENT_CANDIDATES)

    def _may_be_opened(self, scan: _Scan, board: Board, now: float) -> None:
        """Those that would have to open the model, for policies that do not ask what that is worth."""
        for _, _, iid in board.fresh:
            candidate = scan.take(board.places[iid])
            if candidate is None:
                continue
            if self._replicas.may_open(iid, scan.call.model, now, held=False):
                scan.admitted.append(candidate)
            else:
                scan.result.refuse(candidate, "replica")

    def _worth_opening(self, scan: _Scan, board: Board, now: float, demand: Demand) -> None:
        """Those that would have to open the model: the cheapest few must be worth it (Eq. 2)."""
        best_wait = min((c.wait_ms for c in scan.admitted), default=None)
        held, fit = scan.held, 0
        for n, (_, _, iid) in enumerate(board.fresh):
            if fit >= RANKED:
                scan.result.rule_out("replica", len(board.fresh) - n)
                return
            place = board.places[iid]
            candidate = scan.take(place)
            if candidate is None:
                continue
            if not self._replicas.may_open(iid, scan.call.model, now, held=held):
                scan.result.refuse(candidate, "replica")
                continue
            fit += 1
            weight_bytes = place.profile.weight_bytes
            price = replica_price_ms(place.instance.snapshot, weight_bytes, place.act_ms, self._config)
            # A model that nobody holds is opened whatever it costs: the alternative is not to serve it.
            if not held or replica_gain_ms(demand, best_wait, candidate.wait_ms, self._config) > price:
                scan.admitted.append(candidate)
            else:
                scan.result.refuse(candidate, "replica")
