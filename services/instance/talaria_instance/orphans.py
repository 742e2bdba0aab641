"""Finds calls whose api is gone: their tokens reach nobody, and they must not hold slots until their deadline.

An api listens on a subject of its own as long as it lives. A probe there, when nobody listens, comes back at once; when
somebody does, nobody answers it. A tap on that subject hides a death (NATS trap 1): then the deadline ends the call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from talaria_common import subjects
from talaria_common.bus import Bus
from talaria_common.errors import BusError, NoRespondersError
from talaria_common.wire import TokenBatch, encode

PROBE_S = 0.5
"""How long nobody's answer is waited for."""
GONE_AFTER = 3
"""Probes in a row that find nobody. One may find an api that is reconnecting."""


class Orphans:
    """Args: apis: those with calls here; gone: told of one that is gone; batch: empty, as from this instance."""

    def __init__(
        self, bus: Bus, batch: TokenBatch, apis: Callable[[], Iterable[str]], gone: Callable[[str], None]
    ) -> None:
        self._bus = bus
        self._probe = encode(batch)
        self._apis = apis
        self._gone = gone
        self._missed: dict[str, int] = {}

    async def look(self) -> None:
        """Probe each api once."""
        apis = set(self._apis())
        self._missed = {api: n for api, n in self._missed.items() if api in apis}
        if self._bus.connected:
            await asyncio.gather(*(self._look(api) for api in apis))

    async def _look(self, api: str) -> None:
        try:
            await self._bus.request(subjects.tokens(api), self._probe, timeout_s=PROBE_S)
        except NoRespondersError:
            self._missed[api] = self._missed.get(api, 0) + 1
        except BusError:
            self._missed.pop(api, None)
        if self._missed.get(api, 0) >= GONE_AFTER:
            del self._missed[api]
            self._gone(api)
