"""The golden-token canary: a fixed prompt whose first tokens must be the same after a switch as at opening (DESIGN 7).

It runs on the model alone, before any call may, through the same scheduler and kernels as calls do.
"""

from __future__ import annotations

from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from talaria_common.errors import EngineError
from talaria_gpu.engine.contract import EngineCall, Sampling
from talaria_gpu.engine.sglang.opening import OpenModel

PROMPT_TOKENS = 24
TOKENS = 6
_RID = "f" * 16
"""As long as all of the engine's rids are, and none of them."""


def first_tokens(model: OpenModel) -> tuple[int, ...]:
    """The canary's tokens now; leaves nothing behind in the model's tree.

    Raises:
        EngineError: the model does not finish it.
    """
    ids = [(7919 * i + 13) % model.info.vocab_size for i in range(min(PROMPT_TOKENS, model.info.context_tokens // 2))]
    call = EngineCall(
        rid="canary",
        model=model.info.name,
        input_ids=ids,
        sampling=Sampling(max_new_tokens=TOKENS, temperature=0.0, ignore_eos=True),
        salt="talaria-canary",
    )
    scheduler = model.scheduler
    with model.inside():
        request = scheduler.submit(call, _RID, 0)
        for _ in range(len(ids) + TOKENS):
            scheduler.step(frozenset({_RID}))
            if request.finished():
                break
        else:
            scheduler.drop(request)
            raise EngineError(f"{model.info.name}: the canary's prompt does not come to an end")
        scheduler.settle()
        tree = scheduler.tree_cache
        tree.evict(EvictParams(num_tokens=tree.evictable_size()))
    return tuple(request.output_ids)


def check(model: OpenModel) -> None:
    """Raises EngineError when the canary's tokens are not those at opening: the weights or the KV are wrong."""
    found = first_tokens(model)
    if found != model.golden:
        raise EngineError(
            f"{model.info.name}: the canary failed after a switch: {list(found)}, expected {list(model.golden)}; this "
            "instance must not serve any more"
        )
