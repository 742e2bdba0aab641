"""What one routing decision costs: the core's real step with lease, overlay and events, as the shell runs it.

    python -m bench.router [--quick] [--runs N]

The core alone (`decision_`, `lease_`) and the router's process over the bus (`router_bus.py`). Timed of the core is
what lies between a decoded ask and the bytes to publish: `RouterCore.handle`, the encoded reply and events. What the
placement changed is taken up (`settle`) after that, as in the shell, and not timed here. Meanwhile snapshots come:
every 0.5 s of the rig's clock a delta with all instances, outside of the timing. The load is steady at about three
calls per instance; half of the asks are returns within tau, which consume a lease, half are of other sessions, ranked
by cost.

decision_p50_us_N     a ranked decision with N instances, median over the decisions of a run; also p99
lease_p50_us_N        a decision by lease
step_p50_us_N         both together, as they come: half and half
decision_p50_us_64_sessions_S   with 64 instances and S sessions in the table
bytes_per_session     memory of the process per session at the most sessions, as completions arrive off the bus
python_us_1000_adds   this machine now: 1000 turns of an empty Python loop, to compare runs with
routed_..., bare_...  over NATS, see router_bus.py: calls per second of wall time, and per second of CPU time of the
                      router and of a process that only answers; routed_calls_over_bare_replies_per_cpu_s is their ratio
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import statistics
import subprocess
import sys
import time
from collections import defaultdict, deque
from pathlib import Path

from bench import router_bus
from bench.report import Figure, figure, machine, percentile, write
from talaria_common.clock import ManualClock, to_ms
from talaria_common.ids import PARTITIONS, hash_id
from talaria_common.service import spare_the_collector
from talaria_common.wire import (
    ClusterView,
    Completion,
    InstanceView,
    ModelState,
    Placement,
    RouteRequest,
    SeenPlacements,
    Snapshot,
    decode,
    encode,
)
from talaria_router.config import RouterConfig
from talaria_router.core import RouterCore
from talaria_router.messages import Ask, Emit, Gained, Reply, Tick

MODEL = "model-70b"
HEARTBEAT_S = 0.5
ASKS_PER_S = 1000.0
"""At most; and 4 per instance."""
CALLS_PER_INSTANCE = 3
TOOL_CALLS = 2
"""Other asks between the end of a call and its session's return."""


class World:
    """A router among `n` instances that report truthfully what was placed on them."""

    def __init__(self, n: int) -> None:
        self.clock = ManualClock()
        self.core = RouterCore(RouterConfig(catalog=frozenset({MODEL})), "router-0", "e0")
        self.iids = [f"instance-{i:04}" for i in range(n)]
        self.running: dict[str, int] = defaultdict(int)
        self.upto: dict[str, int] = defaultdict(int)
        self.version = 0
        for p in range(PARTITIONS):
            self.core.handle(self.now, Gained(p, 1000 + p, may_hold=False))
        self.view()

    @property
    def now(self) -> float:
        return self.clock.now()

    def view(self) -> None:
        """A heartbeat: the new snapshots of all instances, as telemetry's delta brings them."""
        self.version += 1
        views = tuple(InstanceView(snapshot=self.snapshot(i), age_ms=0, health="ok") for i in self.iids)
        full = self.version % 10 == 1
        view = ClusterView(
            telemetry="t", epoch="e", version=self.version, at_ms=to_ms(self.now), full=full, instances=views
        )
        self.core.handle(self.now, decode(encode(view), ClusterView))
        self.core.handle(self.now, Tick())

    def snapshot(self, iid: str) -> Snapshot:
        model = ModelState(
            name=MODEL, state="active", running=self.running[iid], max_running=32, kv_epoch=1, context_tokens=131072,
            kv_capacity_tokens=1 << 20, prefill_ms_per_token=0.1, decode_step_ms=20.0, switch_ms=900.0,
        )  # fmt: skip
        spare = ModelState(
            name="spare", state="host", prefill_ms_per_token=0.1, decode_step_ms=20.0, switch_ms=900.0, max_running=32
        )
        seen = {"router-0/e0": SeenPlacements(upto=self.upto[iid])} if self.upto[iid] else {}
        return Snapshot(
            iid=iid, epoch="e", version=self.version, at_ms=to_ms(self.now), pool="cold", status="ready",
            models=(model, spare), max_queued=64, seen=seen,
        )  # fmt: skip

    def ask(self, session: str, number: int) -> tuple[float, Placement]:
        """(µs, placement) of one decision, from the decoded ask to the bytes that go out."""
        request = RouteRequest(
            rid=f"{number:032x}", tenant="local", session=session, model=MODEL, api="api-0",
            prompt_bytes=60_000, deadline_ms=to_ms(self.now + 600),
        )  # fmt: skip
        ask, now, placement = Ask(request), self.now, None
        begin = time.perf_counter_ns()
        for effect in self.core.handle(now, ask):
            if isinstance(effect, Reply):
                encode(effect.reply)
                placement = effect.reply.placement
            elif isinstance(effect, Emit):
                encode(effect.event)
        took = (time.perf_counter_ns() - begin) / 1000
        self.core.settle(MODEL)  # as the shell does once the answer is out
        assert placement is not None, "the rig is overloaded"
        self.running[placement.iid] += 1
        self.upto[placement.iid] = max(self.upto[placement.iid], placement.seq)
        return took, placement

    def complete(self, placement: Placement, session: str) -> None:
        self.running[placement.iid] -= 1
        completion = Completion(
            iid=placement.iid, epoch="e", rid=placement.fence.rid, attempt=0, router="router-0", router_epoch="e0",
            seq=placement.seq, partition=placement.fence.partition, tenant="local", session=session, model=MODEL,
            ok=True, prompt_tokens=15_000, completion_tokens=200, cached_tokens=14_000, cache_source="device",
            prompt_bytes=60_000, kv_tokens=15_200, prefix_handle=hash_id(session, "prefix"), kv_epoch=1, queue_ms=5.0,
            prefill_ms=120.0, ttft_ms=125.0, total_ms=4000.0, at_ms=to_ms(self.now),
        )  # fmt: skip
        self.core.handle(self.now, decode(encode(completion), Completion))


def decisions(world: World, asks: int) -> tuple[list[float], list[float]]:
    """(µs of ranked decisions, µs of decisions by lease) under steady load: a call ends for each ask."""
    ranked: list[float] = []
    leased: list[float] = []
    live: deque[tuple[Placement, str]] = deque()
    away: deque[str] = deque()
    number, next_view = 0, world.now + HEARTBEAT_S
    most = max(4, min(CALLS_PER_INSTANCE * len(world.iids), 2000))
    chance = random.Random(7)

    def end_one() -> None:
        if len(live) >= most:
            done, session_done = live.popleft()
            world.complete(done, session_done)
            away.append(session_done)

    while len(ranked) + len(leased) < asks:
        number += 1
        world.clock.advance(1 / min(ASKS_PER_S, 4.0 * len(world.iids)))
        if world.now >= next_view:
            world.view()
            next_view += HEARTBEAT_S
        session = hash_id("local", f"session {number}")
        before = chance.random() < 0.5
        if before:
            end_one()
        if len(away) > TOOL_CALLS:
            back = away.popleft()
            session = back if number % 2 else session
        took, placement = world.ask(session, number)
        live.append((placement, session))
        if not before:
            end_one()
        if number > most // 2:
            (leased if placement.via == "lease" else ranked).append(took)
    return ranked, leased


def remember(world: World, sessions: int) -> None:
    """Put `sessions` finished sessions into the table, by completions off the bus."""
    for n in range(sessions):
        session = hash_id("local", f"old {n}")
        completion = Completion(
            iid=world.iids[n % len(world.iids)], epoch="e", rid=f"f{n:031x}", attempt=0, router="router-1",
            router_epoch="e1", seq=n + 1, partition=0, tenant="local", session=session, model=MODEL, ok=True,
            prompt_tokens=15_000, completion_tokens=200, kv_tokens=15_200, prefix_handle=hash_id(session), kv_epoch=1,
            at_ms=to_ms(world.now),
        )  # fmt: skip
        world.core.handle(world.now, decode(encode(completion), Completion))
        if n % 1000 == 999:  # leases end, as they do
            world.clock.advance(2.0)
            world.core.handle(world.now, Tick())
    world.clock.advance(2.0)
    world.view()


def rss_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def loop_us() -> float:
    """1000 turns of a Python loop, the quickest of many: what this machine is."""
    best = float("inf")
    for _ in range(200):
        begin, x = time.perf_counter_ns(), 0
        for i in range(1000):
            x += i
        best = min(best, (time.perf_counter_ns() - begin) / 1000)
    return best


def run(sizes: list[int], sessions: list[int], asks: int) -> dict[str, float]:
    """One run; each size in this process, after a collection."""
    found: dict[str, float] = {"python_us_1000_adds": loop_us()}
    spare_the_collector()  # as every service does
    for n in sizes:
        gc.collect()
        ranked, leased = decisions(World(n), asks)
        found[f"decision_p50_us_{n}"] = percentile(ranked, 0.5)
        found[f"decision_p99_us_{n}"] = percentile(ranked, 0.99)
        found[f"lease_p50_us_{n}"] = percentile(leased, 0.5)
        found[f"step_p50_us_{n}"] = percentile(ranked + leased, 0.5)
        print(f"{n} instances: p50 {found[f'decision_p50_us_{n}']:.1f} us, p99 {found[f'decision_p99_us_{n}']:.0f} us,"
              f" by lease p50 {found[f'lease_p50_us_{n}']:.1f} us", flush=True)  # fmt: skip
    for count in sessions:
        world = World(64)
        before = rss_bytes()
        remember(world, count)
        found["bytes_per_session"] = (rss_bytes() - before) / count
        ranked, _ = decisions(world, asks)
        found[f"decision_p50_us_64_sessions_{count}"] = statistics.median(ranked)
        print(f"{count} sessions: p50 {statistics.median(ranked):.1f} us, {found['bytes_per_session']:.0f} bytes each")
    return found


def repeat(runs: int, window_s: float, *, quick: bool) -> dict[str, list[float]]:
    """Each figure's value of every run. A process each: memory of one run must not serve the next."""
    values: dict[str, list[float]] = defaultdict(list)
    command = [sys.executable, "-m", "bench.router", "--one", *(["--quick"] if quick else [])]
    for n in range(runs):
        # A million sessions take minutes to remember, and their size does not vary: in the first run only.
        done = subprocess.run(
            [*command, *(["--sizes-only"] if n else [])], stdout=subprocess.PIPE, text=True, check=True
        )
        for line in done.stdout.splitlines():
            print(line, flush=True)
            if line.startswith("figure "):
                name, _, value = line.removeprefix("figure ").partition("=")
                values[name].append(float(value))
        for name, measured in router_bus.measure(window_s).items():
            print(f"{name} = {measured:.5g}", flush=True)
            values[name].append(measured)
    return values


def unit(name: str) -> str:
    """A figure's unit, by its name."""
    if name == "bytes_per_session":
        return "bytes"
    if "_over_" in name:
        return "x"
    return "calls/s" if "per_s" in name or "per_cpu_s" in name else "us"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer sizes and asks; the result is not written")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--sizes-only", action="store_true", help="no tables of many sessions")
    parser.add_argument("--one", action="store_true", help="one run in this process; prints figures as name=value")
    args = parser.parse_args()
    sizes, sessions, asks, window_s = [2, 16, 64, 256, 1024, 4096], [1_000, 100_000, 1_000_000], 2000, 6.0
    if args.quick:
        sizes, sessions, asks, window_s = [2, 64], [10_000], 800, 2.0
    if args.sizes_only:
        sessions = []
    if args.one:
        for name, value in run(sizes, sessions, asks).items():
            print(f"figure {name}={value}")
        return 0
    where = machine()
    values = repeat(1 if args.quick else args.runs, window_s, quick=args.quick)
    figures: dict[str, Figure] = {}
    for name, each in values.items():
        figures[name] = figure(each, unit(name))
    if not args.quick:
        print(write("router", args.runs, figures, where=where))
    return 0


if __name__ == "__main__":
    sys.exit(main())
