"""The scheduler's rules, checked against the toy's books at every step and at every slot's end.

Nothing here reads the scheduler's state: only its phase, what it asked for, and what it reports.
"""

from __future__ import annotations

import itertools
import math

from talaria_gpu.engine.contract import PrefixState
from talaria_gpu.sched.messages import Phase, SlotOver
from tests.gpu.sched.books import DECODE_MS, EPS, START, Books, Slot

_NONE = PrefixState()


class Rules(Books):
    """Watches a toy."""

    # --- what is checked

    def admission(self, phase: Phase | None, admit: frozenset[str] | None) -> None:
        """What a step may let in."""
        toy, slot = self._toy, self._toy.slot
        assert slot
        if slot.plan is None:
            self._check_alone(admit)
            return
        assert admit is not None, "with others waiting, every batch is chosen"
        leaves_p = phase is not Phase.P and not slot.p_over
        if leaves_p:
            slot.p_over = True
            slot.left_p = {rid for rid in toy.wait[slot.model] if rid in slot.waited}
        if phase is Phase.DFIN:
            assert admit == frozenset(), "Dfin admits nothing"
        elif phase is Phase.SP and admit:
            for rid in admit:
                self._check_sp(rid)
        elif phase is Phase.P:
            assert admit <= slot.waited | toy.started, "P takes what waited when the slot opened"
        elif admit:
            raise AssertionError(f"{phase} admits {admit}")
        under_way = bool(admit) and admit <= self._batch
        if phase in {Phase.P, Phase.SP} and not under_way:  # a batch is chosen once
            self._check_order(phase, admit)
        if toy.oracle and not under_way:
            self._compare(phase, admit, leaves_p=leaves_p)
        self._batch, self._phase = admit, phase

    def over(self, over: SlotOver) -> None:
        """A slot's end and its report."""
        toy, slot = self._toy, self._toy.slot
        assert slot
        assert over.model == slot.model == toy.core.active
        assert slot.plan is not None, "a slot ended though nobody waited"
        assert over.running == len(toy.run[over.model])
        if over.reason != "budget":
            assert not over.running
        else:
            assert slot.decoded >= slot.plan.decodes, "protected decode was cut short"
            if not toy.keeps and not slot.ended and not toy.put_back:
                assert slot.decoded_ms + 1e-3 >= slot.prefill_ms, "prefill was thrown away unearned"
        assert over.protected == slot.plan.decodes
        assert abs(over.planned_ms - slot.plan.length_ms) <= 1e-3
        assert self._plan is not None
        assert abs(over.round_planned_ms - self._plan.round_ms) <= 1e-3
        assert over.infeasible == self._plan.infeasible
        if "ttft" not in over.infeasible:
            assert over.round_planned_ms <= toy.config.round_limit_ms + 1e-3
        assert over.wall_ms == over.active_ms + over.switch_ms
        assert over.active_ms <= (toy.now - slot.began) * 1000 + 1e-3
        assert over.sp_admitted <= over.admitted
        assert over.sp_carried <= over.sp_admitted
        assert over.sp_deferred <= over.deferred == sum(over.deferred_why.values()) == len(toy.wait[slot.model])
        assert over.prefills + over.decodes or over.linger_ms or slot.ended, "a slot did nothing"
        if over.reason == "budget" and not toy.chunk:
            self._check_length(slot)
        known = self._sp_ms.get(slot.model)
        self._sp_ms[slot.model] = slot.sp_ms if known is None else known + 0.2 * (slot.sp_ms - known)
        if slot.empty:
            self.alone()

    def _check_length(self, slot: Slot) -> None:
        """A slot in a round is as long as planned, but for what it owes, what it must earn, and two steps.

        It may double while a prefix that it owes is on its way from the host, as that of a continuation may be.
        """
        toy = self._toy
        assert slot.plan is not None
        assert slot.others_since is not None
        lasted = (toy.now - max(slot.opened, slot.others_since)) * 1000
        coming = any(toy.told.get(rid, _NONE).host for rid in slot.in_vain)
        planned = slot.plan.length_ms * (2 if coming else 1)
        limit = planned + max(slot.plan.decodes * DECODE_MS, slot.prefill_ms) + slot.longest_p_ms + 2 * slot.longest_ms
        assert lasted <= limit + EPS, f"{lasted} ms of at most {limit}"

    def _check_alone(self, admit: frozenset[str] | None) -> None:
        """Nobody goes before one of a higher rank, nor before one of its own with a nearer deadline.

        Deadlines within the same quarter of a second count as one.
        """
        toy, slot = self._toy, self._toy.slot
        assert slot
        line = toy.wait[slot.model]
        first = [rid for rid in line if admit is None or rid in admit]  # as the executor takes them
        assert first or not line
        out = [rid for rid in line if rid not in first]
        for i, rid in enumerate(first):
            for then in [*first[i + 1 :], *out]:
                assert self._grade(rid) >= self._grade(then), f"{rid} before {then}"

    def _grade(self, rid: str) -> tuple[float, float]:
        rank, deadline_ms = self._rank(rid), self._toy.by_rid[rid].deadline_ms
        if rank == math.inf or deadline_ms is None:
            return rank, 0.0 if rank == math.inf else -math.inf
        return rank, -((START + deadline_ms / 1000) // 0.25)

    def _check_order(self, phase: Phase, admit: frozenset[str]) -> None:
        """Nobody is let in before a more urgent one that may enter, too: neither of a lower priority nor of a later
        deadline, if that one would have fitted alone. Those that ran before and the one that is owed a token go first,
        and while an overdue one that is owed waits for room, nobody else does.
        """
        toy, slot = self._toy, self._toy.slot
        assert slot
        waiting = set(toy.wait[slot.model])
        pool = self._eligible() if phase is Phase.SP else {r for r in waiting if r in slot.waited}
        chosen = [rid for rid in admit if rid not in toy.started and rid != slot.owed]
        for out in pool - admit - toy.started:
            for rid in chosen:
                assert self._rank(rid) >= self._rank(out), f"{rid} before {out}"
        best = max(pool - toy.started, key=self._urgency, default=None)
        if chosen and best is not None and best not in admit | slot.in_vain and not toy.chunk:
            batch = admit - set(chosen) | {best}
            assert not (self._fits(batch, self._reserve_ms(phase)) and self._has_room(batch)), f"{best} was passed by"
        owed = slot.owed
        if chosen and owed in waiting and owed not in admit:
            assert not self._overdue(owed, toy.now), f"{chosen} took the room that {owed} waits for"

    def _check_sp(self, rid: str) -> None:
        toy, slot = self._toy, self._toy.slot
        assert slot
        assert toy.config.ablation.sp
        if rid in toy.started:
            return
        assert toy.by_rid[rid].back, "new sessions never enter through SP"
        assert rid not in slot.waited or rid in slot.left_p
        assert sum(toy.told.get(rid, _NONE)) > 0, "there is a prefix to come back to"

    # --- the rules by enumeration

    def _compare(self, phase: Phase | None, admit: frozenset[str], *, leaves_p: bool) -> None:
        """The batch is one that the rules allow, and there is none only if they allow none."""
        toy, slot = self._toy, self._toy.slot
        assert slot
        waiting = set(toy.wait[slot.model])
        must = waiting & (toy.started | {slot.owed})
        of_p = {rid for rid in waiting if rid in slot.waited or rid in toy.started}
        if phase is Phase.P or leaves_p:
            allowed = self._allowed(of_p, must, self._reserve_ms(Phase.P))
            if phase is Phase.P:
                assert admit in allowed, f"P: {admit} of {of_p}, not of {allowed}"
                late = self._rank(slot.owed) == math.inf if slot.owed in waiting else False
                assert admit or (late and toy.run[slot.model]), "P went on with nothing to let in"
            else:
                missed = {batch for batch in allowed if not batch <= slot.in_vain}
                assert not missed, f"P was left though it could have let in one of {missed}"
        if phase is Phase.SP:
            assert slot.since_prefill or not toy.run[slot.model], "SP only at a decode boundary"
            assert admit in self._allowed(self._eligible(), set(), 0.0) - {frozenset()}
            toy.sps.append(admit)
        elif phase in {Phase.D1, Phase.D} and (slot.since_prefill or not toy.run[slot.model]):
            assert self._allowed(self._eligible(), set(), 0.0) == {frozenset()}, "an SP was passed by"
        elif phase is Phase.DFIN and self._phase is not Phase.DFIN:
            assert self._room_ms() <= EPS, "Dfin came though there was time"

    def _eligible(self) -> set[str]:
        toy, slot = self._toy, self._toy.slot
        assert slot
        if not toy.config.ablation.sp:
            return set()
        waiting = set(toy.wait[slot.model])
        bar = self._rank(slot.owed) if slot.owed in waiting else -math.inf
        return {
            rid
            for rid in waiting
            if rid in toy.started
            or (
                toy.by_rid[rid].back
                and sum(toy.told.get(rid, _NONE)) > 0
                and (rid not in slot.waited or rid in slot.left_p)
                and (rid == slot.owed or (bar < math.inf and self._rank(rid) >= bar))
            )
        }

    def _allowed(self, pool: set[str], must: set[str], reserve_ms: float) -> set[frozenset[str]]:
        """All batches of `pool` that hold what must come and fit, and to which nothing could be added.

        One that must come and finds no room shuts the others out if it is overdue or ran before; else it is left out.
        Whoever is left out lets nobody of a lower rank by, and nobody at all if it finds no room and is overdue.
        """
        slot = self._toy.slot
        assert slot
        base: set[str] = set()
        left: set[str] = set()
        for rid in sorted(must, key=self._urgency, reverse=True):
            late = self._rank(rid) == math.inf
            if self._has_room(base | {rid}) and (late or rid not in slot.in_vain):
                base.add(rid)
            elif late:
                return {frozenset(base)}
            else:
                left.add(rid)
        rest = pool - must
        allowed = set()
        for more in _subsets(rest):
            batch = base | more
            if more and not (self._fits(batch, reserve_ms) and self._has_room(batch)):
                continue
            out = left | (rest - more)
            if all(not self._passes(rid, base | more, out) for rid in more) and all(
                self._passes(rid, batch, out - {rid})
                or not self._fits(batch | {rid}, reserve_ms)
                or not self._has_room(batch | {rid})
                for rid in rest - more
            ):
                allowed.add(frozenset(batch))
        return allowed

    def _passes(self, rid: str, batch: set[str] | frozenset[str], out: set[str]) -> bool:
        """Whether a call in this batch goes by one that is left out and lets it not."""
        for other in out:
            if self._rank(other) > self._rank(rid):
                return True
            if self._rank(other) == math.inf and self._urgency(other) > self._urgency(rid):
                before = {r for r in batch if self._urgency(r) > self._urgency(other)}
                if not self._has_room(before | {other}):
                    return True
        return False


def _subsets(pool: set[str]) -> list[frozenset[str]]:
    return [frozenset(c) for n in range(len(pool) + 1) for c in itertools.combinations(sorted(pool), n)]
