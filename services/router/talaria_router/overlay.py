"""The in-flight overlay: what this router sent to an instance since the instance last said what it has (4.1).

Polled load alone herds every call of a heartbeat to the instance that looked idle. A placement enters when it is
decided and leaves when the first of these comes: a snapshot that counts it (`SeenPlacements`), its completion, a later
attempt of its call, or the deadline by which it had to be taken up. Live leases charge here as well. All of it is per
(instance, model) and returns to zero by itself, also when completions and snapshots are lost.
"""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass, field

import msgspec

from talaria_common.wire import SeenPlacements


class InFlight(msgspec.Struct, gc=False):
    """A placement that no snapshot counts yet."""

    iid: str
    seq: int
    model: str
    tokens: int
    """Prompt tokens that it will have to prefill, estimated."""
    leave_at: float


@dataclass(slots=True)
class ModelOverlay:
    """Charges of one model on one instance."""

    calls: int = 0
    tokens: int = 0
    leases: int = 0
    ended: int = 0
    """Calls that the last snapshot counts and that have ended since."""


@dataclass(slots=True)
class _Instance:
    last_seq: int = 0
    calls: dict[int, InFlight] = field(default_factory=dict)
    models: dict[str, ModelOverlay] = field(default_factory=dict)
    ended: list[tuple[int, str]] = field(default_factory=list)


_NOTHING = ModelOverlay()


class Overlay:
    """Charges by instance and model."""

    def __init__(self) -> None:
        self._instances: dict[str, _Instance] = {}
        self._deadlines: list[tuple[float, str, int]] = []
        self.changed: set[str] = set()
        """Instances whose charges changed: for whoever keeps figures of them."""
        self._leases: Counter[str] = Counter()

    def of(self, iid: str, model: str) -> ModelOverlay:
        """Charges of `model` on `iid`; to be read only."""
        instance = self._instances.get(iid)
        return instance.models.get(model, _NOTHING) if instance else _NOTHING

    def on(self, iid: str, model: str) -> tuple[ModelOverlay, int]:
        """(charges of `model` on `iid`, to be read only; placements there that no snapshot counts yet, all models)."""
        instance = self._instances.get(iid)
        return (instance.models.get(model, _NOTHING), len(instance.calls)) if instance else (_NOTHING, 0)

    def models_on(self, iid: str) -> dict[str, ModelOverlay]:
        """Charges on `iid` by model; to be read only."""
        instance = self._instances.get(iid)
        return instance.models if instance else {}

    def enter(self, iid: str, model: str, tokens: int, leave_at: float) -> InFlight:
        """A placement was decided: charge it. Its `seq` counts this router's placements on `iid` from 1."""
        instance = self._instances.get(iid) or self._instance(iid)
        seq = instance.last_seq = instance.last_seq + 1
        call = instance.calls[seq] = InFlight(iid, seq, model, tokens, leave_at)
        charge = instance.models.get(model) or self._model(instance, model)
        charge.calls += 1
        charge.tokens += tokens
        self.changed.add(iid)
        heapq.heappush(self._deadlines, (leave_at, iid, seq))
        return call

    def leave(self, iid: str, seq: int) -> bool:
        """A placement is over or superseded. False: it had left before."""
        instance = self._instances.get(iid)
        call = instance.calls.pop(seq, None) if instance else None
        if instance is None or call is None:
            return False
        charge = instance.models[call.model]
        charge.calls -= 1
        charge.tokens -= call.tokens
        self.changed.add(iid)
        return True

    def reconcile(self, iid: str, seen: SeenPlacements | None, snapshot_at_ms: int) -> None:
        """A newer snapshot: drop exactly the placements that it counts, and what had ended before it was made."""
        instance = self._instances.get(iid)
        if instance is None:
            return
        if seen is not None and instance.calls:
            missing = set(seen.missing)
            for seq in [s for s in instance.calls if s <= seen.upto and s not in missing]:
                self.leave(iid, seq)
        if instance.ended:
            self.changed.add(iid)
            kept = [(at, model) for at, model in instance.ended if at > snapshot_at_ms]
            for at, model in instance.ended:
                if at <= snapshot_at_ms:
                    instance.models[model].ended -= 1
            instance.ended = kept

    def ended(self, iid: str, model: str, at_ms: int) -> None:
        """A call that the current snapshot counts has ended since: it is load no more."""
        instance = self._instance(iid)
        instance.ended.append((at_ms, model))
        self._model(instance, model).ended += 1
        self.changed.add(iid)

    def reserve(self, iid: str, model: str, change: int) -> None:
        """A lease was installed (+1) or ended (-1)."""
        self._model(self._instance(iid), model).leases += change
        self._leases[model] += change
        self.changed.add(iid)

    def leases_of(self, model: str) -> int:
        """Leases held on `model`, wherever."""
        return self._leases[model]

    def expire(self, now: float) -> int:
        """Drop the placements whose time to be taken up has passed; returns how many."""
        dropped = 0
        while self._deadlines and self._deadlines[0][0] <= now:
            _, iid, seq = heapq.heappop(self._deadlines)
            dropped += self.leave(iid, seq)
        return dropped

    def forget(self, iid: str) -> None:
        """The instance is gone for good. Its numbering stays, so that a placement's number is never used twice."""
        instance = self._instances.get(iid)
        if instance is None:
            return
        for seq in list(instance.calls):
            self.leave(iid, seq)
        for _, model in instance.ended:
            instance.models[model].ended -= 1
        instance.ended = []
        self.changed.add(iid)

    def total(self) -> tuple[int, int, int]:
        """(calls, tokens, leases) over all instances: all zero when all is done."""
        charges = [m for i in self._instances.values() for m in i.models.values()]
        return sum(c.calls for c in charges), sum(c.tokens for c in charges), sum(c.leases for c in charges)

    def _instance(self, iid: str) -> _Instance:
        found = self._instances.get(iid)
        if found is None:
            found = self._instances[iid] = _Instance()
        return found

    @staticmethod
    def _model(instance: _Instance, model: str) -> ModelOverlay:
        found = instance.models.get(model)
        if found is None:
            found = instance.models[model] = ModelOverlay()
        return found
