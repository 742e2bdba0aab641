"""The engine of a hot instance: slot driver and SGLang engine, as the engine process runs them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from talaria_common.clock import SystemClock
from talaria_gpu.engine.contract import EngineCall, Sampling
from talaria_gpu.engine.driver import SlotDriver
from talaria_gpu.engine.ipc import Refused, Stepped
from talaria_gpu.engine.sglang import environment
from talaria_gpu.engine.sglang.spec import ModelSpec
from talaria_gpu.sched.slots import SlotConfig

Generate = Callable[[list[list[int]], int], list[list[int]]]


def prepare(path: Path, device: str, *, kv_tokens: int, page_size: int, max_running: int, chunk: int) -> Generate:
    """Open the model; returns what runs prompts to their end, greedily, and gives their tokens."""
    environment.prepare(device)
    from talaria_gpu.engine.sglang.engine import SglangEngine

    engine = SglangEngine(
        {"model": ModelSpec(path=path, dtype="float32" if device == "cpu" else "auto")},
        device=device,
        kv_tokens=kv_tokens,
        page_size=page_size,
        max_running=max_running,
        chunked_prefill_tokens=chunk,
        buffer_bytes=None,
        threads=None,
        seed=0,
    )
    clock = SystemClock()
    driver = SlotDriver(engine, SlotConfig(slot_ms=2000.0, drain_ms=500.0), clock)
    serial = 0

    def generate(prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        nonlocal serial
        sampling = Sampling(max_new_tokens=new_tokens, temperature=0.0, ignore_eos=True)
        out: dict[str, list[int]] = {}
        for prompt in prompts:
            serial += 1
            rid = f"bench-{serial}"
            out[rid] = []
            call = EngineCall(rid=rid, model="model", input_ids=prompt, sampling=sampling, arrival=clock.now())
            for report in driver.submit(call):
                if isinstance(report, Refused):
                    raise RuntimeError(f"refused: {report.error}")  # noqa: TRY004, an answer, not a wrong type
        left = len(out)
        while left:
            for report in driver.turn(clock.now()):
                if isinstance(report, Stepped):
                    for news in report.result.tokens:
                        out[news.rid] += news.token_ids
                        left -= bool(news.finished)
        return list(out.values())

    return generate
