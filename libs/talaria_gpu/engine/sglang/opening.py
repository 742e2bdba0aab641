"""Opening a model: its scheduler built, its weights and KV placed in the buffer, what was assumed checked."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from sglang.srt.runtime_context import use_context

from talaria_common.errors import EngineError
from talaria_gpu.engine.contract import ModelInfo
from talaria_gpu.engine.sglang import allocators, checks, hosted, runtime, tree
from talaria_gpu.engine.sglang.calls import Call
from talaria_gpu.engine.sglang.layout import Region
from talaria_gpu.engine.sglang.scheduler import SlotScheduler
from talaria_gpu.engine.sglang.spec import ModelSpec
from talaria_gpu.engine.sglang.unbound import Unbound
from talaria_gpu.hkvr.agreement import Alone, Ranks
from talaria_gpu.hkvr.store import HostKv

SGLANG_RESERVE = 6
"""Tokens: of a context of n, SGLang takes prompts of up to n - 7 and prompt + completion of up to n - 2."""
_SLACK = 64 << 20
"""Bytes in an estimate for what loading adds to the files: rotary tables, absorbed projections."""


@dataclass(slots=True)
class OpenModel:
    """A model as the engine holds it."""

    info: ModelInfo
    context: Any
    scheduler: SlotScheduler
    region: Region
    residence: hosted.PlainModel
    """Where its KV lives."""
    unbound: Unbound
    """Its device memory outside the buffer."""
    calls: dict[str, Call] = field(default_factory=dict)
    """Unfinished calls by SGLang's rid."""
    kv_epoch: int = 0
    sessions: set[str] = field(default_factory=set)
    golden: tuple[int, ...] = ()
    """First tokens of the canary's prompt, as generated right after opening; empty: no canary."""

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Inside, the model's runtime context is SGLang's current one, and torch records nothing for gradients."""
        with use_context(self.context), torch.inference_mode():
            yield


def open_model(
    name: str,
    spec: ModelSpec,
    buffer: torch.Tensor,
    *,
    device: str,
    kv_tokens: int,
    page_size: int,
    max_running: int,
    chunked_prefill_tokens: int,
    seed: int,
    make_image: Callable[[int], torch.Tensor],
    host_kv: HostKv | None = None,
    suspends: bool = False,
    ranks: Ranks = Alone(),  # noqa: B008 - has no state
    meeting: Path | None = None,
) -> OpenModel:
    """Build one model over `buffer`; its weights are there when this returns, and every other model's are not.

    `make_image` is called once, with the size in bytes of the weights' host image, and what it gives is filled.
    `host_kv` and `suspends`: see `hosted.HostedModel`. `ranks` and `meeting`: see `SglangEngine`.

    Raises:
        EngineError: it does not fit, or SGLang differs from what this adapter assumes.
    """
    unbound = Unbound.of(name, device)
    args = runtime.server_args(
        spec,
        device=device,
        context_tokens=_context_length(spec),
        kv_tokens=kv_tokens,
        page_size=page_size,
        max_running=max_running,
        chunked_prefill_tokens=chunked_prefill_tokens,
        seed=seed,
        tree=None if host_kv is None else tree.BACKEND,
        ranks=ranks.size,
        gives_back=unbound.active,
        hybrid=_recurrent_layers(_config(spec)) > 0,
    )
    context = runtime.new_context(args, ranks.rank)
    placed: list[Region] = []

    def place(scheduler: SlotScheduler) -> None:
        runner = scheduler.model_runner
        placed.append(Region(name, runner.model, runner.token_to_kv_pool, page_size, buffer, make_image=make_image))

    with use_context(context), runtime.building(device, meeting), allocators.low_first(), unbound.building():
        scheduler = SlotScheduler(args, runtime.port_args(), on_memory=place)
    region = placed[0]
    checks.check_built(name, scheduler, kv_tokens, page_size, max_running)
    checks.check_inside(name, scheduler, buffer)
    limit = scheduler.context_tokens
    info = ModelInfo(
        name=name,
        context_tokens=min(spec.context_tokens or limit, limit),
        kv_capacity_tokens=scheduler.max_total_num_tokens,
        weight_bytes=region.weight_bytes,
        kv_bytes_per_token=region.kv_bytes_per_token,
        max_running=max_running,
        eos_token_ids=tuple(sorted(scheduler.model_config.hf_eos_token_id or ())),
        vocab_size=scheduler.model_config.vocab_size,
    )
    home = hosted.residence(host_kv, name, spec, scheduler, suspends=suspends, ranks=ranks)
    return OpenModel(info=info, context=context, scheduler=scheduler, region=region, residence=home, unbound=unbound)


def estimate_bytes(models: dict[str, ModelSpec], kv_tokens: int, page_size: int, max_running: int) -> int:
    """About what the largest model needs, from its files alone: for a buffer whose size nobody gave.

    Some slack is in it. Where it falls short (unusual post-processing), opening says so with the exact numbers.
    """
    states = runtime.max_states(page_size, max_running) + 1
    return max(_estimate(spec, kv_tokens + page_size, states) for spec in models.values())


def _estimate(spec: ModelSpec, rows: int, states: int) -> int:
    config = _config(spec)
    stored = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    wanted = stored if spec.dtype == "auto" else spec.dtype
    width = _width(wanted)
    weights = sum(file.stat().st_size for file in spec.path.glob("*.safetensors")) * width // _width(stored)
    recurrent = _recurrent_layers(config)
    layers = int(config["num_hidden_layers"]) - recurrent
    if config.get("kv_lora_rank"):
        per_layer = config["kv_lora_rank"] + config["qk_rope_head_dim"]
    else:
        heads = config["num_attention_heads"]
        head_dim = config.get("head_dim") or config["hidden_size"] // heads
        per_layer = 2 * config.get("num_key_value_heads", heads) * head_dim
    state = recurrent and _state_bytes(config)
    return int(weights * 1.05 + rows * layers * per_layer * width + states * recurrent * state) + _SLACK


def _recurrent_layers(config: dict[str, Any]) -> int:
    return sum(kind == "linear_attention" for kind in config.get("layer_types") or ())


def _state_bytes(config: dict[str, Any]) -> int:
    """Of one layer's recurrent state, with both of its parts in float32."""
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    values = config["linear_num_value_heads"] * config["linear_value_head_dim"]
    convolution = (2 * keys + values) * (config["linear_conv_kernel_dim"] - 1)
    return int(4 * (convolution + values * config["linear_key_head_dim"]))


def _context_length(spec: ModelSpec) -> int | None:
    """SGLang's context_length, with what it holds back added: see `SGLANG_RESERVE`."""
    if spec.context_tokens is None:
        return None
    longest = int(_config(spec).get("max_position_embeddings", spec.context_tokens))
    return min(spec.context_tokens + SGLANG_RESERVE, max(longest, spec.context_tokens))


def _config(spec: ModelSpec) -> dict[str, Any]:
    try:
        loaded: dict[str, Any] = json.loads((spec.path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise EngineError(f"{spec.path}: no readable config.json: {e}") from e
    return loaded


def _width(dtype: str) -> int:
    return int(getattr(torch, dtype).itemsize)
