"""One engine in a process of its own: `python -m bench.ablation.child JOB.json ANSWER.json`."""

from __future__ import annotations

import heapq
import random
import statistics
import sys
import time
import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from bench.ablation import sessions
from bench.ablation.job import Answer, Job, Profile, Replay
from bench.ablation.work import Work, watch
from talaria_common.clock import SystemClock
from talaria_gpu.engine.contract import EngineCall, Sampling, StepResult, StepTokens
from talaria_gpu.engine.driver import SlotDriver
from talaria_gpu.engine.ipc import Refused, Report, SlotEnded, Stepped, Switched
from talaria_gpu.sched.ablation import Ablation
from talaria_gpu.sched.config import SlotConfig
from talaria_replay import trace
from talaria_replay.measure import CallRecord
from talaria_replay.trace import Call

MAX_RUNNING = 16
PAGE, CHUNK = 16, 2048
HOST_KV_BYTES = 2 << 30
GAP_CAP_S = 10.0
DECODE_BATCH, DECODE_STEPS = 4, 24

Due = tuple[float, str, int]
"""(when, session, number) of a call."""


def build(job: Job) -> Any:
    """The engine. SGLang warns of what a CPU lacks."""
    from talaria_gpu.engine.sglang import ModelSpec, environment
    from talaria_gpu.engine.sglang.spec import HostKvOptions, MemoryOptions

    ablation = Ablation.named(job.ablation)  # type: ignore[arg-type]
    host = HostKvOptions(
        capacity_bytes=HOST_KV_BYTES,
        h2d_gbps=None if job.kv_bytes_per_s is None else job.kv_bytes_per_s / 1e9,
        d2h_gbps=None if job.kv_bytes_per_s is None else job.kv_bytes_per_s / 1e9,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        environment.prepare("cpu")
        from talaria_gpu.engine.sglang.engine import SglangEngine

        return SglangEngine(
            {n: ModelSpec(path=Path(p), dtype="float32", context_tokens=job.context) for n, p in job.paths.items()},
            device="cpu",
            kv_tokens=job.kv_tokens,
            page_size=PAGE,
            max_running=MAX_RUNNING,
            chunked_prefill_tokens=CHUNK,
            buffer_bytes=None,
            threads=1,  # the other core is for the copies
            seed=0,
            memory=MemoryOptions(staging=ablation.staging, h2d_bytes_per_s=job.weights_bytes_per_s),
            host_kv=host if ablation.hkvr else None,
        )


class Loop:
    """Sessions in closed loop: a call begins when the one before it has ended and its gap has passed."""

    def __init__(self, driver: SlotDriver, job: Job, clock: SystemClock, engine: Any) -> None:
        self._driver, self._job, self._clock = driver, job, clock
        self._flying: dict[str, tuple[Call, float, float, list[int], list[float]]] = {}
        self._work: dict[str, Work] = {}
        watch(engine, self._worked)

    def forget(self, driver: SlotDriver) -> None:
        """Go on with a driver that has measured nothing yet."""
        self._driver = driver

    def run(self, calls: list[Call]) -> Replay:
        """One replay from its beginning to its end."""
        clock, driver = self._clock, self._driver
        by_session = trace.sessions(calls)
        bodies = {name: sessions.prompts(session) for name, session in by_session.items()}
        before, spent = driver.spent(), time.thread_time()
        began = clock.now()
        due, held = self._first(by_session, began)
        flying, self._work = self._flying, {}
        self.records: list[CallRecord] = []
        self.tokens: dict[str, list[int]] = {}
        slots: list[dict[str, Any]] = []
        switches: list[dict[str, Any]] = []
        while due or flying:
            now = clock.now()
            while due and due[0][0] <= now:
                intended, name, at = heapq.heappop(due)
                call = by_session[name][at]
                rid = f"{name}/{at}"
                flying[rid] = (call, intended - began, now - began, [], [])
                self._submit(call, rid, bodies[name][at], intended)
            wait = driver.next_wakeup()
            if wait is None or wait > 0:
                until = due[0][0] - now if due else 1.0
                time.sleep(max(0.0, min(until, 1.0 if wait is None else wait)))
                continue
            for report in driver.turn(clock.now()):
                if isinstance(report, SlotEnded):
                    slots.append(msgspec.to_builtins(msgspec.structs.asdict(report)))
                elif isinstance(report, Switched):
                    switches += [msgspec.to_builtins(t) for t in report.timings]
                for news in _tokens(report):
                    ended = self._news(flying, news, clock.now() - began)
                    if ended is not None:
                        self._then(ended, by_session[ended.session], due, held)
        after = driver.spent()
        return Replay(
            records=self.records,
            tokens=self.tokens,
            slots=slots,
            switches=switches,
            wall_s=clock.now() - began,
            scheduler_s=after.scheduler_s - before.scheduler_s,
            engine_s=after.engine_s - before.engine_s,
            thread_s=time.thread_time() - spent,
            work=self._work,
        )

    def _worked(self, model: str, result: StepResult) -> None:
        self._work.setdefault(model, Work()).add(result, self._context)

    def _context(self, rid: str) -> int:
        """Tokens of a call's prompt and of what it has said."""
        call, _, _, out, _ = self._flying[rid]
        return call.prompt_tokens + len(out)

    def _first(self, by_session: Mapping[str, Sequence[Call]], began: float) -> tuple[list[Due], deque[str]]:
        """(the first calls of the sessions that begin by themselves, the sessions held back)."""
        starts, bound = self._job.starts, self._job.concurrent or len(by_session)
        names = sorted(by_session, key=lambda name: starts.get(name, 0.0))
        due = [(began + starts.get(name, 0.0), name, 0) for name in names[:bound]]
        heapq.heapify(due)
        return due, deque(names[bound:])

    def _then(self, ended: CallRecord, session: Sequence[Call], due: list[Due], held: deque[str]) -> None:
        """The session's next call after its gap, or the next session."""
        now, at = self._clock.now(), ended.call + 1
        if at < len(session):
            gap_s = min(session[at].gap_s or 0.0, GAP_CAP_S) * self._job.scale
            heapq.heappush(due, (now + gap_s, ended.session, at))
        elif held:
            heapq.heappush(due, (now, held.popleft(), 0))

    def _submit(self, call: Call, rid: str, ids: list[int], intended: float) -> None:
        sampling = Sampling(max_new_tokens=call.completion_tokens, temperature=0.0, ignore_eos=True)
        for report in self._driver.submit(
            EngineCall(
                rid=rid,
                model=call.model,
                input_ids=ids,
                sampling=sampling,
                session=call.session,
                is_continuation=call.call > 0,
                arrival=intended,
            )
        ):
            if isinstance(report, Refused):
                raise RuntimeError(f"refused: {report.error}")  # noqa: TRY004, an answer, not a wrong type

    def _news(self, flying: dict[str, Any], news: StepTokens, now_s: float) -> CallRecord | None:
        call, intended_s, sent_s, out, first = flying[news.rid]
        if news.token_ids and not out:
            first.append(now_s)
        out += news.token_ids
        if not news.finished:
            return None
        del flying[news.rid]
        if news.finished != "length":
            raise RuntimeError(f"{news.rid} ended with {news.finished}: {news.message}")
        self.tokens[news.rid] = out
        record = CallRecord(
            session=call.session,
            call=call.call,
            model=call.model,
            intended_s=intended_s,
            sent_s=sent_s,
            first_s=first[0],
            done_s=now_s,
            prompt_tokens=call.prompt_tokens,
            completion_tokens=len(out),
            cached_tokens=news.cached_tokens,
            cache_source=news.cache_source,
        )
        self.records.append(record)
        return record


def _tokens(report: Report) -> list[StepTokens]:
    return report.result.tokens if isinstance(report, Stepped) else []


def profile(engine: Any, length: int) -> dict[str, Profile]:
    """Costs of each model: a prefill of `length` that finds nothing cached, and a decode step of a few such calls."""
    out: dict[str, Profile] = {}
    rng = random.Random(1)

    def ids(length: int) -> list[int]:
        return [rng.randrange(sessions.FIRST_ID, sessions.VOCAB) for _ in range(length)]

    def start(rid: str, model: str, length: int, new: int) -> float:
        sampling = Sampling(max_new_tokens=new, temperature=0.0, ignore_eos=True)
        engine.submit(EngineCall(rid=rid, model=model, input_ids=ids(length), sampling=sampling))
        took = 0.0
        while rid in engine.waiting(model):
            took += engine.step(None).wall_ms
        return took

    for model, info in engine.models().items():
        engine.switch(model)
        start("warm", model, length, 1)
        prefill = [start(f"p{i}", model, length, DECODE_STEPS + DECODE_BATCH) for i in range(DECODE_BATCH)]
        steps = []
        while engine.has_unfinished(model):
            steps.append(engine.step(None).wall_ms)
        out[model] = Profile(
            prefix_tokens=length,
            prefill_ms=statistics.median(prefill),
            decode_ms=statistics.median(steps[:DECODE_STEPS]),
            weight_bytes=info.weight_bytes,
            kv_bytes_per_token=info.kv_bytes_per_token,
        )
    return out


def warm(loop: Loop, models: list[str]) -> None:
    """Each model prefills, decodes and is switched to, twice: before anything is measured."""
    for turn in range(2):
        for model in models:
            sizes = (64, 464)
            loop.run([_call(f"warm-{turn}-{model}-{size}", model, size) for size in sizes])


def _call(session: str, model: str, size: int) -> Call:
    return Call(session=session, call=0, model=model, prompt_tokens=size, completion_tokens=8)


def main() -> None:
    """Do the job."""
    asked, answer = Path(sys.argv[1]), Path(sys.argv[2])
    job = msgspec.json.decode(asked.read_bytes(), type=Job)
    engine = build(job)
    if job.prefix_tokens:
        result = Answer(profiles=profile(engine, job.prefix_tokens))
    else:
        ablation = Ablation.named(job.ablation)  # type: ignore[arg-type]
        config = SlotConfig(**job.slots, ablation=ablation, suspends=True)
        clock = SystemClock()
        loop = Loop(SlotDriver(engine, config, clock), job, clock, engine)
        warm(loop, list(job.paths))
        if job.unmeasured:
            loop.forget(SlotDriver(engine, config, clock))
        result = Answer(replays={name: loop.run(calls) for name, calls in job.replays.items()})
    answer.write_bytes(msgspec.json.encode(result))
    engine.close()


if __name__ == "__main__":
    main()
