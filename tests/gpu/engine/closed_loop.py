"""Agent sessions in closed loop on a rig: each call carries the last answer, and comes a short gap after it."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from random import Random

from talaria_gpu.engine.ipc import Stepped
from talaria_gpu.engine.sim import expected_tokens
from tests.gpu.engine.rig import Rig, make_call


@dataclass
class Session:
    name: str
    model: str
    turns: int
    gap_ms: float
    ids: list[int]
    grow: int = 40
    new: int = 60
    started_ms: float = 0.0
    done: int = 0
    sct_ms: float = 0.0
    ttft_ms: list[float] = field(default_factory=list)


def sessions(models: tuple[str, ...], count: int, turns: int, seed: int) -> list[Session]:
    rng = Random(seed)
    return [
        Session(
            f"s{n}",
            models[n % len(models)],
            turns,
            rng.uniform(50, 400),
            [rng.randrange(3, 250) for _ in range(rng.randrange(200, 800))],
        )
        for n in range(count)
    ]


def run(rig: Rig, load: list[Session]) -> None:
    """Runs them to their end; every answer is compared with the engine's pure function of the prompt."""
    due = [(20.0 * n, n) for n in range(len(load))]
    heapq.heapify(due)
    flying: dict[str, tuple[Session, float, list[int]]] = {}
    seen = 0
    while due or flying:
        if due:
            rig.until(due[0][0]) if not flying else _one(rig, due[0][0])
        else:
            _one(rig, None)
        for report in rig.reports[seen:]:
            for t in report.result.tokens if isinstance(report, Stepped) else []:
                session, sent_ms, got = flying[t.rid]
                if t.token_ids and not got:
                    session.ttft_ms.append(rig.ms - sent_ms)
                got += t.token_ids
                if t.finished:
                    assert t.finished == "length"
                    assert got == expected_tokens(session.ids, session.new)
                    del flying[t.rid]
                    session.done += 1
                    session.sct_ms = rig.ms - session.started_ms
                    rng = Random(f"{session.name}-{session.done}")
                    session.new = rng.randrange(20, 160)
                    session.ids = session.ids + got + [rng.randrange(3, 250) for _ in range(session.grow)]
                    if session.done < session.turns:
                        heapq.heappush(due, (rig.ms + session.gap_ms, load.index(session)))
        seen = len(rig.reports)
        while due and due[0][0] <= rig.ms + 0.01:
            _, n = heapq.heappop(due)
            session = load[n]
            session.started_ms = session.started_ms or rig.ms
            rid = f"{session.name}-{session.done}"
            flying[rid] = (session, rig.ms, [])
            call = make_call(
                rid,
                session.ids,
                session.model,
                session.new,
                session=session.name,
                is_continuation=session.done > 0,
            )
            rig.submit(call)


def _one(rig: Rig, until_ms: float | None) -> None:
    """One turn of the driver, or the time up to `until_ms`."""
    wait = rig.driver.next_wakeup()
    left = float("inf") if until_ms is None else max(0.0, until_ms - rig.ms) / 1000
    assert wait is not None or until_ms is not None, "resting with calls in flight"
    if wait is None or wait > left:
        rig.clock.advance(left)
        return
    rig.clock.advance(wait)
    rig.turn()
