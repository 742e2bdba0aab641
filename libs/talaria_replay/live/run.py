"""The closed loop (5.1, appendix A): a call goes out when the one before has ended and the capped gap has passed.

The order within a session, the gaps, ids and completion counts are the trace's; how sessions interleave is up to the
server. Schedule-aware TTFT counts from the moment that the loop meant (`intended_s`), request-local TTFT from the
request that was answered: refusals (429) and delays in this process lie between the two. To keep the latter small, a
call's body is made before the gap's wait, and off the event loop; so is the result file.

With `concurrent`, so many lanes start `stagger_s` apart, and each takes the next session when its last one has ended,
as in the simulator; without, each session is a lane of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec

from talaria_replay import trace
from talaria_replay.live import results
from talaria_replay.live.client import RETRY_STATUS, Answer, Client, reason
from talaria_replay.live.prompts import Conversation, Rate, digest, words
from talaria_replay.measure import CallRecord
from talaria_replay.trace import Call

PROBE_CHARS = (400, 2000)
"""Two prompts per model before the window: they warm it up and tell how the server counts."""

IDLE_S = 4.0
"""A connection idle for longer is not used again: uvicorn, under SGLang and vLLM, closes it after 5 s."""


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
        stagger_s: time between the starts of sessions, of the first `concurrent` ones if that is given.
        concurrent: sessions at once at most; None: all.
        warmup_calls: calls per model before the window, two at least.
        plain: strictly OpenAI's fields.
        deadline_s: for one call.
        salt: goes into all made text: another salt, other bodies, so that no earlier run's cache can help.
        made_texts: make texts of the recorded lengths where the trace has its own.
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
    made_texts: bool = False

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
    """The calls as they will be made: cut, scaled, models mapped. Order is kept; the result is a valid trace.

    Raises:
        ReplayError: the plan changes texts, and the trace has its own.
    """
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
                messages=None if plan.made_texts else call.messages,
            )
            out.append(made)
            before = made
    recorded = sum(c.messages is not None for c in out)
    if recorded and (plan.scale != 1.0 or plan.salt):
        raise ReplayError(
            f"--scale and --salt change made texts, but {recorded} of {len(out)} calls have recorded ones; "
            "--made-texts makes texts of the recorded lengths instead"
        )
    return out


class _Agent:
    """One session's bodies. What it learns of lengths is its own, whatever else is answered when."""

    def __init__(self, calls: Sequence[Call], rates: dict[str, Rate], salt: str, client: Client) -> None:
        self.calls = calls
        self.first: tuple[bytes, str] | None = None
        """The first call's body, when it was made ahead."""
        self._client = client
        self._rates = {model: rates[model].copy() for model in {c.model for c in calls}}
        self._talk = Conversation(self._rates[calls[0].model], salt)

    def body(self, call: Call) -> tuple[bytes, str]:
        """The body of the session's next call, and the digest of its messages."""
        self._talk.rate = self._rates[call.model]
        messages = self._talk.next(call)
        return self._client.encode(call.model, messages, call.completion_tokens), digest(messages)

    def answered(self, answer: Answer) -> None:
        """What came of it."""
        self._talk.answered(answer.text, answer.prompt_tokens, answer.completion_tokens)


class Replay:
    """One run.

    Args:
        plan: see there.
        calls: from `prepare`.
        out: result file, None: keep them in memory only.
        on_call: told of each record as it is made.
        on_wait: told what the warm-up waits for, when the server refuses its calls, and why the results are not saved.
        headers: for every request (an API key).

    Raises:
        ResultError: the run in `out` cannot be resumed.
    """

    def __init__(
        self,
        plan: Plan,
        calls: Sequence[Call],
        *,
        out: Path | None = None,
        resume: bool = False,
        on_call: Callable[[CallRecord], None] | None = None,
        on_wait: Callable[[str], None] | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        self._plan = plan
        self._sessions = trace.sessions(calls)
        self._out = out
        self._on_call = on_call
        self._on_wait = on_wait
        self._headers = headers or {}
        self._sizes = {s: len(c) for s, c in self._sessions.items()}
        record = plan.record(calls)
        if resume:
            if out is None:
                raise ReplayError("nothing to resume: there is no result file")
            self.results = results.resume(out, record, self._sizes)
        else:
            self.results = results.Results(plan=record)
        done = self.results.finished_sessions(self._sizes)
        self._todo = {s: c for s, c in self._sessions.items() if s not in done}
        self._run = f"/run-{self.results.runs}" if self.results.runs > 1 else ""
        if self._run:
            notes = _notes([c for session in self._todo.values() for c in session], kept=bool(done))
            self.results.notes = list(dict.fromkeys(self.results.notes + notes))
        self._rates: dict[str, Rate] = {}
        self._waiting: deque[_Agent] = deque()
        self._all_begun = asyncio.Event()
        self._saver: results.Saver | None = None
        self._unsaved = ""
        self._start = 0.0
        """Of the first run's window, if the windows of all runs had followed each other."""

    @property
    def calls_to_make(self) -> int:
        """Calls that this run will make."""
        return sum(len(c) for c in self._todo.values())

    async def run(self) -> results.Results:
        """Make all calls. Stopped (cancelled) it leaves the finished sessions in the file, marked incomplete.

        Whatever it raises, `results` has what was measured: all of it once it has a summary.

        Raises:
            ReplayError: the server does not answer the warm-up.
            OSError: the last version of the result file could not be written.
        """
        if self._out is not None:
            results.check_writable(self._out)
            self._saver = results.Saver(self._out)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=IDLE_S)
        timeout = httpx.Timeout(None, connect=10.0)
        warm = False
        try:
            async with httpx.AsyncClient(
                base_url=self._plan.url.rstrip("/").removesuffix("/v1"),
                headers=self._headers,
                limits=limits,
                timeout=timeout,
            ) as http:
                client = Client(http, plain=self._plan.plain, deadline_s=self._plan.deadline_s, now=time.monotonic)
                await self._warm_up(client, http)
                warm = True
                await self._window(client)
        finally:
            if warm:
                self._save()
            if self._saver is not None:
                self._saver.close()
        return self.results

    async def _window(self, client: Client) -> None:
        salt = self._plan.salt + self._run
        self._waiting.extend(_Agent(calls, self._rates, salt, client) for calls in self._todo.values())
        lanes = min(self._plan.concurrent or len(self._todo), len(self._todo))
        for agent in list(self._waiting)[:lanes]:
            agent.first = await asyncio.to_thread(agent.body, agent.calls[0])
        begun = time.monotonic()
        self._start = begun - self.results.wall_s
        self._save()
        async with asyncio.TaskGroup() as tasks:
            for n in range(lanes):
                tasks.create_task(self._lane(client, begun + n * self._plan.stagger_s))
        results.close(self.results, self._sizes)

    async def _warm_up(self, client: Client, http: httpx.AsyncClient) -> None:
        models = sorted({c.model for calls in self._todo.values() for c in calls})
        for model in models:
            http.event_hooks = {"response": [self._tells_waits(model)]}
            rate = self._rates[model] = Rate()
            counts: list[tuple[int, int]] = []
            for n in range(max(len(PROBE_CHARS), self._plan.warmup_calls)):
                chars = PROBE_CHARS[min(n, 1)]
                text = words(_probe_rng(model, n, self._plan.salt + self._run), chars)
                body = client.encode(model, [{"role": "user", "content": text}], 2)
                answer = await client.call(body, f"warm-up-{model}{self._run}")
                if answer.error:
                    raise ReplayError(f"{self._plan.url}: warm-up call for {model!r} failed: {answer.error}")
                if answer.prompt_tokens:
                    counts.append((chars, answer.prompt_tokens))
            if len(counts) >= 2:
                rate.probed(counts[0], counts[1])
        http.event_hooks = {}

    def _tells_waits(self, model: str) -> Callable[[httpx.Response], Awaitable[None]]:
        """A hook that tells each reason once for which the warm-up of `model` is refused and tried again."""
        told: set[str] = set()

        async def on_response(response: httpx.Response) -> None:
            if response.status_code not in RETRY_STATUS or self._on_wait is None:
                return
            why = f"HTTP {response.status_code}: {reason(await response.aread())}"
            if why not in told:
                told.add(why)
                self._on_wait(f"warm-up of {model!r} waits, {self._plan.deadline_s:g} s at most: {why}")

        return on_response

    async def _lane(self, client: Client, at: float) -> None:
        """One session after the other, the first at `at`, while any waits."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(at - time.monotonic()):
                await self._all_begun.wait()
        while self._waiting:
            agent = self._waiting.popleft()
            if not self._waiting:
                self._all_begun.set()
            if agent.first is None:
                agent.first = await asyncio.to_thread(agent.body, agent.calls[0])
                at = time.monotonic()
            await self._session(client, agent, at)
            at = time.monotonic()
            if self._plan.concurrent is None:
                break

    async def _session(self, client: Client, agent: _Agent, intended: float) -> None:
        records: list[CallRecord] = []
        for call in agent.calls:
            if call.call:
                body, name = await asyncio.to_thread(agent.body, call)
                intended += call.gap_s or 0.0
                await _until(intended)
            else:
                assert agent.first is not None
                (body, name), agent.first = agent.first, None
            answer = await client.call(body, call.session + self._run)
            record = self._record(call, answer, intended, call.gap_s or 0.0, name)
            records.append(record)
            if self._on_call is not None:
                self._on_call(record)
            if answer.error:
                break  # the rest of the session would not be what was recorded
            agent.answered(answer)
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
        if self._start:
            self.results.wall_s = round(time.monotonic() - self._start, 6)
        if self._saver is None:
            return
        failed = self._saver.soon(self.results)
        why = str(failed or "")
        if why and why != self._unsaved and self._on_wait is not None:
            self._on_wait(f"the result file is not written, and tried again when a session ends: {why}")
        self._unsaved = why


async def _until(moment: float) -> None:
    """Sleep until the clock says so."""
    await asyncio.sleep(max(0.0, moment - time.monotonic()))


def _notes(again: Sequence[Call], *, kept: bool) -> list[str]:
    """What to know of a resumed run that makes these calls. `kept`: it has sessions of the run before."""
    out = ["sessions of several runs: not all of them met the same load"] if kept else []
    if any(c.messages is None for c in again):
        out.append("sessions run again had other texts and ids, so that no cache of an earlier run could help them")
    if any(c.messages is not None for c in again):
        out.append("sessions run again had their recorded texts, which an earlier run may have left in caches")
    return out


def _probe_rng(model: str, n: int, salt: str) -> random.Random:
    return random.Random(f"warm-up/{salt}/{model}/{n}")  # noqa: S311 - repeatable on purpose
