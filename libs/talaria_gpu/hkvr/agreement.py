"""Which prefix all tensor-parallel ranks have: only that is ever restored (4.3, appendix B)."""

from __future__ import annotations

from collections.abc import Sequence


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
