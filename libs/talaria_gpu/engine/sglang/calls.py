"""A call in the engine, and what there is to tell about it after a step."""

from __future__ import annotations

from typing import Any

from sglang.srt.managers.schedule_batch import FINISH_LENGTH, FINISH_MATCHED_TOKEN

from talaria_gpu.engine.contract import CacheSource, EngineCall, StepTokens
from talaria_gpu.engine.sglang.accounting import PromptAccount
from talaria_gpu.engine.sglang.sampling import reported_logprobs


class Call:
    """A call and its SGLang request; remembers how much of the output has been told."""

    def __init__(self, call: EngineCall, request: Any) -> None:
        self.call = call
        self.request = request
        self.account = PromptAccount(len(call.input_ids))
        self.from_host = False
        """Whether some of what was cached had come from the host."""
        self._told = 0

    def news(self) -> StepTokens | None:
        """What is new since last asked; None: nothing."""
        reason = self.request.finished_reason
        end = len(self.request.output_ids)
        if isinstance(reason, FINISH_MATCHED_TOKEN):
            end -= 1  # the stop token itself is nobody's output
        start = self._told
        if end <= start and reason is None:
            return None
        self._told = end
        chosen: list[float] = []
        best: list[list[tuple[int, float]]] = []
        if self.call.sampling.logprobs is not None:
            chosen, best = reported_logprobs(self.request, start, end - start)
        if reason is None:
            finished, message = "", ""
        elif isinstance(reason, FINISH_MATCHED_TOKEN):
            finished, message = "stop", ""
        elif isinstance(reason, FINISH_LENGTH):
            finished, message = "length", ""
        else:
            finished, message = "error", str(reason.to_json())
        return self._tokens(list(self.request.output_ids[start:end]), chosen, best, finished, message)

    def failure(self, message: str) -> StepTokens:
        """The last word on a call that SGLang gave up."""
        return self._tokens([], [], [], "error", message)

    def _source(self) -> CacheSource:
        if not self.account.cached:
            return "none"
        return "host" if self.from_host else "device"

    def _tokens(self, ids: list[int], chosen: list[float], best: Any, finished: Any, message: str) -> StepTokens:
        return StepTokens(
            rid=self.call.rid,
            token_ids=ids,
            logprobs=chosen,
            top=best,
            cached_tokens=self.account.cached,
            cache_source=self._source(),
            prefilled_tokens=self.account.prefilled,
            recomputed_tokens=self.account.recomputed,
            finished=finished,
            message=message,
        )
