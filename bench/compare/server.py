"""SGLang's own HTTP server on a CPU: `python -m bench.compare.server MODEL_DIRECTORY PORT`.

Nothing of Talaria's engine is in it but what SGLang lacks on a CPU. SGLang starts its parts as processes that import
this module first.
"""

from __future__ import annotations

import os
import sys

from bench.ablation.child import CHUNK, MAX_RUNNING, PAGE
from bench.compare import device
from talaria_gpu.engine.sglang import environment

environment.prepare("cpu")
os.environ.pop("SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE", None)  # a choice of our engine, not a default of SGLang's


def main() -> None:
    """Serve until told to stop."""
    path, port = sys.argv[1], int(sys.argv[2])
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.server_args import ServerArgs

    args = ServerArgs(
        model_path=path,
        served_model_name=path,
        host="127.0.0.1",
        port=port,
        device="cpu",
        dtype="float32",
        attention_backend="torch_native",
        disable_cuda_graph=True,
        disable_overlap_schedule=True,  # as in Talaria's engine: a CPU overlaps nothing, results would come a step late
        sleep_on_idle=True,  # not to spin on the core that others compute on
        context_length=device.CONTEXT,
        max_total_tokens=device.KV_TOKENS,
        page_size=PAGE,
        max_running_requests=MAX_RUNNING,
        chunked_prefill_size=CHUNK,
        mem_fraction_static=0.5,  # an upper bound only: max_total_tokens sizes the pool
        enable_cache_report=True,
        skip_server_warmup=True,  # every system is warmed up alike; and sglangmux pauses a server before that is over
        random_seed=0,
        log_level="warning",
    )
    launch_server(args, run_scheduler_process_func=device.scheduler)


if __name__ == "__main__":
    main()
