"""What all tensor-parallel ranks agree on: which prefix they have, which copies are over (4.3, appendix B).

Ranks run the same calls in the same order. What depends on a rank's own copies - whether one has completed, whether a
checksum was right, what is on its host - is agreed on before anything follows from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from talaria_common.errors import EngineError
from talaria_gpu.hkvr.keys import KEY_BYTES


class RankLostError(EngineError):
    """A rank has gone or hangs: the engine must not be used any more."""


class Ranks(Protocol):
    """The ranks of one engine. Every method is called by all of them, in the same order, and waits for the last.

    Raises RankLostError where one has gone.
    """

    rank: int
    size: int

    def least(self, values: Sequence[int]) -> list[int]:
        """Value by value the least of all ranks'; all give the same number of them."""
        ...

    def gather(self, payload: bytes) -> list[bytes]:
        """What each rank gave, in their order."""
        ...


class Alone:
    """One rank."""

    rank = 0
    size = 1

    def least(self, values: Sequence[int]) -> list[int]:
        """Its own."""
        return list(values)

    def gather(self, payload: bytes) -> list[bytes]:
        """Its own."""
        return [payload]


class Agreement(NamedTuple):
    """What came of comparing prefixes; the same on all ranks."""

    blocks: int
    """From the first on, that all ranks have."""
    unanimous: bool = True
    """Whether no rank has more than that, nor other blocks behind them."""


def agree_on(ranks: Ranks, keys: Sequence[bytes]) -> Agreement:
    """How many of this rank's blocks, from the first on, all ranks have."""
    if ranks.size == 1:
        return Agreement(len(keys))
    joined = ranks.gather(b"".join(keys))
    reports = [[r[at : at + KEY_BYTES] for at in range(0, len(r), KEY_BYTES)] for r in joined]
    agreed = agreed_blocks(reports)
    return Agreement(agreed, all(len(report) == agreed for report in reports))


def agreed_blocks(reports: Sequence[Sequence[bytes]]) -> int:
    """Blocks, from the first on, whose cumulative hash every rank reports as complete in host memory.

    A rank that lags cuts the prefix to what it has; one whose hash differs cuts it before the difference.
    """
    if not reports:
        return 0
    agreed = 0
    for keys in zip(*reports, strict=False):
        if any(key != keys[0] for key in keys):
            break
        agreed += 1
    return agreed
