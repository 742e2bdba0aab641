"""How soon, and how surely, sessions come back: whether an idle slot should wait for them (2.3, 3.4)."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from talaria_gpu.sched.estimates import Ewma

_FADE = 0.95
_LIKELY = 0.5
_SESSIONS_MAX = 4096


@dataclass(slots=True)
class _Model:
    gap_ms: Ewma = field(default_factory=Ewma)
    finished: float = 0.0
    returned: float = 0.0
    last_finish: float = 0.0


class Returns:
    """Gaps between a session's answer and its next call, per model."""

    def __init__(self) -> None:
        self._models: dict[str, _Model] = {}
        self._since: OrderedDict[tuple[str, str], float] = OrderedDict()

    def finished(self, now: float, model: str, session: str) -> None:
        """A call of the session was answered."""
        if not session:
            return
        known = self._models.setdefault(model, _Model())
        known.finished = known.finished * _FADE + 1
        known.returned *= _FADE
        known.last_finish = now
        self._since[model, session] = now
        self._since.move_to_end((model, session))
        if len(self._since) > _SESSIONS_MAX:
            self._since.popitem(last=False)

    def arrived(self, now: float, model: str, session: str) -> None:
        """A call of the session came."""
        since = self._since.pop((model, session), None)
        if since is not None:
            known = self._models[model]
            known.returned += 1
            known.gap_ms.add((now - since) * 1000)

    def wait_until(self, model: str, worth_ms: float) -> float | None:
        """Until when waiting for the next return pays (s), if it costs `worth_ms` not to have waited; None: it doesn't.

        Waiting no longer than the loss is never worse than twice the best that hindsight could do.
        """
        known = self._models.get(model)
        if known is None or known.gap_ms.value is None or known.returned < _LIKELY * known.finished:
            return None
        if known.gap_ms.value > worth_ms:
            return None
        return known.last_finish + min(worth_ms, 2 * known.gap_ms.value) / 1000
