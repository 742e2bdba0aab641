"""What is measured: sizes, clients, streamed or whole, paced or not."""

from __future__ import annotations

from typing import NamedTuple

from bench.gateway.prompts import SIZES
from bench.gateway.systems import FAST, PACED

CLIENTS = (1, 16, 64)
TOKENS = 32
LATENCY_TOKENS = 8
"""Of a lone paced client: fewer, so that a window holds enough first tokens for a 95th percentile."""
BURSTS = 4


class Case(NamedTuple):
    """One case. `name` is what its figures end with, e.g. streamed_1kb_c16."""

    name: str
    model: str
    size: str
    clients: int
    stream: bool
    tokens: int = TOKENS
    bursts: int = 0
    sessions: bool = True
    weight: float = 1.0
    """Share of the time."""

    @property
    def size_bytes(self) -> int:
        """Bytes of prompt text."""
        return SIZES[self.size]


def paced(size: str, clients: int) -> Case:
    """Streams at the engine's pace: for latencies."""
    tokens, weight = (LATENCY_TOKENS, 2.0) if clients == 1 else (TOKENS, 1.0)
    return Case(f"{size}_c{clients}", PACED, size, clients, True, tokens, weight=weight)


def unpaced(size: str, clients: int, *, stream: bool) -> Case:
    """An engine that takes no time: for requests per second and CPU per request."""
    return Case(f"{'streamed' if stream else 'whole'}_{size}_c{clients}", FAST, size, clients, stream)


BURST = Case("paced64", PACED, "1kb", 64, True, bursts=BURSTS)
"""64 streams that start together; how long until the last has finished."""
NAMELESS = Case("nosession_streamed_1kb_c16", FAST, "1kb", 16, True, sessions=False)
"""As most agents call: no session id, so that the gateway finds the session by the prompt's beginning."""


def every() -> list[Case]:
    """All cases of a full run."""
    return [
        BURST,
        *(paced(size, clients) for size in SIZES for clients in CLIENTS),
        *(unpaced(size, clients, stream=s) for size in SIZES for clients in CLIENTS for s in (True, False)),
        NAMELESS,
    ]


def quick() -> list[Case]:
    """The cases that the goals name."""
    return [
        BURST,
        paced("1kb", 1),
        paced("400kb", 1),
        unpaced("1kb", 16, stream=True),
        unpaced("1kb", 16, stream=False),
        unpaced("400kb", 16, stream=True),
    ]
