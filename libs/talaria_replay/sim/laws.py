"""What must hold in every simulation, checked while it runs: a breach is a bug, and no result is given."""

from __future__ import annotations

from talaria_common.errors import EngineError
from talaria_gpu.engine.contract import SwitchTiming
from talaria_gpu.engine.ipc import SlotEnded
from talaria_gpu.engine.sim import SimEngine

_EPS_MS = 1e-3
_EPS = 1e-9
"""Of a time that is a sum of many."""


class LawError(AssertionError):
    """A conservation law was broken."""

    def __str__(self) -> str:
        return f"a bug, in the simulator or in what it simulates: {super().__str__()}"


class InstanceLaws:
    """One instance's, held against the virtual clock and against what the engine holds, not against the records alone.

    KV is never above capacity, and the buffer never overfull; a switch takes as long as its record says, and brings as
    many staged bytes as had landed; the time between two slots' beginnings is the slot's active time, its switch, and
    the time in which no call was here and no switch under way.
    """

    def __init__(self, iid: str, engine: SimEngine, start: float) -> None:
        self._iid = iid
        self._engine = engine
        self._capacity = engine.capacities
        self._active = engine.active
        self._began = self._switched_at = self._looked = start
        """When the slot began, with its switch; when the latest switch began; when `look` last looked. Seconds."""
        self._switch_ms = 0.0
        """Of the open slot's switch, by the clock."""
        self._idle_ms = 0.0
        """Since the slot began, without any call or switch."""
        self._idle = True
        self._switching = False
        self.kv_peak = dict.fromkeys(self._capacity, 0)
        """Most device rows in use, tokens, by model."""
        self.hbm_bytes = 0
        """Most of the buffer in use since the last slot ended: weights, KV and what is staged."""

    def look(self, now: float) -> None:
        """After each command, turn and switch: whether any call is here, or a switch under way."""
        if self._idle:
            self._idle_ms += (now - self._looked) * 1000
        self._looked, self._idle = now, not self._engine.unfinished and not self._switching

    def after_turn(self, now: float) -> None:
        """After each turn of the driver, before its reports."""
        self.look(now)
        active = self._engine.active
        if active is None:
            return
        if active != self._active:
            if self._active is None:  # there was no slot before
                self._began, self._idle_ms = now, 0.0
            self._active, self._switched_at, self._switching, self._idle = active, now, True, False
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

    def switch(self, now: float, t: SwitchTiming) -> None:
        """A switch is over."""
        self._switching = False
        self.look(now)
        if t.d2d_bytes + t.h2d_bytes != t.weight_bytes or t.dirty_bytes + t.missing_bytes != t.h2d_bytes:
            raise LawError(f"{self._iid}: the switch to {t.target} does not account for its bytes: {t}")
        staged = self._engine.kept.brought_bytes if self._engine.kept is not None else 0
        if t.d2d_bytes != staged:
            raise LawError(f"{self._iid}: {t.d2d_bytes} bytes of {t.target} came from staging, where {staged} lay")
        if min(t.phases_ms) < 0 or abs(sum(t.phases_ms) - t.total_ms) > _EPS_MS:
            raise LawError(f"{self._iid}: the phases of the switch to {t.target} are {t.phases_ms}, of {t.total_ms} ms")
        self._switch_ms = took = (now - self._switched_at) * 1000
        if t.target != self._active or abs(took - t.total_ms) > _EPS_MS:
            raise LawError(
                f"{self._iid}: a switch to {t.target} of {t.total_ms} ms; one to {self._active} took {took:.6f}"
            )

    def slot(self, now: float, slot: SlotEnded) -> None:
        """A slot ended: the switch to the next one begins."""
        if abs(slot.wall_ms - slot.active_ms - slot.switch_ms) > _EPS_MS:
            raise LawError(f"{self._iid}: wall {slot.wall_ms} is not active {slot.active_ms} + {slot.switch_ms}")
        if abs(slot.switch_ms - self._switch_ms) > _EPS_MS:
            raise LawError(f"{self._iid}: a slot's switch of {slot.switch_ms} ms took {self._switch_ms:.6f}")
        passed_ms = (now - self._began) * 1000
        if abs(slot.wall_ms + self._idle_ms - passed_ms) > _EPS_MS + _EPS * passed_ms:
            raise LawError(
                f"{self._iid}: a slot of {slot.wall_ms} ms and {self._idle_ms:.6f} without calls, in {passed_ms:.6f} ms"
            )
        self._began, self._idle_ms, self.hbm_bytes = now, 0.0, 0

    def end(self) -> None:
        """Nothing is unfinished: nothing may have leaked."""
        try:
            self._engine.check_idle()
        except EngineError as e:
            raise LawError(f"{self._iid}: {e}") from e


class CallLaws:
    """Each call begins and ends exactly once, in its session's order.

    Args:
        longest_s: no call can be under way for longer than that, answered or not.
    """

    def __init__(self, longest_s: float) -> None:
        self._longest_s = longest_s
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
        """Raises LawError when calls are under way and nothing has come of any of them for too long."""
        if self.begun > self.ends and now - self.moved_at > self._longest_s:
            raise LawError(f"nothing has come of {self.begun - self.ends} calls for {self._longest_s:g} s")

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
