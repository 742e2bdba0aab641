"""Switches on real SGLang: five phases per path class, bytes moved against this machine's own copy, staging's gain.

    python -m bench.switch [--quick] [--runs N] [--device cpu] [--h2d-gbps 1.0]

Two models of about 0.22 GB take turns in one device buffer. Per run and direction: a switch from host, one with about
half of the weights staged, one with all of them staged, and plain copies of as many bytes, in turn. On a CPU host and
device are the same memory, so that staging gains nothing there; a second engine copies from host at an emulated
bandwidth, as a server's link would. Figures from it are called emulated.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

from bench.report import Figure, figure, machine, write

MODELS = {"tiny-qwen3-random": "tiny-qwen3", "tiny-mla-random": "tiny-mla"}
KV_TOKENS = 40_960
"""Idle KV of the smaller kind of row is as large as a model, so that all of it can be staged."""
PHASES = ("teardown", "weights", "kv_shell", "runtime", "publish")
MIB = 1 << 20


def prepared() -> dict[str, Path]:
    """The models' directories."""
    from talaria_common.settings import ModelSettings
    from talaria_gpu.models import prepare

    return {name: prepare(name, ModelSettings(source=source)) for name, source in MODELS.items()}


def build(device: str, paths: dict[str, Path], h2d_bytes_per_s: float | None) -> Any:
    """An engine with staging. SGLang warns of what a CPU lacks."""
    from talaria_gpu.engine.sglang import ModelSpec, environment
    from talaria_gpu.engine.sglang.spec import MemoryOptions

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        environment.prepare(device)
        from talaria_gpu.engine.sglang.engine import SglangEngine

        return SglangEngine(
            {name: ModelSpec(path=path, dtype="float32", context_tokens=512) for name, path in paths.items()},
            device=device,
            kv_tokens=KV_TOKENS,
            page_size=16,
            max_running=4,
            chunked_prefill_tokens=512,
            buffer_bytes=None,
            threads=None,
            seed=0,
            memory=MemoryOptions(staging=True, h2d_bytes_per_s=h2d_bytes_per_s),
        )


class Copies:
    """Plain copies of the machine, within the device and from host."""

    def __init__(self, device: str, size: int) -> None:
        import torch

        self._torch = torch
        self._cuda = device.startswith("cuda")
        self._host = torch.zeros(size, dtype=torch.uint8, pin_memory=self._cuda)
        self._from = torch.zeros(size, dtype=torch.uint8, device=device)
        self._to = torch.zeros(size, dtype=torch.uint8, device=device)

    def bytes_per_s(self, source: str) -> float:
        """Of one copy of the whole size, from "host" or "device"."""
        held = self._host if source == "host" else self._from
        started = time.perf_counter()
        if self._cuda:
            self._to.copy_(held, non_blocking=True)
            self._torch.cuda.synchronize()
        else:
            ctypes.memmove(self._to.data_ptr(), held.data_ptr(), held.numel())
        return float(held.numel() / (time.perf_counter() - started))


def stage(engine: Any, model: str, share: float) -> None:
    """Stage about `share` of the model's weights, and no more."""
    from talaria_gpu.staging.chunks import State

    if not share:
        return
    engine.stage(model)
    stager = engine.stager
    wanted: float = share * engine.models()[model].weight_bytes
    while share < 1 and stager.bytes_in(State.CLEAN) < wanted:
        time.sleep(0.0005)
    if share < 1:
        stager.stop()
    stager.join()


def measure(engine: Any, copies: Copies | None, runs: int) -> dict[str, list[float]]:
    """Values per run; with `copies`, ratios to the machine's own bandwidths, too."""
    values: dict[str, list[float]] = {}
    first, second = engine.models()
    engine.switch(first)
    for number in range(-1, runs):  # the first one warms up
        totals: dict[str, list[float]] = {}
        for share in (0.0, 0.5, 1.0):
            for target in (second, first):
                stage(engine, target, share)
                timing = engine.switch(target)
                totals.setdefault(timing.path, []).append(timing.total_ms)
                if number < 0:
                    continue
                for name, ms in zip(PHASES, timing.phases_ms, strict=True):
                    values.setdefault(f"{timing.path}_{name}_ms", []).append(ms)
                if copies is not None and timing.path != "partial":
                    own = copies.bytes_per_s("device" if timing.path == "d2d" else "host")
                    moved = timing.weight_bytes / timing.phases_ms[1] * 1e3
                    values.setdefault(f"{timing.path}_over_copy_bandwidth", []).append(moved / own)
                    values.setdefault(f"{timing.path}_gb_per_s", []).append(moved / 1e9)
        if number >= 0:
            host = statistics.median(totals["h2d"])
            for path in ("partial", "d2d"):
                if path in totals:
                    values.setdefault(f"h2d_over_{path}_switch", []).append(host / statistics.median(totals[path]))
    return values


def unit(name: str) -> str:
    """Of a figure, from its name."""
    return "ms" if name.endswith("_ms") else "GB/s" if name.endswith("_gb_per_s") else "x"


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer runs")
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--h2d-gbps", type=float, default=1.0, help="emulated bandwidth from host, 10^9 bytes/s")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    runs = min(args.runs, 3) if args.quick else args.runs
    where, paths = machine(), prepared()
    engine = build(args.device, paths, None)
    copies = Copies(args.device, max(info.weight_bytes for info in engine.models().values()))
    values = measure(engine, copies, runs)
    engine.close()
    if args.device == "cpu":
        engine = build(args.device, paths, args.h2d_gbps * 1e9)
        values |= {f"emulated_{name}": found for name, found in measure(engine, None, min(runs, 3)).items()}
        engine.close()
    figures: dict[str, Figure] = {name: figure(found, unit(name)) for name, found in values.items()}
    for name, value in sorted(figures.items()):
        print(f"switch: {name:44} {value['median']:>10} {value['unit']}")
    print(f"switch: {write('switch', runs, figures, args.out, where=where)}")


if __name__ == "__main__":
    main()
