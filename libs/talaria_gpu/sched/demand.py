"""What calls will cost: prefill, restore and device rows, predicted from the estimates (3.4)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from talaria_gpu.engine.contract import PrefixState
from talaria_gpu.sched.estimates import Estimates
from talaria_gpu.sched.messages import Call

DECODE_RESERVE_TOKENS = 512
"""Rows that an admission leaves for a call's own decode, as far as it may generate that much."""
_NONE = PrefixState()


class Capacity(NamedTuple):
    """A model's bounds on the device; 0: not known, the engine alone decides."""

    kv_tokens: int = 0
    max_running: int = 0


class Batch:
    """A batch of one model in the making: calls join while they fit.

    Args:
        model: whose.
        estimates: of the engine.
        prefixes: what is cached of the waiting calls.
        generated: tokens generated so far, by rid; a retracted call prefills its own again.
        capacity: of the device.
        running: the calls that hold rows already.
    """

    def __init__(
        self,
        model: str,
        estimates: Estimates,
        prefixes: Mapping[str, PrefixState],
        generated: Mapping[str, int],
        *,
        capacity: Capacity | None = None,
        running: Iterable[Call] = (),
    ) -> None:
        self._model = model
        self._estimates = estimates
        self._prefixes = prefixes
        self._generated = generated
        self._capacity = capacity or Capacity()
        running = list(running)
        self._running = len(running)
        self._rows = sum(call.tokens + generated.get(call.rid, 0) for call in running)
        self._prefill = self._restore = 0
        self.rids: list[str] = []

    def cost_ms(self, call: Call | None = None) -> float:
        """Predicted prefill and restore of the batch, with `call` in it."""
        prefill, restore = self._tokens(call) if call is not None else (0, 0)
        return self._estimates.prefill_ms(self._model, self._prefill + prefill) + self._estimates.restore_ms(
            self._model, self._restore + restore
        )

    def has_room(self, call: Call) -> bool:
        """Whether the device has rows and a place in the batch for one more."""
        running, rows = self._running + len(self.rids), self._capacity.kv_tokens
        if not running:
            return True
        if self._capacity.max_running and running >= self._capacity.max_running:
            return False
        return not rows or self._rows + self._need(call) <= rows

    def cached(self, call: Call) -> PrefixState:
        """What of the call need not be prefilled."""
        return self._prefixes.get(call.rid, _NONE)

    def add(self, call: Call) -> None:
        """Take it in."""
        prefill, restore = self._tokens(call)
        self._prefill += prefill
        self._restore += restore
        self._rows += self._need(call)
        self.rids.append(call.rid)

    def _tokens(self, call: Call) -> tuple[int, int]:
        cached = self.cached(call)
        length = call.tokens + self._generated.get(call.rid, 0)
        return max(1, length - cached.device - cached.host), cached.host

    def _need(self, call: Call) -> int:
        out = self._generated.get(call.rid, 0)
        return call.tokens + out + min(max(0, call.max_new - out), DECODE_RESERVE_TOKENS)
