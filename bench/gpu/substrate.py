"""The substrate's copies on one GPU at real sizes, with torch alone: no SGLang, no model files.

    python -m bench.gpu.substrate [--weights-gib 40] [--kv-gib 60] [--budget-s 330] [--out FILE]

One uint8 buffer holds two "models" whose weights overlap, and the first one's KV above them, as on a server. The
project's own planner, stager and gather move the second one's weights in, its registry's copies move KV; everything is
verified bit by bit.

    switch_d2d, switch_partial, switch_h2d   all weights staged in the KV tails; half of them, some dirty; none
    …_over_limit                             bytes per second over the device's or the link's own, measured here
    {restore,save}_over_link_limit           KV blocks from pinned host memory to scattered rows, and back
    graph_replays_equal                      a CUDA graph captured over the first model's addresses, replayed after
                                             every switch: its result must be that of the capture; 1 if all were.
                                             All but the weights is NaN after each switch, and a NaN equals nothing

Stops in good time before `--budget-s`: what was not reached is left out and said. Exits with 2 without CUDA.
`--device cpu` with small sizes walks through the same code, without a graph, to see that it runs; its figures say
nothing.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.report import Figure, figure, machine, write

GIB = 1 << 30
CHUNK = 32 << 20
LAYERS = 48
"""KV tensors: K and V of 24 layers."""
PAGE_ROWS = 16
ROW = 2048
"""Bytes of one row of one KV tensor: 8 heads x 128 x bf16."""


class Deadline:
    """Says whether there is time for something that takes `seconds`."""

    def __init__(self, budget_s: float) -> None:
        self._end = time.monotonic() + budget_s
        self.skipped: list[str] = []

    def allows(self, what: str, seconds: float) -> bool:
        """Whether to begin `what`; a refusal is remembered."""
        if time.monotonic() + seconds <= self._end:
            return True
        self.skipped.append(what)
        return False


class Rig:
    """The buffer, two images on the host, and the first model's KV.

    Args:
        weights: bytes of each model's weights; the second one's are an eighth less.
        kv: bytes of the first model's KV.
        device: "cuda", or "cpu" for a walk through the code.
        chunk: bytes of a staged chunk.
    """

    def __init__(self, weights: int, kv: int, device: str, chunk: int) -> None:
        import torch

        from talaria_gpu.staging.plan import Segment
        from talaria_gpu.streams import open_stream
        from talaria_gpu.weights import memory

        self.torch = torch
        self.device = torch.device(device)
        self.cuda, self.chunk = self.device.type == "cuda", chunk
        page = PAGE_ROWS * ROW
        self.pages = kv // (LAYERS * page)
        self.weights = [weights, weights - weights // 8 // chunk * chunk]
        size = weights + LAYERS * self.pages * page
        self.buffer = torch.zeros(size, dtype=torch.uint8, device=self.device)
        self.segments = [Segment(weights + i * self.pages * page, page) for i in range(LAYERS)]
        self.images = [memory.allocate(n, pin=self.cuda) for n in self.weights]
        for seed, image in enumerate(self.images):
            self._fill(image, seed)
        self.bounce = torch.empty(chunk, dtype=torch.uint8, device=self.device)
        self.d2d, self.h2d = open_stream(self.device, "d2d"), open_stream(self.device, "h2d")

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.cuda:
            self.torch.cuda.synchronize()

    def _fill(self, image: Any, seed: int) -> None:
        """Random bfloat16 of modest size, made on the device and copied out: none of it is NaN."""
        torch = self.torch
        generator = torch.Generator(self.device).manual_seed(seed)
        for at in range(0, image.numel(), 256 << 20):
            n = min(256 << 20, image.numel() - at)
            piece = torch.randn(n // 2, generator=generator, device=self.device, dtype=torch.bfloat16)
            image[at : at + n].copy_(piece.view(torch.uint8))

    def poison(self, start: int) -> None:
        """NaN from `start` on."""
        self.buffer[start:].fill_(0xFF)

    def plan(self, share: float) -> Any:
        """Where the second model is staged, with as many free pages as hold `share` of it."""
        from talaria_gpu.staging.plan import stage_plan

        page_bytes = LAYERS * PAGE_ROWS * ROW
        wanted = min(self.pages - 1, int(share * self.weights[1]) // page_bytes + (share >= 1))
        free = range(self.pages - wanted, self.pages)
        return stage_plan(self.weights[1], self.segments, free, (0, 0), chunk_bytes=self.chunk)

    def stage(self, plan: Any) -> tuple[Any, float]:
        """Stage it; returns the stager, and bytes per second."""
        from talaria_gpu.staging.stager import Stager
        from talaria_gpu.streams import computed

        ready = computed(self.device)
        stager = Stager("b", plan, self.h2d, buffer=self.buffer, image=self.images[1], ready=ready)
        started = time.perf_counter()
        stager.start()
        stager.join()
        took = time.perf_counter() - started
        if stager.error:
            raise RuntimeError(stager.error)
        return stager, plan.covered_bytes / took

    def open(self, model: int, plan: Any) -> tuple[float, Any]:
        """Bring a model's weights in; seconds, and the gather's times."""
        from talaria_gpu.staging.gather import gather

        self.synchronize()
        started = time.perf_counter()
        image = self.images[model]
        times = gather(plan, buffer=self.buffer, image=image, bounce=self.bounce, d2d=self.d2d, h2d=self.h2d)
        return time.perf_counter() - started, times

    def open_from_host(self, model: int) -> float:
        """A switch without staging; seconds."""
        from talaria_gpu.staging.plan import StagePlan, switch_plan

        plan = switch_plan(StagePlan(self.weights[model], (), ()), (), (), chunk_bytes=self.chunk)
        return self.open(model, plan)[0]

    def check(self, model: int) -> None:
        """The weights are the image, bit by bit. Raises RuntimeError."""
        image = self.images[model]
        for at in range(0, image.numel(), 512 << 20):
            held = self.buffer[at : at + (512 << 20)][: image.numel() - at]
            wanted = image[at : at + held.numel()].to(self.device, non_blocking=True)
            if not self.torch.equal(held, wanted):
                raise RuntimeError(f"model {model}: the weights differ from the image near byte {at}")

    def close(self) -> None:
        """Unlock the host's memory."""
        from talaria_gpu.weights import memory

        self.synchronize()
        self.d2d.close()
        self.h2d.close()
        for image in self.images:
            memory.release(image, pin=self.cuda)


class Graph:
    """A CUDA graph over the first model's weights and KV, at fixed addresses: y = x W + the rows of page 1."""

    def __init__(self, rig: Rig) -> None:
        torch = rig.torch
        self._torch = torch
        side = 4096
        bf16 = rig.buffer[: side * side * 2].view(torch.bfloat16).view(side, side)
        first = rig.segments[0]
        rows = rig.buffer[first.base + first.page_bytes : first.base + 2 * first.page_bytes].view(torch.bfloat16)
        self._x = torch.ones(8, side, dtype=torch.bfloat16, device=rig.device)
        self._rows = rows
        rows.fill_(1.0)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            self._x @ bf16
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._y = self._x @ bf16 + rows.float().mean().to(torch.bfloat16)
        self.wanted = self.replay()

    def replay(self) -> Any:
        """The result now."""
        self._rows.fill_(1.0)
        self._graph.replay()
        self._torch.cuda.synchronize()
        return self._y.clone()


def limits(rig: Rig, runs: int) -> dict[str, list[float]]:
    """The device's copy bandwidth (bytes copied per second) and the link's, of large plain copies."""
    size = min(4 * GIB, rig.weights[1] // 2)

    def timed(target: Any, source: Any) -> float:
        rig.synchronize()
        started = time.perf_counter()
        target.copy_(source, non_blocking=True)
        rig.synchronize()
        return float(size / (time.perf_counter() - started))

    low, high, host = rig.buffer[:size], rig.buffer[size : 2 * size], rig.images[0][:size]
    timed(high, low)
    return {
        "d2d_limit": [timed(high, low) for _ in range(runs)],
        "link_limit": [timed(low, host) for _ in range(runs)],
    }


def kv_moves(rig: Rig, runs: int) -> dict[str, list[float]]:
    """Blocks from pinned memory to scattered rows of all layers and back, by the registry's copies; bytes per s."""
    from talaria_gpu.hkvr.descriptor import KvDescriptor
    from talaria_gpu.hkvr.slabs import Cell
    from talaria_gpu.hkvr.transfer import DeviceKv, Piece, device_to_host, host_to_device

    torch = rig.torch
    spec = KvDescriptor(
        model="a",
        identity=b"a" * 16,
        family="mha",
        dtype="bfloat16",
        page_tokens=PAGE_ROWS,
        block_tokens=PAGE_ROWS,
        row_bytes=(ROW,) * LAYERS,
    )
    rows_of = [rig.buffer[base : base + rig.pages * n].view(-1, ROW) for base, n in rig.segments]
    kv = DeviceKv(spec, tuple(rows_of))
    blocks = min(4096, rig.pages - 2, rig.weights[0] // spec.block_bytes)
    pool, size = rig.images[0], blocks * spec.block_bytes
    pages = torch.randperm(rig.pages - 1)[:blocks] + 1
    rows = (pages[:, None] * PAGE_ROWS + torch.arange(PAGE_ROWS)).unbind()
    pieces = [Piece(Cell(n * spec.block_bytes, spec.block_bytes), rows[n]) for n in range(blocks)]
    before = pool[:size].clone()
    found: dict[str, list[float]] = {"restore_bytes_per_s": [], "save_bytes_per_s": []}
    for _ in range(runs):
        for name, move in (("restore", host_to_device), ("save", device_to_host)):
            if name == "save":
                pool[:size].zero_()
            rig.synchronize()
            started = time.perf_counter()
            move(kv, pool, pieces)
            rig.synchronize()
            found[f"{name}_bytes_per_s"].append(size / (time.perf_counter() - started))
        if not torch.equal(pool[:size], before):
            raise RuntimeError("blocks that were restored to rows and saved from them are not what they were")
    return found


def spoil(rig: Rig, stager: Any) -> None:
    """Calls take the lowest eighth of the lent pages back and write NaN there."""
    pages = stager.chunks.plan.pages
    if not pages:
        return
    until = pages[len(pages) // 8] + 1
    stager.reclaim(until)
    for base, page_bytes in rig.segments:
        rig.buffer[base + pages[0] * page_bytes : base + until * page_bytes].fill_(0xFF)


def switches(rig: Rig, runs: int, deadline: Deadline) -> dict[str, list[float]]:
    """Every path class there and back, the graph replayed after each way back."""
    values: dict[str, list[float]] = {"graph_replays_equal": []} if rig.cuda else {}
    rig.open_from_host(0)
    rig.poison(rig.weights[0])
    graph = Graph(rig) if rig.cuda else None
    round_s = 0.0
    for number in range(runs):
        if number and not deadline.allows(f"round {number} of the switches", round_s):
            break
        started = time.monotonic()
        for path, share in (("h2d", 0.0), ("partial", 0.5), ("d2d", 1.0)):
            plan = rig.plan(share)
            stager, rate = rig.stage(plan)
            if path == "partial":
                spoil(rig, stager)
            if share:
                values.setdefault("staging_bytes_per_s", []).append(rate)
            todo = stager.switch_plan(rig.chunk)
            if todo.path != path:
                raise RuntimeError(f"{todo.path} instead of {path}: {todo.d2d_bytes} B staged; more KV is needed")
            if todo.d2d_bytes + todo.h2d_bytes != rig.weights[1]:
                raise RuntimeError("the bytes of a switch do not add up to the weights")
            took, times = rig.open(1, todo)
            rig.check(1)
            rig.poison(rig.weights[1])
            values.setdefault(f"switch_{path}_ms", []).append(took * 1e3)
            if path == "partial":
                values.setdefault("partial_d2d_ms", []).append(times.d2d_ms)
                values.setdefault("partial_h2d_ms", []).append(times.h2d_ms)
            else:
                values.setdefault(f"{path}_bytes_per_s", []).append(rig.weights[1] / took)
            rig.open_from_host(0)
            rig.check(0)
            rig.poison(rig.weights[0])
            if graph is not None:
                same = bool(rig.torch.equal(graph.replay(), graph.wanted))
                values["graph_replays_equal"].append(float(same))
        round_s = time.monotonic() - started
    return values


def fit(weights: float, kv: float, free: float, chunk: int) -> tuple[int, int]:
    """Bytes of weights and KV that the device holds beside 3 GiB of slack, in the proportion asked for."""
    wanted = (weights + kv) * GIB
    scale = min(1.0, (free - 3 * GIB) / wanted)
    return int(weights * scale * GIB) // chunk * chunk, int(kv * scale * GIB)


def summary(values: dict[str, list[float]]) -> dict[str, Figure]:
    """The figures."""
    median: Callable[[str], float] = lambda name: sorted(values[name])[len(values[name]) // 2]  # noqa: E731 - short
    ratios = {
        "gather_over_limit": ("d2d_bytes_per_s", "d2d_limit"),
        "h2d_over_link_limit": ("h2d_bytes_per_s", "link_limit"),
        "staging_over_link_limit": ("staging_bytes_per_s", "link_limit"),
        "restore_over_link_limit": ("restore_bytes_per_s", "link_limit"),
        "save_over_link_limit": ("save_bytes_per_s", "link_limit"),
    }
    figures = {
        name: figure([v / median(limit) for v in values[what]], "x")
        for name, (what, limit) in ratios.items()
        if what in values and limit in values
    }
    for name, found in values.items():
        if name.endswith("_ms"):
            figures[name] = figure(found, "ms")
        elif name == "graph_replays_equal":
            figures[name] = figure([min(found)], "all")
        else:
            figures[f"{name.removesuffix('_bytes_per_s')}_gb_per_s"] = figure([v / 1e9 for v in found], "GB/s")
    return figures


def main() -> int:
    """Measure and write; 2 without CUDA."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights-gib", type=float, default=40.0)
    parser.add_argument("--kv-gib", type=float, default=60.0)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--budget-s", type=float, default=330.0)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--chunk-kib", type=int, default=CHUNK >> 10)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    deadline = Deadline(args.budget_s)
    import torch

    cuda = args.device == "cuda"
    if cuda and not torch.cuda.is_available():
        print("substrate: no CUDA device here; nothing was measured")
        return 2
    where = (
        f"{torch.cuda.get_device_name() if cuda else 'a walk through on CPU'}, torch {torch.__version__}; {machine()}"
    )
    free = torch.cuda.mem_get_info()[0] if cuda else float("inf")
    weights, kv = fit(args.weights_gib, args.kv_gib, free, args.chunk_kib << 10)
    print(f"substrate: {weights / GIB:.1f} GiB of weights, {kv / GIB:.1f} GiB of KV", flush=True)
    rig = Rig(weights, kv, args.device, args.chunk_kib << 10)
    values = limits(rig, args.runs)
    values |= switches(rig, args.runs, deadline)
    if deadline.allows("restore", 20):
        values |= kv_moves(rig, args.runs)
    rig.close()
    figures = summary(values)
    for name, value in sorted(figures.items()):
        print(f"substrate: {name:32} {value['median']:>10} {value['unit']}")
    for what in deadline.skipped:
        print(f"substrate: no time for {what}")
    print(f"substrate: {write('gpu-substrate', args.runs, figures, args.out, where=where)}")
    return 0 if min(values.get("graph_replays_equal", [1.0])) else 1


if __name__ == "__main__":
    sys.exit(main())
