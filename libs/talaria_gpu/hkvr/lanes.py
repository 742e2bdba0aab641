"""One copy by several threads where the CPU does the copying: a core alone does not fill the memory's bandwidth.

Each lane takes a stretch of blocks and copies and hashes it before the next one, so that what is hashed is still in the
cache. On a GPU the device copies, and there is one lane.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")
STRETCH_BYTES = 4 << 20
"""A lane's turn; what is no larger is not shared out at all."""
MAX_LANES = 4


class Lanes:
    """Threads that share the copies of one stream.

    Args:
        name: of the threads.
        device: whose memory is copied from or to.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        count = min(MAX_LANES, torch.get_num_threads()) if device.type == "cpu" else 1
        self._threads = ThreadPoolExecutor(count, thread_name_prefix=name) if count > 1 else None
        self.is_shared = device.type == "cpu"
        """Whether work is cut into stretches."""

    def run(self, work: Callable[[T], bool], stretches: Sequence[T]) -> None:
        """Do all stretches, the earlier ones first; after one whose work says False, none that has not begun.

        Raises what a stretch raised, when all that had begun are over.
        """
        if self._threads is None or len(stretches) < 2:
            for stretch in stretches:
                if not work(stretch):
                    return
            return
        waiting = iter(stretches)
        turns = [self._threads.submit(_drive, work, waiting) for _ in range(MAX_LANES)]
        failures = [failure for turn in turns if (failure := turn.exception()) is not None]
        if failures:
            raise failures[0]

    def close(self) -> None:
        """End the threads."""
        if self._threads is not None:
            self._threads.shutdown()


def _drive(work: Callable[[T], bool], waiting: Iterator[T]) -> None:
    """Taking from one list iterator is atomic under the interpreter's lock."""
    with torch.inference_mode():
        for stretch in waiting:
            if not work(stretch):
                for _ in waiting:
                    pass
                return
