"""A hot instance's engine beside plain SGLang: tokens per second of the same calls on the same model.

    python -m bench.engine [--quick] [--runs N] [--device cpu] [--model-path DIR]

hot: `SlotDriver` over `SglangEngine`, as the engine process of a hot instance runs it. plain: SGLang's own `Scheduler`
with the body of its own loop, its own memory and no code of ours but the cut of its sockets. A process each, run in
turn; the tokens of both are compared.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bench.report import ROOT, Figure, figure, machine, write

MODEL = "smollm2-135m-instruct"
CALLS, PROMPT_TOKENS, NEW_TOKENS = 8, 128, 32
QUICK_NEW_TOKENS = 12
BUDGET_S = 120.0
KV_TOKENS = 4096
PAGE = 16
CHUNK = 1024


def prompts(round_number: int) -> list[list[int]]:
    """Prompts of one round: new in every round, so that no prefix is cached."""
    pick = random.Random(round_number)
    return [[pick.randrange(100, 40_000) for _ in range(PROMPT_TOKENS)] for _ in range(CALLS)]


# --- the two sides, each in its own process


def serve(side: str, path: Path, device: str, new_tokens: int) -> None:
    """Read round numbers from stdin; answer each with the seconds it took and its tokens."""
    from bench.plain import hot, scheduler

    generate = (hot if side == "hot" else scheduler).prepare(
        path, device, kv_tokens=KV_TOKENS, page_size=PAGE, max_running=CALLS, chunk=CHUNK
    )
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        asked = prompts(int(line))
        began, cpu = time.perf_counter(), time.process_time()
        tokens = generate(asked, new_tokens)
        took = {"seconds": time.perf_counter() - began, "cpu_s": time.process_time() - cpu}
        print(json.dumps(took | {"tokens": tokens}), flush=True)


class Side:
    """One side's process."""

    def __init__(self, side: str, path: Path, device: str, new_tokens: int) -> None:
        command = [sys.executable, "-m", "bench.engine", "--side", side, "--model-path", str(path)]
        self._process = subprocess.Popen(
            [*command, "--device", device, "--new-tokens", str(new_tokens)],
            cwd=ROOT,
            env=os.environ | {"PYTHONWARNINGS": "ignore", "TQDM_DISABLE": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.name = side

    def answer(self) -> Any:
        """The next JSON line; what libraries print in between is skipped. Raises RuntimeError when it has ended."""
        if self._process.stdout is None:
            raise RuntimeError("no pipe")
        for line in self._process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise RuntimeError(f"the {self.name} side ended with {self._process.wait()}")

    def run(self, round_number: int) -> Any:
        """One round."""
        if self._process.stdin is None:
            raise RuntimeError("no pipe")
        print(round_number, file=self._process.stdin, flush=True)
        return self.answer()

    def close(self) -> None:
        """End it."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


def default_model() -> Path:
    """SmolLM2, prepared if it is not in the cache yet."""
    from talaria_common.settings import ModelSettings
    from talaria_gpu.models import prepare

    return prepare(MODEL, ModelSettings(source="smollm2"), progress=lambda text: print(f"bench: {text}", flush=True))


class Rounds:
    """What came of the rounds, per side."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {"hot": [], "plain": []}
        self.cpu_s: dict[str, list[float]] = {"hot": [], "plain": []}
        self.different = 0
        """Calls whose tokens differ between the sides."""

    def run(self, sides: list[Side], runs: int) -> None:
        """A round that warms both up, then `runs` that count, or fewer when time is over. Raises as `Side.run`."""
        began = time.monotonic()
        for number in range(-1, runs):
            if len(self.seconds["hot"]) >= 2 and time.monotonic() - began > BUDGET_S:
                print("bench: time is over", flush=True)
                return
            answers = {side.name: side.run(number) for side in (sides if number % 2 else sides[::-1])}
            self.different += sum(
                a != b for a, b in zip(answers["hot"]["tokens"], answers["plain"]["tokens"], strict=True)
            )
            if number < 0:
                continue
            for name, answer in answers.items():
                self.seconds[name].append(answer["seconds"])
                self.cpu_s[name].append(answer["cpu_s"])
            print(f"  {number + 1} " + "  ".join(f"{n} {s[-1]:.3f} s" for n, s in self.seconds.items()), flush=True)

    def figures(self, tokens: int) -> dict[str, Figure]:
        """The figures, when a round makes `tokens`."""
        hot, plain = self.seconds["hot"], self.seconds["plain"]
        cpu = zip(self.cpu_s["hot"], self.cpu_s["plain"], strict=True)
        return {
            "hot_over_plain_sglang": figure([p / h for h, p in zip(hot, plain, strict=True)], "x"),
            "hot_tokens_per_s": figure([tokens / s for s in hot], "tokens/s"),
            "plain_sglang_tokens_per_s": figure([tokens / s for s in plain], "tokens/s"),
            "cpu_hot_over_plain_sglang": figure([h / p for h, p in cpu], "x"),
            "calls_with_other_tokens": figure([float(self.different)], "calls"),
        }


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.engine", description="A hot instance's engine beside plain SGLang.")
    parser.add_argument("--runs", type=int, default=0, help="rounds (default 6, with --quick 3)")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model-path", type=Path, default=None)
    parser.add_argument("--out", type=Path, default=None, help="default bench/results/engine.json")
    parser.add_argument("--side", choices=("hot", "plain"), help=argparse.SUPPRESS)
    parser.add_argument("--new-tokens", type=int, default=0, help="tokens per call")
    args = parser.parse_args()
    new_tokens = args.new_tokens or (QUICK_NEW_TOKENS if args.quick else NEW_TOKENS)
    path = args.model_path or default_model()
    if args.side:
        serve(args.side, path, args.device, new_tokens)
        return 0
    where, rounds = machine(), Rounds()
    sides: list[Side] = []
    try:
        for name in ("hot", "plain"):
            sides.append(Side(name, path, args.device, new_tokens))
            sides[-1].answer()
        rounds.run(sides, args.runs or (3 if args.quick else 6))
    except RuntimeError as e:
        print(f"bench: {e}", flush=True)
        return 1
    finally:
        for side in sides:
            side.close()
    figures = rounds.figures(CALLS * new_tokens)
    out = write("engine", len(rounds.seconds["hot"]), figures, args.out, where=where)
    ratio = figures["hot_over_plain_sglang"]
    print(f"hot_over_plain_sglang = {ratio['median']:g} x ({ratio['min']:g}..{ratio['max']:g})")
    print(f"bench: {len(figures)} figures in {out}")
    if rounds.different:
        print(f"bench: {rounds.different} calls have other tokens on one side than on the other")
    return 0


if __name__ == "__main__":
    sys.exit(main())
