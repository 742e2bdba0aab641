"""SGLang's `Scheduler`, stepped by hand: one batch per step, prefill only of the calls that the caller admits.

SGLang's own loop, sockets and watchdog are not used: it runs inside our engine process, which is supervised already
(and that watchdog, when it fires, kills the process's parent).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from sglang.srt.managers.io_struct import (
    AbortReq,
    ContinueGenerationReqInput,
    PauseGenerationReqInput,
    TokenizedGenerateReqInput,
)
from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req, release_req
from sglang.srt.managers.scheduler import NextBatchPlan, Scheduler
from sglang.srt.managers.scheduler_components.ipc_channels import SchedulerIpcChannels
from sglang.srt.managers.scheduler_components.output_sender import SenderWrapper
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.common import release_kv_cache
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.server_args import PortArgs, ServerArgs
from sglang.srt.utils.torch_memory_saver_adapter import TorchMemorySaverAdapter

from talaria_common.errors import ContextLengthError, EngineError
from talaria_gpu.engine.contract import EngineCall
from talaria_gpu.engine.sglang import sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """What a step ran."""

    kind: Literal["prefill", "decode", "idle"]
    requests: tuple[Req, ...] = ()
    extents: tuple[tuple[int, int], ...] = ()
    """Prefill, per request: first computed position, and how many."""


class SlotScheduler(Scheduler):  # type: ignore[misc]  # SGLang is untyped here
    """One model's scheduler.

    Args:
        on_memory: called with the scheduler once weights and KV pools exist and before anything captures an address.
    """

    running_batch: Any
    last_batch: Any
    waiting_queue: list[Req]
    chunked_req: Any

    def __init__(
        self, server_args: ServerArgs, port_args: PortArgs, *, on_memory: Callable[[SlotScheduler], None]
    ) -> None:
        self._on_memory = on_memory
        self._admit: frozenset[str] | None = None
        self.failed: dict[str, str] = {}
        """Requests that SGLang itself gave up since last asked, with its reason, by rid."""
        super().__init__(server_args, port_args)

    # --- start-up: what of SGLang's surroundings is left out

    def init_ipc_channels(self, port_args: PortArgs) -> None:  # noqa: ARG002 - SGLang's signature
        """No sockets: calls come as method calls, results are read off the batch."""
        nobody = SenderWrapper(None)
        self.ipc_channels = SchedulerIpcChannels(
            recv_from_tokenizer=None,
            recv_from_rpc=None,
            send_to_tokenizer=nobody,
            send_to_detokenizer=nobody,
            send_metrics_from_scheduler=None,
        )
        self.load_snapshot_writer = None
        self.recv_from_tokenizer = None

    def init_watch_dog_memory_saver_input_blocker(self) -> None:
        """SGLang's method without its watchdog thread, which would also keep this object alive for good."""
        self.memory_saver_adapter = TorchMemorySaverAdapter.create(enable=False)
        self.recv_skipper = None
        self.input_blocker = None

    def init_all_attention_backends(self) -> None:
        """Place weights and KV, then go on."""
        self._on_memory(self)
        self.model_runner.sampler = sampling.SeededSampler()
        super().init_all_attention_backends()

    # --- what the engine reads

    @property
    def model_runner(self) -> Any:
        """SGLang's model runner: the model, its pools and its sampler."""
        return self.tp_worker.model_runner

    @property
    def state_slots(self) -> Any | None:
        """The allocator of recurrent states; None: the model has none."""
        return getattr(self.req_to_token_pool, "mamba_allocator", None)

    @property
    def states(self) -> int:
        """How many recurrent states there is room for."""
        return 0 if self.state_slots is None else int(self.state_slots.size)

    @property
    def context_tokens(self) -> int:
        """Longest prompt + completion that SGLang serves in full; beyond, it clips (`init_req_max_new_tokens`)."""
        return int(self.max_req_len) - 1

    @property
    def spare_tokens(self) -> int:
        """KV rows, free or evictable, beyond what calls under way need next; below 0: they lack so many.

        That is a page for each, one for a new one, and all that a half prefilled prompt has still to get: SGLang takes
        rows for its next chunk without asking whether there are any, for it counted them when it admitted the prompt.
        """
        needed = (len(self.inflight()) + 1) * self.page_size
        half = self.chunked_req
        if half is not None:
            needed += len(half.origin_input_ids) + len(half.output_ids) - half.extend_end + self.page_size
        return self.free_tokens - int(needed)

    @property
    def free_tokens(self) -> int:
        """KV rows that are free or could be evicted."""
        tree = self.tree_cache
        evictable = tree.full_evictable_size() if tree.supports_mamba() else tree.evictable_size()
        return int(self.token_to_kv_pool_allocator.available_size() + evictable)

    @property
    def spare_states(self) -> int:
        """Recurrent states, free or evictable, beyond one for each call under way; below 0: they lack so many."""
        if self.state_slots is None:
            return 0
        there = self.state_slots.available_size() + self.tree_cache.mamba_evictable_size()
        return int(there - len(self.inflight()))

    def queued(self) -> list[Req]:
        """Requests whose prefill is not complete: the half prefilled one first, then retracted ones, then the rest."""
        half = [] if self.chunked_req is None else [self.chunked_req]
        return half + list(self.waiting_queue)

    def cached_tokens(self, request: Req) -> int:
        """Tokens of a request that lie in the prefix tree; all but the last one can be used."""
        ids = array("q", [*request.origin_input_ids, *request.output_ids])
        key = RadixKey(ids, extra_key=request.extra_key, limit=len(ids) - 1, cache_salt=request.cache_salt)
        return int(self.tree_cache.match_prefix(MatchPrefixParams(key=key)).device_prefix_len)

    # --- calls

    def submit(self, call: EngineCall, rid: str, seed: int) -> Req:
        """Queue a call under `rid`, which must have a fixed length: SGLang matches rids by prefix.

        Raises:
            ContextLengthError: SGLang would cut the completion short.
            ValueError: a sampling value is out of range.
        """
        params = sampling.sampling_params(call.sampling, seed)
        params.verify(self.model_config.vocab_size)
        self._check_length(len(call.input_ids), call.sampling.max_new_tokens)
        before = len(self.waiting_queue)
        logprobs = call.sampling.logprobs
        self.process_input_requests(
            [
                TokenizedGenerateReqInput(
                    rid=rid,
                    input_text="",
                    input_ids=array("q", call.input_ids),
                    input_embeds=None,
                    mm_inputs=None,
                    token_type_ids=None,
                    sampling_params=params,
                    return_logprob=logprobs is not None,
                    logprob_start_len=-1,
                    top_logprobs_num=logprobs or 0,
                    token_ids_logprob=None,
                    stream=False,
                    cache_salt=call.salt or None,
                )
            ]
        )
        if len(self.waiting_queue) != before + 1:
            raise EngineError(f"SGLang did not queue call {call.rid}: {self.failed.pop(rid, 'no reason given')}")
        request = self.waiting_queue[-1]
        if request.to_finish is not None:  # how SGLang queues what it refuses
            self.drop(request)
            raise EngineError(f"SGLang refused call {call.rid}: {request.to_finish.to_json()}")
        # Log probabilities of generated tokens only; else a retracted request would be asked for its own again.
        request.logprob_start_len = -1
        if call.sampling.ignore_eos:  # SGLang's ignore_eos ignores stop_token_ids, too
            request.eos_token_ids = set()
        return request

    def _check_length(self, prompt: int, new: int) -> None:
        fits = self.token_to_kv_pool_allocator.max_new_tokens_for_memory(
            prompt,
            max(min(new, self.context_tokens - prompt), 0),
            token_capacity=self.max_total_num_tokens,
            sliding_window_size=self.sliding_window_size,
            chunk_size=self.chunked_prefill_size,
        )
        if fits is None or fits < new or prompt >= self.max_req_input_len:
            raise ContextLengthError(
                f"{prompt} prompt tokens and up to {new} new ones do not fit {self.max_total_num_tokens} KV tokens and "
                f"a context of {self.context_tokens}"
            )

    def drop(self, request: Req) -> None:
        """End a request now, in whatever state; its row and KV are free when this returns.

        Between steps nothing is in flight, so a running request can be released at once; its batch drops it at the
        start of the next step, as it does with every finished one.
        """
        if request in self.waiting_queue:
            self.abort_request(AbortReq(rid=request.rid))
        elif request is self.chunked_req:
            self.abort_request(AbortReq(rid=request.rid))
            self.process_pending_chunked_abort()
        elif not request.finished():
            request.finished_reason = FINISH_ABORT()
            request.to_finish = None
            self._release_aborted_request(request)
            release_kv_cache(request, self.tree_cache, checkpoint=False)
        self.failed.pop(request.rid, None)

    def send_abort_output(self, abort_req: AbortReq, req: Req) -> None:
        """SGLang's report of a request that it ends itself."""
        reason = abort_req.finished_reason or {}
        self.failed[req.rid] = str(reason.get("message", "aborted"))

    # --- steps

    def step(self, admit: frozenset[str] | None) -> Ran:
        """The body of SGLang's event loop, once. `admit`: rids that may prefill; None: any."""
        self._admit = admit
        plan = self.get_next_batch_to_run(running_batch=self.running_batch, last_batch=self.last_batch)
        self.running_batch, batch = plan.running_batch, plan.batch_to_run
        ran = Ran(kind="idle")
        if batch:
            ran = _describe(batch)
            self.process_batch_result(batch, self.run_batch(batch))
        else:
            self.on_idle()
        self.last_batch = batch
        self._retracted_first()
        return ran

    def get_new_batch_prefill(self, running_batch: Any) -> NextBatchPlan:
        """SGLang's choice, from the admitted only. With nobody admitted a half prefilled request pauses, too.

        It also pauses while running calls have the rows of its next chunk: see `update_running_batch`.
        """
        if (self._admit is not None and not self._admit) or not self._next_chunk_fits():
            return NextBatchPlan(batch_to_run=None, running_batch=running_batch)
        everyone, admit = self.waiting_queue, self._admit
        self.waiting_queue = [r for r in everyone if admit is None or r.rid in admit]
        if self.waiting_queue:
            running_batch.batch_is_full = False  # may have been set when others were asked for
        try:
            plan = super().get_new_batch_prefill(running_batch)
        finally:
            kept = set(self.waiting_queue)
            self.waiting_queue = [r for r in everyone if r in kept or (admit is not None and r.rid not in admit)]
        if plan.batch_to_run is not None:
            sampling.attach_seeds(plan.batch_to_run)
            sampling.restore_penalties(plan.batch_to_run)
        return plan

    def _next_chunk_fits(self) -> bool:
        """Whether there are rows for as much as SGLang may prefill next of the half prefilled request, if there is one.

        SGLang takes them without asking, for it counted them when it admitted the request. But it counts only a share
        of what running calls may still say, and they go on while the request pauses.
        """
        half = self.chunked_req
        if half is None:
            return True
        have, page = half.extend_end, self.page_size
        end = min(have + self.chunked_prefill_size, len(half.origin_input_ids) + len(half.output_ids))
        return bool((-(-end // page) - -(-have // page)) * page <= self.free_tokens)

    def update_running_batch(self, batch: Any) -> Any:
        """SGLang's; but first a half prefilled request gives its rows to running ones that lack their next.

        SGLang looks for such rows among the running ones only, and ends the last of them with an error.
        """
        half = self.chunked_req
        if half is not None and not batch.check_decode_mem():
            self.chunked_req = None
            release_req(
                req=half,
                remaing_req_count=0,
                req_to_token_pool=self.req_to_token_pool,
                token_to_kv_pool_allocator=self.token_to_kv_pool_allocator,
                tree_cache=self.tree_cache,
                hisparse_coordinator=None,
            )
            self._add_request_to_queue(half, is_retracted=True)
        return super().update_running_batch(batch)

    def settle(self) -> None:
        """With nothing to run: let batches drop their finished requests, so that SGLang sees itself idle."""
        if self.step(frozenset()).kind != "idle":
            raise EngineError("asked to settle with requests still running")

    # --- the end of a slot

    def retract_all(self) -> int:
        """SGLang's own retract: what holds KV waits again, its tokens kept. How many did."""
        holding = sum(bool(r.kv.holds_kv) for r in self.inflight())
        self.pause_generation(PauseGenerationReqInput(mode="retract"))
        try:
            self._retracted_first()
            self._flush()
        finally:
            self.continue_generation(ContinueGenerationReqInput(torch_empty_cache=False))
        return holding

    def inflight(self) -> list[Req]:
        """Requests that run or are half prefilled."""
        found = {id(r): r for r in self.collect_inflight_reqs()}
        if self.chunked_req is not None:
            found[id(self.chunked_req)] = self.chunked_req
        return [r for r in found.values() if not r.finished()]

    def _flush(self) -> None:
        """Forget every prefix: its rows are about to hold another model's bytes. Paused, for calls may be waiting."""
        if not self.flush_cache(empty_cache=False):
            raise EngineError("SGLang would not flush the prefix tree at a switch")

    def _retracted_first(self) -> None:
        if any(r.is_retracted for r in self.waiting_queue):
            self.waiting_queue.sort(key=lambda r: (not r.is_retracted, r.rid))


def _describe(batch: Any) -> Ran:
    if not batch.forward_mode.is_extend():
        return Ran(kind="decode", requests=tuple(batch.reqs))
    return Ran(
        kind="prefill",
        requests=tuple(batch.reqs),
        extents=tuple(zip(batch.prefix_lens, batch.extend_lens, strict=True)),
    )
