"""What must hold in every simulation, checked while it runs: a breach is a bug, and no result is given."""

from __future__ import annotations

from talaria_common.errors import EngineError
from talaria_gpu.engine.contract import SwitchTiming
from talaria_gpu.engine.ipc import SlotEnded
from talaria_gpu.engine.sim import SimEngine

STALL_S = 21_600.0
"""Longer than a call may be refused, wait for a model to be read from disk, or be prefilled."""
_EPS_MS = 1e-3


class LawError(AssertionError):
    """A conservation law was broken."""

    def __str__(self) -> str:
        return f"a bug, in the simulator or in what it simulates: {super().__str__()}"


class InstanceLaws:
    """One instance's.

    KV is never above capacity, and the buffer never overfull; each slot's wall = active + switch, and all slots fit in
    the time that passed; each switch accounts for every byte and millisecond.
    """

    def __init__(self, iid: str, engine: SimEngine, start: float) -> None:
        self._iid = iid
        self._engine = engine
        self._capacity = engine.capacities
        self._start = start
        self._slots_ms = 0.0
        self.kv_peak = dict.fromkeys(self._capacity, 0)
        """Most device rows in use, tokens, by model."""
        self.hbm_bytes = 0
        """Most of the buffer in use since the last slot ended: weights, KV and what is staged."""

    def after_turn(self) -> None:
        """After each turn of the driver."""
        active = self._engine.active
        if active is None:
            return
        used = self._engine.kv_used_tokens(active)
        if used > self._capacity[active]:
            raise LawError(f"{self._iid}: {active} holds {used} KV tokens of {self._capacity[active]}")
        self.kv_peak[active] = max(self.kv_peak[active], used)
        kept = self._engine.kept
        if kept is not None:
            held = kept.used_bytes(active)
            if held > kept.buffer_bytes:
                raise LawError(f"{self._iid}: {held} bytes are in a buffer of {kept.buffer_bytes}")
            self.hbm_bytes = max(self.hbm_bytes, held)

    def switch(self, t: SwitchTiming) -> None:
        """A switch is over."""
        if t.d2d_bytes + t.h2d_bytes != t.weight_bytes or t.dirty_bytes + t.missing_bytes != t.h2d_bytes:
            raise LawError(f"{self._iid}: the switch to {t.target} does not account for its bytes: {t}")
        if min(t.phases_ms) < 0 or abs(sum(t.phases_ms) - t.total_ms) > _EPS_MS:
            raise LawError(f"{self._iid}: the phases of the switch to {t.target} are {t.phases_ms}, of {t.total_ms} ms")

    def slot(self, now: float, slot: SlotEnded) -> None:
        """A slot ended."""
        if abs(slot.wall_ms - slot.active_ms - slot.switch_ms) > _EPS_MS:
            raise LawError(f"{self._iid}: wall {slot.wall_ms} is not active {slot.active_ms} + {slot.switch_ms}")
        self._slots_ms += slot.wall_ms
        if self._slots_ms > (now - self._start) * 1000 + 1.0:
            raise LawError(f"{self._iid}: slots of {self._slots_ms} ms in {(now - self._start) * 1000} ms")
        self.hbm_bytes = 0

    def end(self) -> None:
        """Nothing is unfinished: nothing may have leaked."""
        try:
            self._engine.check_idle()
        except EngineError as e:
            raise LawError(f"{self._iid}: {e}") from e


class CallLaws:
    """Each call begins and ends exactly once, in its session's order."""

    def __init__(self) -> None:
        self._at: dict[str, tuple[int, bool]] = {}
        """By session: its latest call, and whether it is under way."""
        self.moved_at = 0.0
        """When anything last came of a call, or the first of those under way began."""
        self.begun = 0
        self.ends = 0

    def begin(self, session: str, call: int, now: float) -> None:
        """It goes out for the first time."""
        if self.begun == self.ends:
            self.moved_at = now
        at, under_way = self._at.get(session, (-1, False))
        if under_way or call != at + 1:
            raise LawError(
                f"call {call} of {session} began after call {at}, which was {'' if under_way else 'not '}open"
            )
        self._at[session] = (call, True)
        self.begun += 1

    def ended(self, session: str, call: int, now: float) -> None:
        """It was answered, or failed for good."""
        self.moved_at = now
        if self._at.get(session) != (call, True):
            raise LawError(f"call {call} of {session} ended twice, or never began")
        self._at[session] = (call, False)
        self.ends += 1

    def stands(self, now: float) -> None:
        """Raises LawError when calls are under way and nothing has come of any of them for `STALL_S`."""
        if self.begun > self.ends and now - self.moved_at > STALL_S:
            raise LawError(f"nothing has come of {self.begun - self.ends} calls for {STALL_S:g} s of virtual time")

    def closed(self, session: str) -> None:
        """The session is over; nothing more of it may come."""
        at = self._at.get(session)
        if at is None or at[1]:
            raise LawError(f"session {session} is over with a call under way, or never was")
        del self._at[session]

    def end(self) -> None:
        """At the end of the simulation."""
        if self.begun != self.ends or self._at:
            raise LawError(f"{self.begun - self.ends} calls never ended, {len(self._at)} sessions are not over")
