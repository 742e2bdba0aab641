"""What a process needs before SGLang is imported there. Once it is imported, much of this is frozen."""

from __future__ import annotations

import importlib.metadata
import logging
import os

from talaria_common.errors import EngineError
from talaria_gpu.engine.sglang import standins
from talaria_gpu.engine.sglang.spec import SGLANG_VERSION

_ANY_DEVICE = {
    "HF_HUB_OFFLINE": "1",  # models are directories; nothing is ever looked up
    "TOKENIZERS_PARALLELISM": "false",
    # Log probabilities are the model's own, not those of the distribution after temperature.
    "SGLANG_RETURN_ORIGINAL_LOGPROB": "1",
    # A leak that SGLang's own idle check finds is an error, not a line in a log.
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1",
}
_CPU = {
    "SGLANG_USE_CPU_ENGINE": "1",
    # bfloat16 otherwise, whatever the model's type; tokens then differ from a full recompute.
    "SGLANG_MAMBA_CONV_DTYPE": "float32",
}
_CPU_DEFAULTS = {
    # Threads that wait for each other sleep instead of spinning. Where several engines share cores, spinning made a
    # decode step ten times slower; alone it gains nothing worth that. Read when torch is first imported.
    "OMP_WAIT_POLICY": "PASSIVE",
}
_CORES = "SGLANG_CPU_OMP_THREADS_BIND"
"""Which cores each rank has, "0,1|2,3"; without it SGLang wants a NUMA node per rank."""


def _cores(ranks: int) -> str:
    """The cores that this process may use, shared out; a core for several ranks where there are fewer."""
    mine = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    share = max(1, len(mine) // ranks)
    parts = ([mine[(rank * share + i) % len(mine)] for i in range(share)] for rank in range(ranks))
    return "|".join(",".join(map(str, part)) for part in parts)


def prepare(device: str, ranks: int = 1) -> None:
    """Make `import sglang` work for `device` ("cpu", "cuda" or "cuda:N") in this process, one of `ranks`.

    Raises:
        EngineError: another SGLang than the pinned one, or CPU stand-ins wanted beside real kernels.
    """
    try:
        found = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError as e:
        raise EngineError("SGLang is not installed; see requirements/engine-cpu.txt and engine-gpu.txt") from e
    if found != SGLANG_VERSION:
        raise EngineError(f"SGLang {found} is installed; this engine knows {SGLANG_VERSION} only")
    os.environ.update(_ANY_DEVICE)
    # Its warnings are about models and kernels that are not in use; what concerns us is raised.
    logging.getLogger("sglang").setLevel(logging.ERROR)
    if device == "cpu":
        os.environ.update(_CPU)
        for key, value in _CPU_DEFAULTS.items():
            os.environ.setdefault(key, value)
        if ranks > 1:
            os.environ.setdefault(_CORES, _cores(ranks))
        standins.install()
