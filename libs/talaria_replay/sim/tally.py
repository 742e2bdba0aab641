"""What a simulation adds up while it runs: the trace as it is read, slots and switches as they end."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from typing import Any

import msgspec

from talaria_gpu.engine.contract import SwitchTiming
from talaria_gpu.engine.ipc import SlotEnded
from talaria_replay.measure import percentiles
from talaria_replay.trace import Call

PATHS = ("d2d", "partial", "h2d")
_IN_SLOT = ("p", "d1", "sp", "d", "dfin", "linger")
_SWITCH_BYTES = ("d2d_bytes", "dirty_bytes", "missing_bytes")
_encode = msgspec.json.Encoder().encode


class TraceTally:
    """Of the calls that were simulated."""

    def __init__(self) -> None:
        self._digest = hashlib.blake2b(digest_size=16)
        self._prompts: array[int] = array("q")
        self._sessions = 0
        self.gap_sources: dict[str, int] = {}
        """Calls but the first of a session, by where their gap comes from."""

    def add(self, session: Sequence[Call]) -> None:
        """All calls of a session."""
        self._sessions += 1
        for call in session:
            self._digest.update(_encode(call))
            self._prompts.append(call.prompt_tokens)
            if call.call:
                self.gap_sources[call.gap_source] = self.gap_sources.get(call.gap_source, 0) + 1

    def about(self, generated: str) -> dict[str, Any]:
        """For the result."""
        return {
            "generated": generated,
            "digest": self._digest.hexdigest(),
            "sessions": self._sessions,
            "calls": len(self._prompts),
            "prompt_tokens": percentiles(self._prompts),
            "gap_sources": dict(sorted(self.gap_sources.items())),
        }


class SlotTally:
    """Of all instances' slots and switches.

    Args:
        detail: keep a row of each.
    """

    def __init__(self, *, detail: bool) -> None:
        self._detail = detail
        self.slots: list[dict[str, Any]] = []
        self.switches: list[dict[str, Any]] = []
        self._walls: array[float] = array("d")
        self._totals: dict[str, array[float]] = {path: array("d") for path in PATHS}
        self._phases: dict[str, list[array[float]]] = {path: [array("d") for _ in range(5)] for path in PATHS}
        self._active_ms = 0.0
        self._in_slot_ms = dict.fromkeys(_IN_SLOT, 0.0)
        self._sums: dict[str, int] = dict.fromkeys(
            ("admitted", "deferred", "sp_admitted", "sp_deferred", "retracted", "suspended", "weight_bytes"), 0
        ) | dict.fromkeys(_SWITCH_BYTES, 0)
        self._infeasible = 0
        self._round: dict[str, int] = {}
        self._rounds = 0
        self._hbm_gib = 0.0

    def slot(self, iid: str, at: float, slot: SlotEnded, hbm_gib: float) -> None:
        """A slot ended at `at`, seconds of the window; `hbm_gib`: most of one GPU's buffer in use."""
        self._walls.append(slot.wall_ms)
        if self._round.get(iid) != slot.round:
            self._round[iid] = slot.round
            self._rounds += 1
        self._active_ms += slot.active_ms
        for name in _IN_SLOT:
            self._in_slot_ms[name] += getattr(slot, f"{name}_ms")
        for name in ("admitted", "deferred", "sp_admitted", "sp_deferred"):
            self._sums[name] += getattr(slot, name)
        self._infeasible += bool(slot.infeasible)
        self._hbm_gib = max(self._hbm_gib, hbm_gib)
        if self._detail:
            self.slots.append(
                {
                    "iid": iid,
                    "end_s": round(at, 3),
                    "model": slot.model,
                    "active_ms": round(slot.active_ms, 3),
                    "switch_ms": round(slot.switch_ms, 3),
                    "planned_ms": round(slot.planned_ms, 1),
                    "reason": slot.reason,
                    "round": slot.round,
                    "sp_admitted": slot.sp_admitted,
                    "sp_deferred": slot.sp_deferred,
                    "infeasible": slot.infeasible,
                    "hbm_gib": round(hbm_gib, 2),
                }
            )

    def switch(self, iid: str, at: float, t: SwitchTiming) -> None:
        """A switch ended at `at`, seconds of the window."""
        self._totals[t.path].append(t.total_ms)
        for phase, ms in zip(self._phases[t.path], t.phases_ms, strict=True):
            phase.append(ms)
        for name in ("retracted", "suspended", "weight_bytes", *_SWITCH_BYTES):
            self._sums[name] += getattr(t, name)
        if self._detail:
            row = {"iid": iid, "end_s": round(at, 3), "source": t.source, "target": t.target, "path": t.path}
            row |= {"total_ms": round(t.total_ms, 3), "phases_ms": [round(ms, 3) for ms in t.phases_ms]}
            row |= {name: getattr(t, name) for name in (*_SWITCH_BYTES, "suspended", "retracted")}
            self.switches.append(row)

    def summary(self) -> dict[str, Any]:
        """The figures; sums over all instances."""
        totals = array("d", [ms for path in PATHS for ms in self._totals[path]])
        switch_ms, sums = sum(totals), self._sums
        events = sums["sp_admitted"] + sums["sp_deferred"]
        return {
            "slots": len(self._walls),
            "rounds": self._rounds,
            "sp_events_per_round": round(events / self._rounds, 3) if self._rounds else 0.0,
            "slot_wall_ms": percentiles(self._walls),
            "slot_active_s": round(self._active_ms / 1000, 3),
            "in_slots_s": {name: round(ms / 1000, 3) for name, ms in self._in_slot_ms.items()},
            "infeasible_slots": self._infeasible,
            "switches": len(totals),
            "switch_ms": percentiles(totals),
            "switch_s": round(switch_ms / 1000, 3),
            "switch_share": round(switch_ms / (self._active_ms + switch_ms), 4) if self._walls else 0.0,
            "switch_paths": {
                path: {
                    "share": round(len(of_path) / len(totals), 4),
                    "total_ms": percentiles(of_path),
                    "phases_ms": [percentiles(phase) for phase in self._phases[path]],
                }
                for path, of_path in self._totals.items()
                if of_path
            },
            "sp_admission_rate": round(sums["sp_admitted"] / events, 4) if events else 0.0,
            "hbm_peak_gib": round(self._hbm_gib, 2),
            **sums,
        }
