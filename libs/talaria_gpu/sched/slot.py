"""One open slot: its phase, its clock, what was promised in it and what it has done (3.4)."""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass, field

from talaria_gpu.engine.contract import StepResult
from talaria_gpu.sched.messages import Call, Phase
from talaria_gpu.sched.plan import SlotPlan

_DECODING = {Phase.P: Phase.D1, Phase.SP: Phase.D}
"""The phase that decode belongs to, while a batch of these waits."""


@dataclass(slots=True)
class Counts:
    """What happened in a slot, for its report."""

    prefills: int = 0
    decodes: int = 0
    admitted: int = 0
    sps: int = 0
    sp_admitted: int = 0
    sp_carried: int = 0


@dataclass(slots=True)
class Slot:
    """Times are seconds of the scheduler's clock, durations ms."""

    model: str
    opened: float
    """When P began; moves when work comes after an idle time, which was nobody's loss."""
    switch_ms: float = 0.0
    phase: Phase = Phase.P
    plan: SlotPlan | None = None
    """None: no other model has had work so far, and there is nothing to share out."""
    end: float = 0.0
    """With a plan: when the slot is to end."""
    owed: str | None = None
    """The call whose first token the slot owes, whatever it costs."""
    committed: set[str] = field(default_factory=set)
    """The batch of P or SP under way: once begun, it is finished."""
    late: set[str] = field(default_factory=set)
    """Calls that came after P began."""
    carried: set[str] = field(default_factory=set)
    """Continuations that P had no room for."""
    boundary: bool = True
    """A decode has run since the last prefill: SP may begin."""
    refused: bool = False
    """The engine had no room for the call that the slot owes."""
    stuck: bool = False
    """The last step found nothing to run."""
    unsettled: bool = False
    """A call was dropped, and the engine may release its KV only in its next step."""
    counts: Counts = field(default_factory=Counts)
    spent_ms: dict[Phase, float] = field(default_factory=lambda: dict.fromkeys(Phase, 0.0))
    linger_ms: float = 0.0
    lingering: bool = False
    """With nothing to run, it waits for a session to return."""
    empty: bool = False
    """It had no work when others began to wait, and got none: no part of their round."""
    mark: float | None = None
    """Up to when the clock is accounted; None: it stands, as no call of any model is here."""
    decoded: int = 0
    """Decode iterations and their time since P began."""
    decoded_ms: float = 0.0
    invested_ms: dict[str, float] = field(default_factory=dict)
    """Prefill of the calls that run, since P began: what a switch that keeps no KV would throw away."""
    pending_ms: float = 0.0
    """Prefill of a prompt that takes several steps and has not started to decode."""
    half: str = ""
    """That prompt's call, as the last step told."""

    def restart(self, now: float, owed: str | None) -> None:
        """P begins anew, the slot's report goes on."""
        self.opened, self.phase, self.owed = now, Phase.P, owed
        self.committed.clear()
        self.late.clear()
        self.carried.clear()
        self.invested_ms.clear()
        self.decoded, self.decoded_ms, self.pending_ms = 0, 0.0, 0.0
        self.stuck, self.boundary, self.lingering, self.refused = False, True, False, False

    # --- the clock

    def tick(self, now: float, phase: Phase | None = None) -> None:
        """Account the time since last looked to the phase (default: the present one)."""
        if self.mark is not None:
            passed = max(0.0, (now - self.mark) * 1000)
            if self.lingering:
                self.linger_ms += passed
            else:
                self.spent_ms[phase or self.phase] += passed
            self.mark = now

    def enter(self, phase: Phase, now: float) -> None:
        """Go on to the next phase."""
        self.tick(now)
        self.phase = phase
        self.committed.clear()

    def left_p(self, waiting: Iterable[Call]) -> None:
        """P is over: the continuations among what waits may enter by SP."""
        self.carried = {call.rid for call in waiting if call.is_continuation and call.rid not in self.late}

    def left(self, rid: str) -> None:
        """A call is over, or gone: nothing is owed to it any more, and no decode has to earn its prefill."""
        self.invested_ms.pop(rid, None)
        for each in (self.committed, self.late, self.carried):
            each.discard(rid)
        if self.owed == rid:
            self.owed = None
        if self.half == rid:
            self.half, self.pending_ms = "", 0.0

    # --- steps

    def stepped(
        self,
        now: float,
        result: StepResult,
        *,
        started: Iterable[str] = (),
        back: Iterable[str] = (),
        restoring: Container[str] = (),
    ) -> None:
        """One step of the slot's model.

        Args:
            now: its end.
            result: what it did.
            started: calls that left the waiting queue in it.
            back: calls that returned to the queue, without their KV.
            restoring: calls whose prefix may be on its way from host: meanwhile the others decode.
        """
        counts, began = self.counts, list(started)
        self.stuck, self.unsettled = result.kind == "idle", False
        if result.kind != "idle":
            if self.half not in {"", result.half, *began}:
                self.pending_ms = 0.0  # it gave way to what runs, and is prefilled anew
            self.half = result.half
        for rid in back:
            self.invested_ms.pop(rid, None)
        counts.admitted += len(began)
        if self.phase is Phase.SP:
            counts.sp_admitted += len(began)
            counts.sp_carried += sum(rid in self.carried for rid in began)
        if result.kind == "prefill":
            self._prefilled(result, began)
        elif result.kind == "decode":
            self._decoded(result, restoring)
        decoding = result.kind == "decode"
        self.tick(now, _DECODING.get(self.phase) if decoding else None)

    def _prefilled(self, result: StepResult, began: list[str]) -> None:
        self.counts.prefills += 1
        self.boundary = self.refused = False
        if self.plan is None:
            self.phase = Phase.P  # alone, a model has no round: every prefill is one of P
        self.pending_ms += result.wall_ms
        if began:
            share = self.pending_ms / len(began)
            self.invested_ms.update(dict.fromkeys(began, share))
        if began or not result.half:  # or its call was dropped meanwhile
            self.pending_ms = 0.0

    def _decoded(self, result: StepResult, restoring: Container[str]) -> None:
        self.counts.decodes += result.steps
        self.decoded += result.steps
        self.decoded_ms += max(0.0, result.wall_ms - result.restore_ms)
        self.boundary = True
        # A decode though a batch was admitted: the device has no room for it now, or its prefix is still coming. Only
        # that, and what is owed, is asked for again; half a prompt that pauses has its place already.
        if self.owed in self.committed and self.owed not in restoring and self.owed != self.half:
            self.refused = True
        kept = {rid for rid in self.committed if rid == self.owed or rid in restoring}
        if not kept and (self.committed or self.plan is None):
            self.phase = _DECODING.get(self.phase, self.phase)
        self.committed = kept

    # --- what is left

    @property
    def lost_ms(self) -> float:
        """Prefill of what runs, or is about to, that decode has not yet earned."""
        return sum(self.invested_ms.values()) + self.pending_ms - self.decoded_ms

    def room_ms(self, now: float, decode_ms: float, lossy: bool, more_ms: float = 0.0) -> float:
        """What is left for P and SP after a further `more_ms` of prefill and all protected decode; < 0: too much.

        Args:
            now: the time.
            decode_ms: one decode step.
            lossy: the slot's end throws prefill away, which has to be earned by as much decode.
            more_ms: the batch in question.
        """
        if self.plan is None:
            return float("inf")
        protected = max(0, self.plan.decodes - self.decoded) * decode_ms
        if lossy:
            protected = max(protected, self.lost_ms + more_ms)
        return (self.end - now) * 1000 - more_ms - protected

    def earned(self, lossy: bool) -> bool:
        """Whether all protected decode has run."""
        return self.plan is None or (self.decoded >= self.plan.decodes and (not lossy or self.lost_ms <= 0))
