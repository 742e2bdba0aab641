"""One model's calls and KV rows in the sim engine: admission, chunks, decode growth, retraction, release."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from talaria_gpu.engine.contract import CacheSource, EngineCall, ModelLoad, StepTokens
from talaria_gpu.engine.sim.device import Part
from talaria_gpu.engine.sim.prefix import ID_BYTES, Node, PageCode, PrefixCache, depth
from talaria_gpu.engine.sim.tokens import logprob_at, pack_ids, seed_of, token_at, tokens_at

DECODE_RESERVE_TOKENS = 512
"""Rows an admission leaves for the call's own decode; beyond it decode takes what there is, or retracts."""
_SESSIONS_MAX = 10_000
"""Sessions that are counted as cached: beyond it the oldest are forgotten, though the host may have their KV."""


@dataclass(slots=True, eq=False)
class SimCall:
    """A call and what it holds."""

    call: EngineCall
    packed: bytes
    seed: int
    code: PageCode
    codes: bytes
    """Of the prompt's whole pages."""
    out: array[int] = field(default_factory=lambda: array("I"))
    node: Node | None = None
    """The cached prefix that it locks while it runs."""
    own: int = 0
    """KV rows that belong to it alone."""
    cached: int | None = None
    """Prompt tokens that its first prefill found cached."""
    source: CacheSource = "none"
    """Where those came from."""
    start: int = 0
    """Where its present prefill began."""
    done: int = 0
    """Where it is."""
    high: int = 0
    """How far it has ever been: tokens before that are computed again."""
    prefilled: int = 0
    recomputed: int = 0
    alive: bool = True

    @classmethod
    def of(cls, call: EngineCall, code: PageCode) -> SimCall:
        """Raises OverflowError or TypeError when an id is no id."""
        packed = pack_ids(call.input_ids)
        return cls(call, packed, seed_of(packed), code, code.of(packed))

    @property
    def length(self) -> int:
        """Prompt and generated tokens."""
        return len(self.call.input_ids) + len(self.out)

    def ids(self, tokens: int) -> Sequence[int]:
        """At least its first `tokens` ids."""
        if tokens <= len(self.call.input_ids):
            return self.call.input_ids
        return array("I", self.packed + self.out.tobytes())

    def prefix(self, tokens: int) -> bytes:
        """Codes of the whole pages in its first `tokens`, prompt and generated ones."""
        pages = tokens // self.code.page_tokens
        known = len(self.codes) // self.code.size
        if pages <= known:
            return self.codes[: pages * self.code.size]
        rest = (self.packed + self.out.tobytes())[known * self.code.page_tokens * ID_BYTES : tokens * ID_BYTES]
        return self.codes + self.code.of(rest)

    def computed(self, upto: int) -> tuple[int, int]:
        """Its prefill has come to `upto`: tokens computed for the first time, and again."""
        prompt = len(self.call.input_ids)
        fresh = max(0, min(upto, prompt) - max(self.high, self.done))
        again = upto - self.done - fresh
        self.done, self.high = upto, max(self.high, upto)
        self.prefilled += fresh
        self.recomputed += again
        return fresh, again

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
        tokens = tokens_at(self.seed, position, count)
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
        return StepTokens(
            rid=self.call.rid,
            token_ids=ids,
            logprobs=logprobs or [],
            top=top or [],
            cached_tokens=self.cached or 0,
            cache_source=self.source,
            prefilled_tokens=self.prefilled,
            recomputed_tokens=self.recomputed,
            finished=finished,
        )


class Share(NamedTuple):
    """A call's part of a prefill step."""

    call: SimCall
    part: Part

    @property
    def upto(self) -> int:
        """Where its prefill is after the step."""
        return self.part.cached + self.part.done + self.part.todo


class Coming(NamedTuple):
    """Rows taken for a prefix that is on its way from host."""

    call: SimCall
    end: int
    """Tokens of the prefix."""
    have: int
    """Of these, what the device had."""
    node: Node
    """Where that ends; locked."""


class SimPool:
    """Calls and rows of one model. While the model is not active, what its calls hold lies on the host."""

    def __init__(self, capacity_tokens: int, page_tokens: int, max_running: int) -> None:
        self.waiting: dict[str, SimCall] = {}
        self.running: dict[str, SimCall] = {}
        self.half: SimCall | None = None
        """A waiting call whose prompt is prefilled in part; the first in line."""
        self.epoch = 0
        self._capacity = capacity_tokens
        self._page = page_tokens
        self._max_running = max_running
        self.code = PageCode(page_tokens)
        self.cache = PrefixCache(self.code)
        self._own = 0
        self._coming = 0
        self._held: dict[str, Node] = {}
        """Locks on restored prefixes whose calls have not been admitted yet."""
        self._sessions: dict[str, Node | None] = {}

    @property
    def used(self) -> int:
        """Rows held by running calls, by prefixes on their way, and by cached prefixes."""
        return self._own + self._coming + self.cache.tokens

    @property
    def available(self) -> int:
        """Rows that are free or could be evicted."""
        return self._capacity - self.used + self.cache.tokens - self.cache.locked_tokens

    @property
    def places(self) -> int:
        """Calls that the batch has room for."""
        return max(0, self._max_running - len(self.running) - (self.half is not None))

    @property
    def holding(self) -> int:
        """Calls that hold rows."""
        return len(self.running) + (self.half is not None)

    # --- prefill

    def admit(self, admit: frozenset[str] | None, now: float, limit_tokens: int | None = None) -> list[Share]:
        """The next prefill step: waiting calls in `admit` that fit, in order.

        A step computes at most `limit_tokens`; a longer prompt goes on in the next step that admits anything.
        """
        batch: list[Share] = []
        left = limit_tokens if limit_tokens is not None else 1 << 62
        if admit is not None and not admit:
            return batch
        if self.half is not None:
            left -= self._add(batch, self.half, left)
        for rid in [r for r in self.waiting if admit is None or r in admit]:
            if left <= 0 or self.half is not None or len(self.running) >= self._max_running:
                break
            call = self.waiting[rid]
            node, cached = self.cache.match(
                call.call.salt, call.prefix(call.length - 1), now
            )  # the last gives the logits
            self.cache.lock(node)
            todo = call.length - cached
            reserve = min(call.call.sampling.max_new_tokens - len(call.out), DECODE_RESERVE_TOKENS)
            if todo + (reserve if self.running else 0) > self.available:
                self.cache.unlock(node)
                break
            self.cache.use(node, now)
            call.node, call.start, call.done = node, cached, cached
            if call.cached is None:
                call.cached = call.high = cached
            else:
                call.high = max(call.high, cached)
            self._take(call, todo)
            self.admitted(rid)
            left -= self._add(batch, call, left)
        return batch

    def _add(self, batch: list[Share], call: SimCall, left: int) -> int:
        """Into the batch, as far as it goes; returns how many tokens that are."""
        todo = call.length - call.done
        if todo > left:
            todo = min(todo, max(self._page, (call.done + left) // self._page * self._page - call.done))
        batch.append(Share(call, Part(call.start, call.done - call.start, todo)))
        if call.done + todo < call.length:
            self._first(call)
            self.half = call
        else:
            self.waiting.pop(call.call.rid, None)
            self.running[call.call.rid] = call
            if self.half is call:
                self.half = None
        return todo

    def cached_tokens(self, rid: str) -> int:
        """Tokens that a waiting call would not have to prefill now; 0 if it does not wait."""
        call = self.waiting.get(rid)
        if call is None:
            return 0
        return call.done if call is self.half else self.cache.length(call.call.salt, call.prefix(call.length - 1))

    def prefilled(self, call: SimCall, upto: int, now: float) -> Node:
        """A prefill has come to `upto`: its whole pages become a cached prefix that others may share."""
        if call.node is None:
            raise ValueError(f"{call.call.rid} does not run")
        before = depth(call.node)
        node, _ = self.cache.insert(call.call.salt, call.prefix(upto), now)
        self.cache.lock(node)
        self.cache.unlock(call.node)
        call.node = node
        self._give(call, depth(node) - before)
        return node

    # --- prefixes from host

    def expect(self, call: SimCall, end: int, now: float) -> Coming | None:
        """Rows for the first `end` tokens of a waiting call's prefix; None: the device has them, or no room.

        Each running call keeps a row for its next token: where prefixes for calls to come take the last rows in turns,
        each from the one before, nobody goes on.
        """
        node, have = self.cache.match(call.call.salt, call.prefix(end))
        if have >= end:
            return None
        self.cache.lock(node)
        if end - have > self.available - len(self.running):
            self.cache.unlock(node)
            return None
        self.cache.use(node, now)
        self._make_room(end - have)
        self._coming += end - have
        return Coming(call, end, have, node)

    def arrived(self, coming: Coming, now: float, *, wanted: bool) -> None:
        """It is there: a cached prefix, locked until its call is admitted; or its rows are free again."""
        self._coming -= coming.end - coming.have
        if wanted:
            call = coming.call
            node, _ = self.cache.insert(call.call.salt, call.prefix(coming.end), now)
            self.cache.lock(node)
            self._held[call.call.rid] = node
        self.cache.unlock(coming.node)

    def holds(self, rid: str) -> bool:
        """Whether a waiting call's prefix needs no restore: it is locked, or half prefilled."""
        return rid in self._held or (self.half is not None and self.half.call.rid == rid)

    @property
    def holds_any(self) -> bool:
        """Whether any restored prefix is locked for a call to come."""
        return bool(self._held)

    def admitted(self, rid: str) -> None:
        """The call holds its prefix itself now, or never will."""
        node = self._held.pop(rid, None)
        if node is not None:
            self.cache.unlock(node)

    def release(self) -> None:
        """Give up every such lock: the prefixes stay while nobody needs their rows."""
        for rid in list(self._held):
            self.admitted(rid)

    # --- decode

    def grow(self) -> list[SimCall]:
        """Rows for one decode of all running calls; retracts the youngest ones that find none. Returns the batch.

        Half a prompt goes before the last call. None: not even that finds a row, for copies have them.
        """
        while len(self.running) > self.available:
            if len(self.running) > 1:
                self._retract([next(reversed(self.running))])
            elif self.half is not None:
                self._give_up_half()
            else:
                return []
        batch = list(self.running.values())
        self._take_all(batch, 1)
        return batch

    def extend(self, calls: Sequence[SimCall], rows: int) -> None:
        """Rows for further tokens of running calls, known to be available."""
        self._take_all(calls, rows)

    # --- ends

    def finish(self, call: SimCall, now: float) -> Node:
        """A call ended well: its pages stay cached, but for the last token, whose KV was never computed."""
        node, _ = self.cache.insert(call.call.salt, call.prefix(call.length - 1), now)
        if call.call.session:
            self._sessions.pop(call.call.session, None)  # the latest stands last
            self._sessions[call.call.session] = node
            if len(self._sessions) > _SESSIONS_MAX:
                del self._sessions[next(iter(self._sessions))]
        self._release(call)
        return node

    def drop(self, rid: str) -> bool:
        """Forget a call, waiting or running. False: unknown."""
        call = self.waiting.pop(rid, None)
        if call is not None:
            call.alive = False
            self._unpin(call)
            if self.half is call:
                self.half = None
            return True
        call = self.running.get(rid)
        if call is None:
            return False
        self._release(call)
        return True

    # --- switches

    def empty_cache(self) -> None:
        """Evict every prefix that no call holds."""
        self.cache.evict(self.cache.tokens - self.cache.locked_tokens)

    def deactivate(self, *, keep_sessions: bool = False) -> int:
        """A switch away that keeps no rows: retract all, flush the cache. Returns how many were retracted."""
        count = self.holding
        self._retract(list(self.running))
        self._give_up_half()
        self.cache.flush()
        self._sessions = dict.fromkeys(self._sessions) if keep_sessions else {}
        return count

    def load(self, *, active: bool, host_kv_tokens: int = 0, restore_ms_per_token: float = 0.0) -> ModelLoad:
        """Current load; with nothing on the host, a session whose prefix was evicted is not cached."""
        if not host_kv_tokens:
            self._sessions = {s: n for s, n in self._sessions.items() if n is not None and n.parent is not None}
        return ModelLoad(
            waiting=len(self.waiting),
            running=len(self.running) if active else 0,
            waiting_tokens=sum(c.length for c in self.waiting.values()),
            kv_used_tokens=self.used if active else 0,
            kv_held_tokens=self._capacity - self.available if active else 0,
            kv_epoch=self.epoch,
            cached_sessions=len(self._sessions),
            host_kv_tokens=host_kv_tokens,
            restore_ms_per_token=restore_ms_per_token,
        )

    def check(self) -> str:
        """What is wrong ("" if nothing) when no call is unfinished."""
        if self.waiting or self.running:
            return f"{len(self.waiting)} calls wait and {len(self.running)} run"
        if self._own or self._coming or self.cache.locked_tokens:
            return f"{self._own + self._coming} rows and {self.cache.locked_tokens} locked tokens have no call"
        return self.cache.check()

    # --- inside

    def _make_room(self, rows: int) -> None:
        short = rows - (self._capacity - self.used)
        if short > 0:  # evict a share at once: each eviction walks the tree
            self.cache.evict(max(short, self._capacity // 32))

    def _take(self, call: SimCall, rows: int) -> None:
        self._make_room(rows)
        call.own += rows
        self._own += rows

    def _take_all(self, calls: Sequence[SimCall], rows: int) -> None:
        self._make_room(rows * len(calls))
        for call in calls:
            call.own += rows
        self._own += rows * len(calls)

    def _give(self, call: SimCall, rows: int) -> None:
        call.own -= rows
        self._own -= rows

    def _unpin(self, call: SimCall) -> None:
        if call.node is not None:
            self.cache.unlock(call.node)
            call.node = None
        self._give(call, call.own)

    def _give_up_half(self) -> None:
        if self.half is not None:
            self._unpin(self.half)
            self.half = None

    def _release(self, call: SimCall) -> None:
        del self.running[call.call.rid]
        self._unpin(call)
        call.alive = False

    def _retract(self, rids: Iterable[str]) -> None:
        back = {rid: self.running.pop(rid) for rid in rids}
        for call in back.values():
            self._unpin(call)
        self.waiting = back | self.waiting
        if self.half is not None:
            self._first(self.half)

    def _first(self, call: SimCall) -> None:
        """To the front of the line."""
        rid = call.call.rid
        if next(iter(self.waiting)) != rid:
            self.waiting = {rid: self.waiting.pop(rid)} | self.waiting
