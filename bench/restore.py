"""Prefixes from the host: restore beside recomputation, bytes moved beside the machine's own copies, the books' cost.

    python -m bench.restore [--quick] [--runs N] [--device cpu] [--model-path DIR]

recompute: a call's first token when its prefix is nowhere. restore: the same when a switch took it off the device. Both
on real SGLang. Bandwidth: `HostKv` moving the KV of the same geometry, beside one plain copy of as many bytes.
"""

from __future__ import annotations

import argparse
import random
import time
import warnings
from pathlib import Path
from typing import Any

from bench.report import Figure, figure, machine, write

MODEL, OTHER = "smollm2-135m-instruct", "tiny-mla-random"
LENGTHS = {"512": 513, "2k": 2033, "8k": 8161}
"""Prompt tokens: whole blocks and the one token that is never cached."""
QUICK = ("512", "2k")
MOVED_TOKENS, QUICK_MOVED_TOKENS = 8192, 2048
BLOCK = 16
BOOKS = (10_000, 160_000)
CHAINS = 400
MIB = 1 << 20


BEST_OF = 5
"""Of one move within a run: a shared machine takes the processor away now and then."""


def timed(run: Any) -> float:
    """Seconds."""
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


# --- bytes


def bandwidths(device: str, tokens: int, runs: int) -> dict[str, Figure]:
    """Moves of `tokens` of SmolLM2's KV: MB/s of each kind, and over that of a plain copy of as many bytes."""
    import torch

    from talaria_gpu.hkvr.descriptor import KvDescriptor
    from talaria_gpu.hkvr.keys import block_keys
    from talaria_gpu.hkvr.states import Found
    from talaria_gpu.hkvr.store import HostKv
    from talaria_gpu.hkvr.transfer import DeviceKv
    from talaria_gpu.streams import CopyThread

    where = torch.device(device)
    widths = (3 * 64 * 4,) * 60  # 30 layers of K and V, 3 heads of 64, float32
    spec = KvDescriptor(
        model="m",
        identity=b"m" * 16,
        family="mha",
        dtype="float32",
        page_tokens=BLOCK,
        block_tokens=BLOCK,
        row_bytes=widths,
    )
    device_buffer = torch.ones(
        2 * tokens * sum(widths), dtype=torch.uint8, device=where
    )  # as the engine's: layer by layer
    segments = tuple(device_buffer.view(len(widths), 2 * tokens, widths[0]))
    kv, size = DeviceKv(spec, segments), tokens * spec.bytes_per_token
    host = torch.ones(size, dtype=torch.uint8, pin_memory=where.type == "cuda")
    there = torch.ones(size, dtype=torch.uint8, device=where)
    keys = block_keys(spec.identity, "", range(tokens), BLOCK)
    contiguous = torch.arange(tokens)
    scattered = torch.arange(tokens).view(-1, BLOCK).mul(2).sub(torch.arange(BLOCK)).add(BLOCK).flatten()

    stream = CopyThread("plain", where)

    def plain() -> None:
        stream.submit(lambda: there.copy_(host), size).wait()

    plain()
    rates: dict[str, list[float]] = {}
    ratios: dict[str, list[float]] = {}
    for _ in range(runs):
        own = size / min(timed(plain) for _ in range(BEST_OF)) / 1e6
        rates.setdefault("copy", []).append(own)
        for verify in (False, True):
            store = HostKv(size + 64 * MIB, where, verify=verify)
            name = "verified_" if verify else ""

            def save(store: Any = store) -> None:
                store.save(kv, keys, contiguous, lambda: None)
                store.drain()

            def restore(rows: Any, store: Any = store) -> None:
                found = Found(tokens, tuple(store.registry.match(keys)))
                got = store.restored(store.restore(kv, found, rows, 0))
                if got != tokens:
                    raise RuntimeError(f"{got} of {tokens} tokens came back")

            save()
            saves = []
            for _ in range(BEST_OF):  # the pool's pages have been touched now
                store.registry.drop_model(spec.identity)
                saves.append(timed(save))
            moved = {"save": min(saves)}
            moved["restore"] = min(timed(lambda: restore(contiguous)) for _ in range(BEST_OF))
            moved["scattered_restore"] = min(timed(lambda: restore(scattered)) for _ in range(BEST_OF))
            for what, seconds in moved.items():
                rates.setdefault(name + what, []).append(size / seconds / 1e6)
                ratios.setdefault(name + what, []).append(size / seconds / 1e6 / own)
            store.close()
    figures = {f"{what}_mb_per_s": figure(values, "MB/s") for what, values in rates.items()}
    figures |= {f"{what}_over_copy_bandwidth": figure(values, "x") for what, values in ratios.items()}
    figures["checkpoint_us_per_token"] = figure([spec.bytes_per_token / rate for rate in rates["verified_save"]], "us")
    return figures


# --- books


def books(runs: int) -> dict[str, Figure]:
    """A block reserved, committed, matched and evicted in a full registry, µs of processor time; by registry size."""
    from talaria_gpu.hkvr.descriptor import KvDescriptor
    from talaria_gpu.hkvr.registry import Registry
    from talaria_gpu.hkvr.slabs import SlabPool

    spec = KvDescriptor(
        model="m", identity=b"m" * 16, family="mla", dtype="f", page_tokens=1, block_tokens=1, row_bytes=(1,)
    )
    took: dict[int, list[float]] = {size: [] for size in BOOKS}
    for run in range(runs):
        for size in BOOKS:
            registry = Registry(SlabPool(size, 8), lambda _: None)
            serial = 0

            def one(registry: Any = registry, size: int = size, run: int = run) -> None:
                nonlocal serial
                parent = None
                for _ in range(16):
                    serial += 1
                    parent = registry.reserve(spec, serial.to_bytes(16, "little"), parent)
                    registry.commit(parent, 0)
                pick = random.Random(serial + run).randrange(max(1, serial - size), serial + 1)
                registry.touch(registry.match([pick.to_bytes(16, "little")]))

            while serial < size:
                one()
            began = time.process_time()
            for _ in range(CHAINS):
                one()
            took[size].append((time.process_time() - began) / CHAINS / 16 * 1e6)
    small, large = (took[size] for size in BOOKS)
    return {
        "registry_block_us_10k": figure(small, "us"),
        "registry_block_us_160k": figure(large, "us"),
        "registry_block_160k_over_10k": figure([b / a for a, b in zip(small, large, strict=True)], "x"),
        "registry_blocks_per_s": figure([1e6 / value for value in large], "1/s"),
    }


# --- the engine


def first_tokens(paths: dict[str, Path], device: str, lengths: dict[str, int], runs: int) -> dict[str, Figure]:
    """Time to the first token, recomputed and restored, by prefix length."""
    from talaria_gpu.engine.sglang import ModelSpec, environment

    warnings.simplefilter("ignore")
    environment.prepare(device)
    from talaria_gpu.engine.contract import EngineCall, Sampling
    from talaria_gpu.engine.sglang.engine import SglangEngine
    from talaria_gpu.engine.sglang.spec import HostKvOptions

    longest = max(lengths.values())
    engine = SglangEngine(
        {name: ModelSpec(path=path, dtype="float32") for name, path in paths.items()},
        device=device,
        kv_tokens=(longest + 256) // BLOCK * BLOCK,
        page_size=BLOCK,
        max_running=2,
        chunked_prefill_tokens=1024,
        buffer_bytes=None,
        threads=None,
        seed=0,
        host_kv=HostKvOptions(capacity_bytes=1024 * MIB),
    )
    serial = 0

    def ask(ids: list[int]) -> tuple[float, Any]:
        nonlocal serial
        serial += 1
        call = EngineCall(
            rid=f"{serial:026d}",
            model=MODEL,
            input_ids=ids,
            sampling=Sampling(max_new_tokens=1, temperature=0.0, ignore_eos=True),
        )
        engine.submit(call)
        began = time.perf_counter()
        while True:
            for tokens in engine.step(None).tokens:
                if tokens.finished:
                    return time.perf_counter() - began, tokens

    figures: dict[str, Figure] = {}
    try:
        engine.switch(MODEL)
        ask([random.Random(0).randrange(100, 40_000) for _ in range(64)])
        for name, length in lengths.items():
            recompute, restore, per_token = [], [], []
            for run in range(runs):
                pick = random.Random(f"{name}/{run}")
                ids = [pick.randrange(100, 40_000) for _ in range(length)]
                seconds, first = ask(ids)
                engine.switch(OTHER)
                engine.switch(MODEL)
                again, second = ask(ids)
                if second.cached_tokens != length - 1 or second.cache_source != "host":
                    raise RuntimeError(f"{second.cached_tokens} of {length} tokens came from {second.cache_source}")
                if first.token_ids != second.token_ids:
                    raise RuntimeError("the restored prefix says something else")
                recompute.append(seconds)
                restore.append(again)
                per_token.append(engine.load(MODEL).restore_ms_per_token)
            print(f"restore: {name}: {min(recompute):.2f} s recomputed, {min(restore):.3f} s restored", flush=True)
            figures[f"recompute_ms_{name}"] = figure([s * 1e3 for s in recompute], "ms")
            figures[f"restore_ms_{name}"] = figure([s * 1e3 for s in restore], "ms")
            figures[f"recompute_over_restore_{name}"] = figure(
                [a / b for a, b in zip(recompute, restore, strict=True)], "x"
            )
            figures[f"restore_copy_ms_per_token_{name}"] = figure(per_token, "ms")
    finally:
        engine.close()
    return figures


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="shorter prefixes and smaller moves")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model-path", type=Path, help=f"instead of {MODEL}")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()

    from talaria_common.settings import ModelSettings
    from talaria_gpu.models import prepare

    where = machine()
    figures = bandwidths(args.device, QUICK_MOVED_TOKENS if args.quick else MOVED_TOKENS, args.runs)
    figures |= books(args.runs)
    paths = {
        MODEL: args.model_path or prepare(MODEL, ModelSettings(source="smollm2")),
        OTHER: prepare(OTHER, ModelSettings(source="tiny-mla")),
    }
    lengths = {name: n for name, n in LENGTHS.items() if not args.quick or name in QUICK}
    figures |= first_tokens(paths, args.device, lengths, args.runs)
    for name, value in sorted(figures.items()):
        print(f"restore: {name:44} {value['median']:>10} {value['unit']}")
    print(f"restore: {write('restore', args.runs, figures, args.out, where=where)}")


if __name__ == "__main__":
    main()
