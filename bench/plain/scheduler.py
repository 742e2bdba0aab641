"""SGLang's own `Scheduler`, stepped by the body of its own loop. Only sockets and watchdog are cut."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

from talaria_gpu.engine.sglang import environment
from talaria_gpu.engine.sglang.spec import ModelSpec

Generate = Callable[[list[list[int]], int], list[list[int]]]


def prepare(path: Path, device: str, *, kv_tokens: int, page_size: int, max_running: int, chunk: int) -> Generate:
    """Build the scheduler; returns what runs prompts to their end, greedily, and gives their tokens."""
    environment.prepare(device)
    import torch
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.scheduler_components.ipc_channels import SchedulerIpcChannels
    from sglang.srt.managers.scheduler_components.output_sender import SenderWrapper
    from sglang.srt.runtime_context import use_context
    from sglang.srt.sampling.sampling_params import SamplingParams
    from sglang.srt.utils.torch_memory_saver_adapter import TorchMemorySaverAdapter

    from talaria_gpu.engine.sglang import runtime

    class Plain(Scheduler):  # type: ignore[misc]  # SGLang is untyped here
        def init_ipc_channels(self, port_args: Any) -> None:  # noqa: ARG002, SGLang's signature
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
            self.memory_saver_adapter = TorchMemorySaverAdapter.create(enable=False)
            self.recv_skipper = None
            self.input_blocker = None

    args = runtime.server_args(
        ModelSpec(path=path, dtype="float32" if device == "cpu" else "auto"),
        device=device,
        context_tokens=None,
        kv_tokens=kv_tokens,
        page_size=page_size,
        max_running=max_running,
        chunked_prefill_tokens=chunk,
        seed=0,
    )
    context = runtime.new_context(args)
    with use_context(context), runtime.building(device):
        it = Plain(args, runtime.port_args())
    serial = 0

    def submit(prompt: list[int], new_tokens: int) -> Any:
        nonlocal serial
        serial += 1
        params = SamplingParams(max_new_tokens=new_tokens, temperature=0.0, ignore_eos=True)
        params.normalize(None)
        request = TokenizedGenerateReqInput(
            rid=f"{serial:016x}",
            input_text="",
            input_ids=array("q", prompt),
            input_embeds=None,
            mm_inputs=None,
            token_type_ids=None,
            sampling_params=params,
            return_logprob=False,
            logprob_start_len=-1,
            top_logprobs_num=0,
            token_ids_logprob=None,
            stream=False,
        )
        it.process_input_requests([request])
        return it.waiting_queue[-1]

    def generate(prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        with use_context(context), torch.inference_mode():
            requests = [submit(prompt, new_tokens) for prompt in prompts]
            while not all(r.finished() for r in requests):
                plan = it.get_next_batch_to_run(running_batch=it.running_batch, last_batch=it.last_batch)
                it.running_batch, batch = plan.running_batch, plan.batch_to_run
                if batch:
                    it.process_batch_result(batch, it.run_batch(batch))
                else:
                    it.on_idle()
                it.last_batch = batch
        return [list(r.output_ids) for r in requests]

    return generate
