"""What stands for the one device: a core that every engine's computing thread is bound to, and its link to the host."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from typing import Any

import psutil

from bench.ablation.models import CONTEXT

__all__ = ["CONTEXT", "CORE", "KV_TOKENS", "RELOAD_S", "bind", "core", "reload_times", "scheduler"]

KV_TOKENS = 65_536
CORE = "BENCH_CORE"
RELOAD_S = "BENCH_RELOAD_S"
"""Seconds that a reload of the weights takes instead of one from the file system."""
_SAID = "bench: reload "


def core() -> int:
    """The last of the cores that this process may use."""
    return max(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0


def bind(pids: Iterable[int], to: int) -> None:
    """Bind the processes' main threads; threads that they start later come along."""
    for pid in pids:
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(pid, {to})


def engines(pid: int) -> list[int]:
    """The processes below an instance's: its engine."""
    return [process.pid for process in psutil.Process(pid).children(recursive=True)]


def scheduler(*args: Any, **options: Any) -> None:
    """SGLang's scheduler process, on the device's core, with the attention that Talaria's CPU engine has too."""
    bind([0], int(os.environ[CORE]))
    from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqOutput
    from sglang.srt.managers.scheduler import run_scheduler_process
    from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager as Manager

    from talaria_gpu.engine.sglang import cpu_attention

    cpu_attention.install()
    original, seconds = Manager.update_weights_from_disk, os.environ.get(RELOAD_S)

    def timed(self: Any, request: Any) -> Any:
        began = time.monotonic()
        if seconds is None:
            answer = original(self, request)
        else:
            time.sleep(float(seconds))  # on a CPU nothing was released: the weights are where they were
            answer = UpdateWeightFromDiskReqOutput(success=True, message="emulated")
        print(f"{_SAID}{time.monotonic() - began:.4f}", flush=True)
        return answer

    Manager.update_weights_from_disk = timed
    run_scheduler_process(*args, **options)


def reload_times(log: str) -> list[float]:
    """Seconds of each reload that a server's log tells of."""
    return [float(line.removeprefix(_SAID)) for line in log.splitlines() if line.startswith(_SAID)]
