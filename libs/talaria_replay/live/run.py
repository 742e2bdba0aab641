"""The closed loop (5.1, appendix A): a call goes out when the one before has ended and the capped gap has passed.

The order within a session, the gaps, ids and completion counts are the trace's; how sessions interleave is up to the
server. Schedule-aware TTFT counts from the moment that the loop meant (`intended_s`), request-local TTFT from the
request that was answered: refusals (429) and delays in this process lie between the two.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec

from talaria_replay import trace
from talaria_replay.live import results
from talaria_replay.live.client import Answer, Client
from talaria_replay.live.prompts import Conversation, Rate, digest, words
from talaria_replay.measure import CallRecord
from talaria_replay.trace import Call

PROBE_CHARS = (400, 2000)
"""Two prompts per model before the window: they warm it up and tell how the server counts."""


class ReplayError(RuntimeError):
    """The replay cannot begin; the message says why."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What determines a run.

    Attributes:
        url: of the server, without /v1.
        model_map: trace's model → server's model; "*" stands for any other.
        scale: factor on all token counts.
        max_calls: calls per session at most.
        max_sessions: sessions at most, in order of appearance.
        gap_cap_s: longest gap.
        stagger_s: time between the starts of sessions.
        concurrent: sessions at once at most; None: all.
        warmup_calls: calls per model before the window, two at least.
        plain: strictly OpenAI's fields.
        deadline_s: for one call.
        salt: goes into all made text: another salt, other bodies, so that no earlier run's cache can help.
    """

    url: str
    model_map: dict[str, str] = field(default_factory=dict)
    scale: float = 1.0
    max_calls: int | None = None
    max_sessions: int | None = None
    gap_cap_s: float = 10.0
    stagger_s: float = 0.0
    concurrent: int | None = None
    warmup_calls: int = 2
    plain: bool = False
    deadline_s: float = 600.0
    salt: str = ""

    def model(self, name: str) -> str:
        """The server's name of the trace's model."""
        return self.model_map.get(name) or self.model_map.get("*") or name

    def record(self, calls: Sequence[Call]) -> dict[str, Any]:
        """For the result file: all of it, the digest of the calls as they are replayed, and their gaps by source."""
        h = hashlib.blake2b(digest_size=16)
        for call in calls:
            h.update(msgspec.json.encode(call))
        plan = {name: getattr(self, name) for name in self.__slots__}
        return plan | {"trace": h.hexdigest(), "gap_sources": trace.gap_sources(calls)}


def prepare(calls: Iterable[Call], plan: Plan) -> list[Call]:
    """The calls as they will be made: cut, scaled, models mapped. Order is kept; the result is a valid trace."""
    out: list[Call] = []
    by_session = list(trace.sessions(calls).values())[: plan.max_sessions]
    for session in by_session:
        before: Call | None = None
        for call in session[: plan.max_calls]:
            limit = 0 if before is None else before.prompt_tokens + before.completion_tokens
            prompt = max(1, round(call.prompt_tokens * plan.scale))
            made = msgspec.structs.replace(
                call,
                model=plan.model(call.model),
                prompt_tokens=prompt,
                completion_tokens=max(1, round(call.completion_tokens * plan.scale)),
                reusable_tokens=min(round(call.reusable_tokens * plan.scale), prompt, limit),
                gap_s=None if call.gap_s is None else min(call.gap_s, plan.gap_cap_s),
            )
            out.append(made)
            before = made
    return out


class Replay:
    """One run.

    Args:
        plan: see there.
        calls: from `prepare`.
        out: result file, None: keep them in memory only.
        on_call: told of each record as it is made.
        headers: for every request (an API key).
    """

    def __init__(
        self,
        plan: Plan,
        calls: Sequence[Call],
        *,
        out: Path | None = None,
        resume: bool = False,
        on_call: Callable[[CallRecord], None] | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        self._plan = plan
        self._sessions = trace.sessions(calls)
        self._out = out
        self._on_call = on_call
        self._headers = headers or {}
        sizes = {s: len(c) for s, c in self._sessions.items()}
        record = plan.record(calls)
        if resume:
            if out is None:
                raise ReplayError("nothing to resume: there is no result file")
            self.results = results.resume(out, record, sizes)
        else:
            self.results = results.Results(plan=record)
        done = self.results.finished_sessions(sizes)
        self._todo = {s: c for s, c in self._sessions.items() if s not in done}
        self._rates: dict[str, Rate] = {}
        self._start = 0.0

    @property
    def calls_to_make(self) -> int:
        """Calls that this run will make."""
        return sum(len(c) for c in self._todo.values())

    async def run(self) -> results.Results:
        """Make all calls. Stopped (cancelled) it leaves the finished sessions in the file, marked incomplete."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        timeout = httpx.Timeout(None, connect=10.0)
        async with httpx.AsyncClient(
            base_url=self._plan.url.rstrip("/").removesuffix("/v1"),
            headers=self._headers,
            limits=limits,
            timeout=timeout,
        ) as http:
            client = Client(http, plain=self._plan.plain, deadline_s=self._plan.deadline_s, now=time.monotonic)
            await self._warm_up(client)
            self._save()
            gate = asyncio.Semaphore(self._plan.concurrent or max(1, len(self._todo)))
            self._start = time.monotonic()
            async with asyncio.TaskGroup() as tasks:
                for n, calls in enumerate(self._todo.values()):
                    tasks.create_task(self._session(client, calls, n * self._plan.stagger_s, gate))
        results.close(self.results)
        self._save()
        return self.results

    async def _warm_up(self, client: Client) -> None:
        models = sorted({c.model for calls in self._todo.values() for c in calls})
        for model in models:
            rate = self._rates[model] = Rate()
            counts: list[tuple[int, int]] = []
            for n in range(max(len(PROBE_CHARS), self._plan.warmup_calls)):
                chars = PROBE_CHARS[min(n, 1)]
                text = words(_probe_rng(model, n, self._plan.salt), chars)
                answer = await client.call(model, [{"role": "user", "content": text}], 2, f"warm-up-{model}")
                if answer.error:
                    raise ReplayError(f"{self._plan.url}: warm-up call for {model!r} failed: {answer.error}")
                if answer.prompt_tokens:
                    counts.append((chars, answer.prompt_tokens))
            if len(counts) >= 2:
                rate.probed(counts[0], counts[1])

    async def _session(self, client: Client, calls: Sequence[Call], delay_s: float, gate: asyncio.Semaphore) -> None:
        await asyncio.sleep(delay_s)
        async with gate:
            rates = {model: self._rates[model].copy() for model in {c.model for c in calls}}
            talk = Conversation(rates[calls[0].model], self._plan.salt)
            records: list[CallRecord] = []
            intended = time.monotonic()
            for call in calls:
                gap_s = call.gap_s or 0.0
                if call.call:
                    intended += gap_s
                    await asyncio.sleep(max(0.0, intended - time.monotonic()))
                talk.rate = rates[call.model]
                messages = talk.next(call)
                answer = await client.call(call.model, messages, call.completion_tokens, call.session)
                record = self._record(call, answer, intended, gap_s, digest(messages))
                records.append(record)
                if self._on_call is not None:
                    self._on_call(record)
                if answer.error:
                    break  # the rest of the session would not be what was recorded
                talk.answered(answer.text, answer.prompt_tokens, answer.completion_tokens)
                intended = answer.done
            self.results.calls.extend(records)
            self._save()

    def _record(self, call: Call, answer: Answer, intended: float, gap_s: float, body: str) -> CallRecord:
        def at(moment: float) -> float:
            return round(moment - self._start, 6) if moment else 0.0

        return CallRecord(
            session=call.session,
            call=call.call,
            model=call.model,
            intended_s=at(intended),
            sent_s=at(answer.sent),
            first_s=at(answer.first),
            done_s=at(answer.done),
            gap_s=gap_s,
            prompt_tokens=answer.prompt_tokens,
            completion_tokens=answer.completion_tokens,
            cached_tokens=answer.cached_tokens,
            cache_reported=answer.cache_reported,
            wanted_prompt_tokens=call.prompt_tokens,
            wanted_completion_tokens=call.completion_tokens,
            cache_source=answer.cache_source,
            instance=answer.instance,
            route=answer.route,
            retries=answer.retries,
            body=body,
            error=answer.error,
        )

    def _save(self) -> None:
        if self._out is not None:
            results.write(self._out, self.results)


def _probe_rng(model: str, n: int, salt: str) -> random.Random:
    return random.Random(f"warm-up/{salt}/{model}/{n}")  # noqa: S311 - repeatable on purpose
