"""One model's calls and KV rows in the sim engine: admission, decode growth, retraction, release."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from talaria_gpu.engine.contract import EngineCall, ModelLoad, StepTokens
from talaria_gpu.engine.sim.prefix import ID_BYTES, Node, PrefixCache
from talaria_gpu.engine.sim.tokens import logprob_at, pack_ids, seed_of, token_at

DECODE_RESERVE_TOKENS = 512
"""Rows an admission leaves for the call's own decode; beyond it decode takes what there is, or retracts."""


@dataclass(slots=True, eq=False)
class SimCall:
    """A call and what it holds."""

    call: EngineCall
    packed: bytes
    seed: int
    out: array[int] = field(default_factory=lambda: array("I"))
    node: Node | None = None
    """The cached prefix that it locks while it runs."""
    own: int = 0
    """KV rows that belong to it alone."""
    cached: int | None = None
    """Prompt tokens that its first prefill found cached."""
    prefilled: int = 0
    recomputed: int = 0
    alive: bool = True

    @classmethod
    def of(cls, call: EngineCall) -> SimCall:
        """Raises OverflowError or TypeError when an id is no id."""
        packed = pack_ids(call.input_ids)
        return cls(call, packed, seed_of(packed))

    @property
    def length(self) -> int:
        """Prompt and generated tokens."""
        return len(self.call.input_ids) + len(self.out)

    @property
    def sequence(self) -> bytes:
        """Prompt and generated ids, packed."""
        return self.packed + self.out.tobytes() if self.out else self.packed

    def emit(self) -> StepTokens:
        """Its next token, and whether it ends there."""
        sampling, position = self.call.sampling, len(self.out)
        token = token_at(self.seed, position)
        if token in sampling.stop_token_ids:
            return self._tokens([], "stop")
        self.out.append(token)
        finished: Literal["", "length"] = "length" if position + 1 >= sampling.max_new_tokens else ""
        if sampling.logprobs is None:
            return self._tokens([token], finished)
        logprob, top = logprob_at(self.seed, position, sampling.logprobs)
        return self._tokens([token], finished, [logprob], [top])

    def emit_many(self, count: int) -> StepTokens:
        """Its next `count` tokens at once; it has no stop token and wants no log probabilities, and needs so many."""
        position = len(self.out)
        tokens = [token_at(self.seed, n) for n in range(position, position + count)]
        self.out.extend(tokens)
        done = position + count >= self.call.sampling.max_new_tokens
        return self._tokens(tokens, "length" if done else "")

    def _tokens(
        self,
        ids: list[int],
        finished: Literal["", "length", "stop"],
        logprobs: list[float] | None = None,
        top: list[list[tuple[int, float]]] | None = None,
    ) -> StepTokens:
        cached = self.cached or 0
        return StepTokens(
            rid=self.call.rid,
            token_ids=ids,
            logprobs=logprobs or [],
            top=top or [],
            cached_tokens=cached,
            cache_source="device" if cached else "none",
            prefilled_tokens=self.prefilled,
            recomputed_tokens=self.recomputed,
            finished=finished,
        )


class SimPool:
    """Calls and rows of one model."""

    def __init__(self, capacity_tokens: int, page_tokens: int, max_running: int) -> None:
        self.waiting: dict[str, SimCall] = {}
        self.running: dict[str, SimCall] = {}
        self.epoch = 0
        self._capacity = capacity_tokens
        self._max_running = max_running
        self._cache = PrefixCache(page_tokens)
        self._own = 0
        self._sessions: dict[str, Node] = {}

    @property
    def used(self) -> int:
        """Rows held by running calls and by cached prefixes."""
        return self._own + self._cache.tokens

    @property
    def available(self) -> int:
        """Rows that are free or could be evicted."""
        return self._available()

    def admit(
        self, admit: frozenset[str] | None, now: float, limit_tokens: int | None = None
    ) -> list[tuple[SimCall, int]]:
        """Start the waiting calls in `admit` that fit, in order; returns each with the tokens it must prefill.

        The first that fits is started whatever its length; no more once the batch has passed `limit_tokens`.
        """
        batch: list[tuple[SimCall, int]] = []
        tokens = 0
        for rid in [r for r in self.waiting if admit is None or r in admit]:
            if len(self.running) >= self._max_running:
                break
            call = self.waiting[rid]
            node, cached = self._cache.match(
                call.call.salt, call.sequence[:-ID_BYTES], now
            )  # the last token gives the logits
            self._cache.lock(node)
            todo = call.length - cached
            tokens += todo
            if batch and limit_tokens is not None and tokens > limit_tokens:
                self._cache.unlock(node)
                break
            reserve = min(call.call.sampling.max_new_tokens - len(call.out), DECODE_RESERVE_TOKENS)
            if self.running and todo + reserve > self._available():
                self._cache.unlock(node)
                break
            del self.waiting[rid]
            self.running[rid] = call
            call.node = node
            if call.cached is None:
                call.cached, call.prefilled = cached, todo
            else:
                call.recomputed += todo
            self._take(call, todo)
            batch.append((call, todo))
        return batch

    def cached_tokens(self, rid: str) -> int:
        """Tokens that a waiting call would not have to prefill now; 0 if it does not wait."""
        call = self.waiting.get(rid)
        return 0 if call is None else self._cache.length(call.call.salt, call.sequence[:-ID_BYTES])

    def prefilled(self, call: SimCall, now: float) -> None:
        """A prefill is done: its whole pages become a cached prefix that others may share."""
        if call.node is None:
            raise ValueError(f"{call.call.rid} does not run")
        packed = call.sequence
        node, _ = self._cache.insert(call.call.salt, packed, now)
        self._cache.lock(node)
        self._cache.unlock(call.node)
        call.node = node
        self._give(call, call.own - (call.length - _depth(node)))

    def grow(self) -> list[SimCall]:
        """Rows for one decode of all running calls; retracts the youngest ones that find none. Returns the batch."""
        while len(self.running) > 1 and len(self.running) > self._available():
            self._retract([next(reversed(self.running))])
        batch = list(self.running.values())
        for call in batch:
            self._take(call, 1)
        return batch

    def extend(self, call: SimCall, rows: int) -> None:
        """Rows for further tokens of a running call, known to be available."""
        self._take(call, rows)

    def finish(self, call: SimCall, now: float) -> None:
        """A call ended well: its pages stay cached, but for the last token, whose KV was never computed."""
        node, _ = self._cache.insert(call.call.salt, call.sequence[:-ID_BYTES], now)
        if call.call.session:
            self._sessions[call.call.session] = node
        self._release(call)

    def drop(self, rid: str) -> bool:
        """Forget a call, waiting or running. False: unknown."""
        call = self.waiting.pop(rid, None)
        if call is not None:
            call.alive = False
            return True
        call = self.running.get(rid)
        if call is None:
            return False
        self._release(call)
        return True

    def deactivate(self) -> int:
        """A switch away: retract all, flush the tree. Returns how many were retracted."""
        count = len(self.running)
        self._retract(list(self.running))
        self._cache.flush()
        self._sessions.clear()
        self.epoch += 1
        return count

    def load(self) -> ModelLoad:
        """Current load."""
        self._sessions = {s: n for s, n in self._sessions.items() if n.parent is not None}
        return ModelLoad(
            waiting=len(self.waiting),
            running=len(self.running),
            waiting_tokens=sum(c.length for c in self.waiting.values()),
            kv_used_tokens=self.used,
            kv_epoch=self.epoch,
            cached_sessions=len(self._sessions),
        )

    def check(self) -> str:
        """What is wrong ("" if nothing) when no call is unfinished."""
        if self.waiting or self.running:
            return f"{len(self.waiting)} calls wait and {len(self.running)} run"
        if self._own or self._cache.locked_tokens:
            return f"{self._own} rows and {self._cache.locked_tokens} locked tokens have no call"
        return self._cache.check()

    def _available(self) -> int:
        return self._capacity - self.used + self._cache.tokens - self._cache.locked_tokens

    def _take(self, call: SimCall, rows: int) -> None:
        short = rows - (self._capacity - self.used)
        if short > 0:  # evict a share at once: each eviction walks the tree
            self._cache.evict(max(short, self._capacity // 32))
        call.own += rows
        self._own += rows

    def _give(self, call: SimCall, rows: int) -> None:
        call.own -= rows
        self._own -= rows

    def _unpin(self, call: SimCall) -> None:
        if call.node is not None:
            self._cache.unlock(call.node)
            call.node = None
        self._give(call, call.own)

    def _release(self, call: SimCall) -> None:
        del self.running[call.call.rid]
        self._unpin(call)
        call.alive = False

    def _retract(self, rids: Iterable[str]) -> None:
        back = {rid: self.running.pop(rid) for rid in rids}
        for call in back.values():
            self._unpin(call)
        self.waiting = back | self.waiting


def _depth(node: Node) -> int:
    """Tokens from the root to the end of `node`."""
    total, at = 0, node
    while at.parent is not None:
        total += at.tokens
        at = at.parent
    return total
