"""The real engine: SGLang 0.5.23, one `Scheduler` per model in one process over one device buffer.

Nothing of SGLang is touched outside this folder. Importing it is cheap; `build` imports SGLang (8-10 s) when called.

    environment  what the process needs before SGLang is imported; standins/ what a CPU lacks
    runtime      SGLang's server arguments, and a runtime context per model
    cpu_attention  prefill behind a cached prefix, on a CPU
    layout       weights and KV of every model as views of the one buffer
    scheduler    SGLang's Scheduler, stepped by hand
    sampling     seeds that do not depend on the batch
    accounting   prompt tokens per call: cached, computed, computed again
    unbound      a model's device memory outside the buffer, given back while it is switched out
    ranks        several processes, each with a share of every model
    hosted       where a model's KV lives; with tree, identity, saving, restore and suspend it keeps KV on the host
    checks       what this adapter assumes of SGLang, and the leak checks
    engine       `SglangEngine`, the contract of `engine.contract`
"""

from talaria_gpu.engine.sglang.factory import build
from talaria_gpu.engine.sglang.spec import ModelSpec

__all__ = ["ModelSpec", "build"]
