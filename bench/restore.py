"""Prefixes from the host: restore beside recomputation, bytes moved beside the machine's own copies, the books' cost.

    python -m bench.restore [--quick] [--runs N] [--device cpu] [--model-path DIR]

recompute: a call's first token when its prefix is nowhere. restore: the same when a switch took it off the device. Both
on real SGLang. Bandwidth: `HostKv` moving the KV of the same geometry, beside one plain copy of as many bytes.
"""

from __future__ import annotations

import argparse
import gc
import random
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.report import Figure, figure, machine, write

MODEL, OTHER = "smollm2-135m-instruct", "tiny-mla-random"
LENGTHS = {"512": 513, "2k": 2033, "8k": 8161}
"""Prompt tokens: whole blocks and the one token that is never cached."""
QUICK = ("512", "2k")
MOVED_TOKENS, QUICK_MOVED_TOKENS = 8192, 2048
BLOCK = 16
SWEEP = {"90mib": 2048, "180mib": 4096, "360mib": 8192, "720mib": 16384}
"""Tokens of which moves are timed, by their bytes: all beyond a processor's caches, which would flatter the small."""
BOOKS = {"10k": 10_000, "40k": 40_000, "160k": 160_000, "640k": 640_000}
"""Blocks in a registry."""
CHAINS = 400
POOLS = {"10k": 10_000, "100k": 100_000, "1m": 1_000_000}
"""Pages of a KV pool."""
ROUNDS = 50
MIB = 1 << 20


BEST_OF = 5
"""Of one move within a run: a shared machine takes the processor away now and then."""


def timed(run: Any) -> float:
    """Seconds."""
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


# --- bytes


def geometry(device: str, tokens: int) -> tuple[Any, list[bytes]]:
    """Room on the device for twice so many tokens of SmolLM2's KV, layer by layer as the engine's, and their names."""
    import torch

    from talaria_gpu.hkvr.descriptor import KvDescriptor
    from talaria_gpu.hkvr.keys import block_keys
    from talaria_gpu.hkvr.transfer import DeviceKv

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
    buffer = torch.ones(2 * tokens * sum(widths), dtype=torch.uint8, device=torch.device(device))
    segments = tuple(buffer.view(len(widths), 2 * tokens, widths[0]))
    return DeviceKv(spec, segments), block_keys(spec.identity, "", range(tokens), BLOCK)


def torch_rows(tokens: int) -> Any:
    """The first so many."""
    import torch

    return torch.arange(tokens)


def bandwidths(device: str, tokens: int, runs: int) -> dict[str, Figure]:
    """Moves of `tokens` of SmolLM2's KV: MB/s of each kind, and over that of a plain copy of as many bytes."""
    import torch

    from talaria_gpu.hkvr.states import Found
    from talaria_gpu.hkvr.store import HostKv
    from talaria_gpu.streams import CopyThread

    kv, keys = geometry(device, tokens)
    spec, where = kv.descriptor, kv.segments[0].device
    size = tokens * spec.bytes_per_token
    host = torch.ones(size, dtype=torch.uint8, pin_memory=where.type == "cuda")
    there = torch.ones(size, dtype=torch.uint8, device=where)
    contiguous = torch_rows(tokens)
    scattered = contiguous.view(-1, BLOCK).mul(2).sub(torch.arange(BLOCK)).add(BLOCK).flatten()

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


# --- growth


def sweep(device: str, sizes: dict[str, int], runs: int) -> dict[str, Figure]:
    """Saves and restores with checksums, and plain copies, by bytes moved: µs per MiB, largest over smallest.

    1 where the cost is linear; below, where a part of it is the same for every move.
    """
    import torch

    from talaria_gpu.hkvr.states import Found
    from talaria_gpu.hkvr.store import HostKv

    most = max(sizes.values())
    kv, keys = geometry(device, most)
    rows = torch_rows(most)
    took: dict[str, dict[str, list[float]]] = {"copy": {}, "save": {}, "restore": {}}
    host = torch.ones(most * kv.descriptor.bytes_per_token, dtype=torch.uint8)
    there = kv.segments[0].new_ones(len(host))
    store = HostKv(most * kv.descriptor.bytes_per_token + 64 * MIB, kv.segments[0].device)

    def save(tokens: int) -> None:
        store.save(kv, keys[: tokens // BLOCK], rows[:tokens], lambda: None)
        store.drain()

    def restore(tokens: int) -> None:
        blocks = tuple(store.registry.match(keys[: tokens // BLOCK]))
        if store.restored(store.restore(kv, Found(tokens, blocks), rows[:tokens], 0)) != tokens:
            raise RuntimeError("not all came back")

    save(most)  # the pool's pages have been touched now
    for _ in range(runs):
        for name, tokens in sizes.items():
            copies, saves, restores = [], [], []
            size = tokens * kv.descriptor.bytes_per_token
            for _ in range(BEST_OF):
                copies.append(timed(lambda size=size: there[:size].copy_(host[:size])))
                store.registry.drop_model(kv.descriptor.identity)
                saves.append(timed(lambda tokens=tokens: save(tokens)))
                restores.append(timed(lambda tokens=tokens: restore(tokens)))
            for what, times in (("copy", copies), ("save", saves), ("restore", restores)):
                took[what].setdefault(name, []).append(min(times) * 1e6 / size * MIB)
    store.close()
    figures: dict[str, Figure] = {}
    small, *_, large = sizes
    for what, by_size in took.items():
        figures |= {f"{what}_us_per_mib_{name}": figure(values, "us") for name, values in by_size.items()}
        ratios = [b / a for a, b in zip(by_size[small], by_size[large], strict=True)]
        figures[f"{what}_us_per_mib_{large}_over_{small}"] = figure(ratios, "x")
    return figures


@contextmanager
def undisturbed() -> Iterator[None]:
    """Without the cyclic collector, whose own cost grows with all that lives: an engine's is frozen after the start."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def books(runs: int) -> dict[str, Figure]:
    """A block reserved, committed, matched and evicted in a full registry, µs of processor time; by registry size."""
    from talaria_gpu.hkvr.descriptor import KvDescriptor
    from talaria_gpu.hkvr.registry import Registry
    from talaria_gpu.hkvr.slabs import SlabPool

    spec = KvDescriptor(
        model="m", identity=b"m" * 16, family="mla", dtype="f", page_tokens=1, block_tokens=1, row_bytes=(1,)
    )
    took: dict[str, list[float]] = {name: [] for name in BOOKS}
    for run in range(runs):
        for name, size in BOOKS.items():
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

            with undisturbed():
                while serial < size + 16 * CHAINS:
                    one()
                took[name].append(min(processor_us(one, CHAINS) for _ in range(BEST_OF)) / 16)
    small, *_, large = BOOKS
    figures = {f"registry_block_us_{name}": figure(values, "us") for name, values in took.items()}
    ratios = [b / a for a, b in zip(took[small], took[large], strict=True)]
    figures[f"registry_block_{large}_over_{small}"] = figure(ratios, "x")
    figures["registry_blocks_per_s"] = figure([1e6 / value for value in took["160k"]], "1/s")
    return figures


def free_list(runs: int) -> dict[str, Figure]:
    """64 pages allocated and 64 freed in a pool half free in no order, by its pages: µs, and both per second.

    A free list in one tensor, as SGLang's: freeing copies it. `append` is what that alone costs.
    """
    import torch

    from talaria_gpu.staging.low_first import LowFirst

    class Pages:
        def __init__(self, pages: int) -> None:
            self.free_pages, self.page_size = torch.arange(1, pages + 1), 1

    class LowFirstPages(LowFirst, Pages):
        def alloc(self, pages: int) -> Any:
            self._ensure(pages)
            taken, self.free_pages = self.free_pages[:pages], self.free_pages[pages:]
            return taken

        def free(self, pages: Any) -> None:
            self._back(pages)

    torch.set_num_threads(1)  # as one engine's share of a busy machine
    took: dict[str, list[float]] = {}
    for run in range(runs):
        for name, size in POOLS.items():
            allocator = LowFirstPages(size)
            order = torch.randperm(size, generator=torch.Generator().manual_seed(run)) + 1
            allocator.free_pages = torch.sort(order[: size // 2]).values
            held = list(order[size // 2 :].split(64))[: ROUNDS + 1]

            def one(allocator: Any = allocator, held: list[Any] = held) -> None:
                held.append(allocator.alloc(64))
                allocator.free(held.pop(0))

            def append(allocator: Any = allocator) -> None:
                torch.cat((allocator.free_pages, order[:64]))  # noqa: B023 - called at once

            with undisturbed():
                best = min(processor_us(one, ROUNDS) for _ in range(BEST_OF))
                took.setdefault(f"allocator_us_{name}", []).append(best)
                alone = min(processor_us(append, ROUNDS) for _ in range(BEST_OF))
                took.setdefault(f"allocator_append_us_{name}", []).append(alone)
    figures = {what: figure(values, "us") for what, values in took.items()}
    for name in POOLS:
        figures[f"allocator_per_s_{name}"] = figure([1e6 / value for value in took[f"allocator_us_{name}"]], "1/s")
    return figures


def processor_us(run: Callable[[], None], times: int) -> float:
    """Of each of so many runs."""
    began = time.process_time()
    for _ in range(times):
        run()
    return (time.process_time() - began) / times * 1e6


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
    figures |= sweep(args.device, SWEEP, args.runs)
    figures |= books(args.runs)
    figures |= free_list(args.runs)
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
