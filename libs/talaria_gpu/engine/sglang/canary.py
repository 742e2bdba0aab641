"""The golden-token canary: a fixed prompt whose first tokens must be the same after a switch as at opening (DESIGN 7).

It runs on the model alone, before any call may, through the same scheduler and kernels as calls do.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sglang.srt.managers.schedule_batch import ScheduleBatch

from talaria_common.errors import EngineError
from talaria_gpu.engine.contract import EngineCall, Sampling
from talaria_gpu.engine.sglang.opening import OpenModel
from talaria_gpu.engine.sglang.scheduler import SlotScheduler
from talaria_gpu.engine.sglang.tree import evict_all

PROMPT_TOKENS = 24
TOKENS = 6
STATES = 4
"""Recurrent states that a call needs at most, where a model has such."""
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
    with model.inside(), _alone(scheduler):
        request = scheduler.submit(call, _RID, 0)
        for _ in range(len(ids) + TOKENS):
            scheduler.step(frozenset({_RID}))
            if request.finished():
                break
        else:
            scheduler.drop(request)
            raise EngineError(f"{model.info.name}: the canary's prompt does not come to an end")
        evict_all(scheduler.tree_cache)
    return tuple(request.output_ids)


def has_room(model: OpenModel) -> bool:
    """Whether the canary can run: calls that are suspended keep their rows, and may keep all of them."""
    rows, kv = model.scheduler.req_to_token_pool, model.scheduler.token_to_kv_pool_allocator
    slots = model.scheduler.state_slots
    states = STATES if slots is None else slots.available_size()
    return bool(
        rows.available_size() and kv.available_size() > PROMPT_TOKENS + TOKENS + 2 * kv.page_size and states >= STATES
    )


@contextmanager
def _alone(scheduler: SlotScheduler) -> Iterator[None]:
    """Inside, the scheduler runs nothing else: suspended calls, whose KV is not back yet, are set aside."""
    aside = scheduler.running_batch, scheduler.last_batch, scheduler.chunked_req
    scheduler.running_batch = ScheduleBatch(reqs=[], batch_is_full=False)
    scheduler.last_batch = scheduler.chunked_req = None
    try:
        yield
    finally:
        scheduler.running_batch, scheduler.last_batch, scheduler.chunked_req = aside


def check(model: OpenModel) -> None:
    """Raises EngineError when the canary's tokens are not those at opening: the weights or the KV are wrong."""
    found = first_tokens(model)
    if found != model.golden:
        raise EngineError(
            f"{model.info.name}: the canary failed after a switch: {list(found)}, expected {list(model.golden)}; this "
            "instance must not serve any more"
        )
