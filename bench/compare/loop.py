"""The closed loop over HTTP: `bench.ablation`'s, with a server for each model and the answers' text kept."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import NamedTuple

import httpx
import msgspec

from bench.compare.workload import text
from talaria_replay import trace
from talaria_replay.live.client import Answer, Client
from talaria_replay.live.prompts import digest
from talaria_replay.live.run import IDLE_S
from talaria_replay.measure import CallRecord
from talaria_replay.trace import Call

DEADLINE_S = 600.0
GAP_CAP_S = 10.0
WARM_TURNS = 2
WARM_CHARS = (200, 1500)
WARM_TOKENS = 8


class Pace(NamedTuple):
    """When things happen."""

    scale: float
    """Our seconds for one of the trace's."""
    starts: Mapping[str, float]
    """By session, s, of those that are not held back by `concurrent`."""
    concurrent: int
    """Sessions at a time; the next one begins when one has ended. 0: all."""


class Outcome(msgspec.Struct, kw_only=True):
    """What came of one replay on one system."""

    records: list[CallRecord]
    answers: dict[str, str]
    """By session/call: the text."""
    wall_s: float
    reloads_s: list[float] = []
    """Of a system that swaps: how long each reload of the weights took."""


async def warm_up(urls: Mapping[str, str]) -> None:
    """Each model prefills, decodes and is switched to, twice. `urls`: server by model. RuntimeError: a call failed."""
    async with _clients(urls) as clients:
        for turn in range(WARM_TURNS):
            for model, client in clients.items():
                for chars in WARM_CHARS:
                    name = f"warm-{turn}-{model}-{chars}"
                    answer = await client.call(client.encode(model, text(chars, name), WARM_TOKENS), name)
                    if answer.error:
                        raise RuntimeError(f"warm-up of {model}: {answer.error}")


async def replay(calls: Sequence[Call], urls: Mapping[str, str], pace: Pace) -> Outcome:
    """Make all calls. Raises an ExceptionGroup of RuntimeError when one fails."""
    async with _clients(urls) as clients:
        return await _Loop(clients, pace).run(calls)


@asynccontextmanager
async def _clients(urls: Mapping[str, str]) -> AsyncIterator[dict[str, Client]]:
    async with AsyncExitStack() as stack:
        clients: dict[str, Client] = {}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=IDLE_S)
        for model, url in urls.items():
            http = httpx.AsyncClient(base_url=url, limits=limits, timeout=httpx.Timeout(None, connect=10.0))
            await stack.enter_async_context(http)
            clients[model] = Client(http, plain=False, deadline_s=DEADLINE_S, now=time.monotonic)
        yield clients


class _Loop:
    def __init__(self, clients: Mapping[str, Client], pace: Pace) -> None:
        self._clients, self._pace = clients, pace
        self._records: list[CallRecord] = []
        self._answers: dict[str, str] = {}

    async def run(self, calls: Sequence[Call]) -> Outcome:
        sessions = trace.sessions(calls)
        starts = self._pace.starts
        names = sorted(sessions, key=lambda name: starts.get(name, 0.0))
        waiting = iter(names)
        self._began = time.monotonic()

        async def one_after_another(first: str) -> None:
            await asyncio.sleep(starts.get(first, 0.0))
            await self._session(sessions[first])
            for name in waiting:  # shared: whoever is free takes the next
                await self._session(sessions[name])

        lanes = [next(waiting) for _ in range(min(self._pace.concurrent or len(names), len(names)))]
        async with asyncio.TaskGroup() as tasks:
            for first in lanes:
                tasks.create_task(one_after_another(first))
        return Outcome(records=self._records, answers=self._answers, wall_s=time.monotonic() - self._began)

    async def _session(self, calls: Sequence[Call]) -> None:
        intended = time.monotonic()
        for call in calls:
            client, messages = self._clients[call.model], call.messages or []
            body = await asyncio.to_thread(client.encode, call.model, messages, call.completion_tokens)
            if call.call:
                intended += min(call.gap_s or 0.0, GAP_CAP_S) * self._pace.scale
                await asyncio.sleep(max(0.0, intended - time.monotonic()))
            answer = await client.call(body, call.session)
            if answer.error:
                raise RuntimeError(f"{call.session} call {call.call}: {answer.error}")
            self._records.append(self._record(call, answer, intended, digest(messages)))
            self._answers[f"{call.session}/{call.call}"] = answer.text
            intended = answer.done

    def _record(self, call: Call, answer: Answer, intended: float, body: str) -> CallRecord:
        return CallRecord(
            session=call.session,
            call=call.call,
            model=call.model,
            intended_s=intended - self._began,
            sent_s=answer.sent - self._began,
            first_s=answer.first - self._began,
            done_s=answer.done - self._began,
            prompt_tokens=answer.prompt_tokens,
            completion_tokens=answer.completion_tokens,
            cached_tokens=answer.cached_tokens,
            cache_reported=answer.cache_reported,
            wanted_prompt_tokens=call.prompt_tokens,
            wanted_completion_tokens=call.completion_tokens,
            cache_source=answer.cache_source,
            retries=answer.retries,
            body=body,
        )
