"""What ranks agree on, over gloo between the hosts: apart from the model's own collectives, and from the devices."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from talaria_gpu.hkvr.agreement import RankLostError

TIMEOUT_S = 300.0
"""For one agreement: a rank may have to wait for its disk; one that has not come by then hangs."""


class GlooRanks:
    """`hkvr.agreement.Ranks` for one of several processes.

    Args:
        rank: this process's.
        size: how many there are.
        meeting: a file in a directory that all ranks see, made by none of them before.
        timeout_s: for one agreement.

    Raises:
        RankLostError: the others did not come.
    """

    def __init__(self, rank: int, size: int, meeting: Path, timeout_s: float = TIMEOUT_S) -> None:
        self.rank, self.size = rank, size
        try:
            store = dist.FileStore(str(meeting), size)
            self._group: Any = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=timeout_s))
        except RuntimeError as e:
            raise RankLostError(f"rank {rank} did not find the others: {e}") from e

    def least(self, values: Sequence[int]) -> list[int]:
        """See `Ranks`."""
        numbers = torch.tensor(list(values), dtype=torch.int64)
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MIN
        self._run(lambda: self._group.allreduce([numbers], options))
        found: list[int] = numbers.tolist()
        return found

    def gather(self, payload: bytes) -> list[bytes]:
        """See `Ranks`."""
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        self._run(lambda: self._group.allgather([sizes], [torch.tensor([len(payload)], dtype=torch.int64)]))
        lengths = [int(size) for size in sizes]
        longest = max(1, *lengths)
        mine = torch.zeros(longest, dtype=torch.uint8)
        if payload:
            mine[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        all_of_them = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.size)]
        self._run(lambda: self._group.allgather([all_of_them], [mine]))
        return [bytes(got[:n].numpy()) for got, n in zip(all_of_them, lengths, strict=True)]

    def _run(self, collective: Any) -> None:
        try:
            collective().wait()
        except RuntimeError as e:
            raise RankLostError(f"rank {self.rank} lost the others: {e}") from e
