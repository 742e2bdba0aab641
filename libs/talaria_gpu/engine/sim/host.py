"""Host KV in the sim engine: the production registry, keys and pool; copies take their time on modelled links (4.3).

What `hkvr.store`, `engine.sglang.saving`, `.restore` and `.suspend` do with bytes is done here with counts: the same
blocks, pins, refs and evictions at the same moments. One registry stands for those of all ranks, which agree.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from talaria_gpu.engine.sim.device import ModelSpec, Substrate
from talaria_gpu.engine.sim.links import Link, Transfer
from talaria_gpu.engine.sim.pool import Coming, SimCall, SimPool
from talaria_gpu.engine.sim.prefix import Node
from talaria_gpu.hkvr.block import Block
from talaria_gpu.hkvr.descriptor import KvDescriptor
from talaria_gpu.hkvr.keys import BlockKeys, identity_of
from talaria_gpu.hkvr.registry import Registry
from talaria_gpu.hkvr.slabs import Cell, Move, SlabPool

STREAM = "kv"
SLAB_BYTES = 1 << 30
_EWMA = 0.3
_SESSIONS_MAX = 100_000


@dataclass(slots=True, eq=False)
class _Restore:
    """A prefix on its way."""

    coming: Coming
    blocks: list[Block]
    transfer: Transfer
    wanted: bool = True
    """False: the call has gone meanwhile."""


class _Keys:
    """Block keys of a sequence, and its codes, with which a session's next prompt usually begins."""

    __slots__ = ("_block", "_count", "_keys", "_prefix")

    def __init__(self, identity: bytes, salt: str, block_tokens: int) -> None:
        self._keys = BlockKeys(identity, salt, block_tokens)
        self._block = block_tokens
        self._count = 0
        self._prefix = b""

    def begins(self, call: SimCall) -> bool:
        """Whether the call's prompt begins with all that was hashed."""
        return call.codes.startswith(self._prefix)

    def upto(self, call: SimCall, tokens: int) -> list[bytes]:
        """Keys of the full blocks in the call's first `tokens`."""
        count = tokens // self._block
        if count > self._count:
            whole = count * self._block
            self._count, self._prefix = count, call.prefix(whole)
            return self._keys.upto(call.ids(whole), whole)
        return self._keys.upto((), tokens)


@dataclass(slots=True, eq=False)
class _Watched:
    """What a call has with the host."""

    keys: _Keys
    refs: list[Block]
    saved: int = 0
    """Blocks whose copy has been started, or that were there."""
    device_had: int | None = None
    """If a restore brought its prefix: the tokens of it that the device had."""
    matched: tuple[int, list[Block]] = (-1, [])
    """(state of the registry, its prefix there)."""


@dataclass(slots=True)
class _Model:
    descriptor: KvDescriptor
    pool: SimPool
    watched: dict[str, _Watched] = field(default_factory=dict)
    coming: dict[str, _Restore] = field(default_factory=dict)
    parked: list[Cell] = field(default_factory=list)
    restore_ms: float = 0.0
    forgot: bool = False


class SimHost:
    """The host's memory and the two directions of the link.

    Args:
        substrate: sizes and rates.
        specs: of the models.
        pools: their calls and rows.
        page_tokens: of the device's prefix cache.
        h2d: shared with weights.
        now: seconds.
    """

    def __init__(  # noqa: PLR0917 - one caller, and all of it is needed
        self,
        substrate: Substrate,
        specs: Mapping[str, ModelSpec],
        pools: Mapping[str, SimPool],
        page_tokens: int,
        h2d: Link,
        now: float,
    ) -> None:
        block = max(page_tokens, substrate.block_tokens // page_tokens * page_tokens)
        slab = max(min(SLAB_BYTES, substrate.host_bytes // 8), *(s.kv_bytes_per_token * block for s in specs.values()))
        self._slab = slab
        costs = {name: float(spec.weight_bytes) for name, spec in specs.items()}  # as the SGLang engine has it
        self.registry = Registry(SlabPool(substrate.host_bytes, slab), _moved, lambda name: costs[name])
        self._models = {
            name: _Model(
                KvDescriptor(
                    model=name,
                    identity=identity_of({"model": name}),
                    family="mla",  # one segment of all bytes: only the sum matters here
                    dtype="bf16",
                    page_tokens=page_tokens,
                    block_tokens=block,
                    row_bytes=(spec.kv_bytes_per_token,),
                ),
                pools[name],
            )
            for name, spec in specs.items()
        }
        self._in = h2d
        self._out = Link(substrate.d2h_bytes_per_s, now, STREAM)
        self._chains: dict[tuple[str, str, str], _Keys] = {}
        """Each session's last keys."""
        self.restored = 0
        """Tokens since last taken."""
        self.restored_tokens = 0
        """Since the start."""
        self.saved_bytes = 0

    # --- calls

    def came(self, name: str, call: SimCall) -> None:
        """A call was queued: the blocks that it will want are the last to be evicted."""
        model = self._models[name]
        at = (name, call.call.salt, call.call.session)
        keys = self._chains.pop(at, None)  # back once the call is over: two calls may go on differently
        if keys is None or not keys.begins(call):
            keys = _Keys(model.descriptor.identity, call.call.salt, model.descriptor.block_tokens)
        watched = _Watched(keys, [])
        model.watched[call.call.rid] = watched
        watched.refs = self._matched(model, call)
        self.registry.refer(watched.refs)

    def left(self, name: str, call: SimCall) -> None:
        """A call is over. Rows of a prefix that is still coming are freed when it has arrived."""
        model, rid = self._models[name], call.call.rid
        watched = model.watched.pop(rid)
        if call.call.session:
            self._chains[name, call.call.salt, call.call.session] = watched.keys
            if len(self._chains) > _SESSIONS_MAX:
                del self._chains[next(iter(self._chains))]
        self.registry.unrefer(watched.refs)
        model.pool.admitted(rid)
        if rid in model.coming:
            model.coming[rid].wanted = False
        if model.parked and not model.pool.holding:
            self._unpark(model)
            model.pool.empty_cache()

    def on_host(self, name: str, call: SimCall) -> int:
        """Tokens of its prefix that the host has."""
        model = self._models[name]
        return len(self._matched(model, call)) * model.descriptor.block_tokens

    def from_host(self, name: str, call: SimCall, start: int) -> bool:
        """Whether a prefill that begins at `start` skips tokens that came from the host."""
        had = self._models[name].watched[call.call.rid].device_had
        return had is not None and start > had

    def tokens(self, name: str) -> int:
        """Tokens of a model's blocks."""
        return self.registry.tokens(name)

    def restore_ms_per_token(self, name: str) -> float:
        """As the copies took, EWMA; 0 while there was none."""
        return self._models[name].restore_ms

    # --- to the host

    def checkpoint(self, name: str, call: SimCall, node: Node, tokens: int, now: float) -> None:
        """The call's first `tokens`, which end at `node` of the device's cache: copy the blocks that the host lacks."""
        model = self._models[name]
        watched = model.watched[call.call.rid]
        keys = watched.keys.upto(call, tokens)
        if len(keys) <= watched.saved:
            return
        watched.saved = len(keys)
        # What is there is a prefix, for leaves go first.
        first = bisect_left(keys, True, key=lambda key: self.registry.get(key) is None)
        blocks: list[Block] = []
        parent = self.registry.get(keys[first - 1]) if first else None
        for key in keys[first:]:
            block = self.registry.reserve(model.descriptor, key, parent)
            if block is None:
                model.forgot = True
                break
            blocks.append(block)
            parent = block
        if not blocks:
            return
        cache = model.pool.cache
        cache.lock(node)

        def done(_: float) -> None:
            for block in blocks:
                self.registry.commit(block, 0)
            cache.unlock(node)

        size = len(blocks) * model.descriptor.block_bytes
        self.saved_bytes += size
        self._out.put(STREAM, size, now, done)

    def take_forgot(self, name: str) -> bool:
        """Whether blocks of the model found no room since last asked."""
        model = self._models[name]
        forgot, model.forgot = model.forgot, False
        return forgot

    # --- to the device

    def prepare(self, name: str, calls: Iterable[SimCall], now: float) -> set[str]:
        """Start what the host has for these waiting calls; rids of those that must wait for it."""
        model = self._models[name]
        waiting = set()
        for call in calls:
            rid = call.call.rid
            if rid in model.coming or (not model.pool.holds(rid) and self._start(name, model, call, now)):
                waiting.add(rid)
        return waiting

    @property
    def saving(self) -> bool:
        """Whether copies to the host are under way; the rows that they read stay."""
        return self._out.busy

    def busy(self, name: str) -> bool:
        """Whether prefixes are on their way, or held for calls to come, or copies to the host under way."""
        model = self._models[name]
        return bool(model.coming) or model.pool.holds_any or self._out.busy

    def is_restoring(self, name: str) -> bool:
        """Whether prefixes of the model are on their way."""
        return bool(self._models[name].coming)

    def all_over(self) -> float:
        """When every copy under way is; -inf: none is."""
        return max(self._in.eta(STREAM), self._out.eta(STREAM))

    def poll(self, now: float) -> None:
        """Let completed copies take effect."""
        self._in.advance(now)
        self._out.advance(now)

    def settle(self) -> float:
        """Finish every copy (a link may be in the future afterwards); returns when that is, or -inf."""
        return max(self._in.finish(STREAM), self._out.finish(STREAM))

    def take_restored(self) -> int:
        """Tokens restored since last asked."""
        taken, self.restored = self.restored, 0
        return taken

    # --- running calls over a switch

    def park(self, name: str) -> float | None:
        """Room for every row that the model's calls hold; ms of the copy. None: there is none."""
        model = self._models[name]
        model.pool.empty_cache()
        size = model.pool.used * model.descriptor.bytes_per_token
        cells = self.registry.take_private(self._slab, -(-size // self._slab))
        if cells is None:
            return None
        model.parked = cells
        return size / self._out.bytes_per_s * 1000

    def unpark(self, name: str) -> float:
        """The rows come back; ms of the copy."""
        model = self._models[name]
        if not model.parked:
            return 0.0
        self._unpark(model)
        return model.pool.used * model.descriptor.bytes_per_token / self._in.bytes_per_s * 1000

    def check(self) -> str:
        """What is wrong ("" if nothing) when no call is unfinished."""
        for name, model in self._models.items():
            if model.watched or model.parked:
                return f"{name}: {len(model.watched)} calls are watched, {len(model.parked)} cells parked"
        return self.registry.check()

    # --- inside

    def _unpark(self, model: _Model) -> None:
        self.registry.give_private(model.parked)
        model.parked = []

    def _matched(self, model: _Model, call: SimCall) -> list[Block]:
        """What the host has, below the call's last token: that one must be computed."""
        watched, counts = model.watched[call.call.rid], self.registry.counts
        state = counts.saved + counts.evicted
        if watched.matched[0] != state:
            keys, found = watched.keys.upto(call, call.length - 1), watched.matched[1]
            if found and found[-1].state == "gone":  # leaves go first: else all before it is there, too
                found = []
            watched.matched = (state, found + self.registry.match(keys[len(found) :]))
        return watched.matched[1]

    def _start(self, name: str, model: _Model, call: SimCall, now: float) -> bool:
        end = self.on_host(name, call)
        if not end:
            return False
        blocks = self._matched(model, call)
        coming = model.pool.expect(call, end, now)
        if coming is None:
            return False
        wanted = blocks[coming.have // model.descriptor.block_tokens :]
        self.registry.pin(wanted)
        size = (end - coming.have) * model.descriptor.bytes_per_token
        transfer = self._in.put(STREAM, size, now, lambda at: self._arrived(model, call, at))
        model.coming[call.call.rid] = _Restore(coming, wanted, transfer)
        return True

    def _arrived(self, model: _Model, call: SimCall, now: float) -> None:
        rid = call.call.rid
        restore = model.coming.pop(rid)
        coming, tokens = restore.coming, restore.coming.end - restore.coming.have
        self.registry.touch(restore.blocks)
        self.registry.unpin(restore.blocks)
        took = (now - restore.transfer.began) * 1000 / tokens
        model.restore_ms += (took - model.restore_ms) * (_EWMA if model.restore_ms else 1.0)
        counts = self.registry.counts
        counts.restored += len(restore.blocks)
        counts.restored_tokens += tokens
        self.restored += tokens
        self.restored_tokens += tokens
        model.pool.arrived(coming, now, wanted=restore.wanted)
        if restore.wanted:
            model.watched[rid].device_had = coming.have


def _moved(_: Move) -> None:
    """No bytes are here that could be moved."""
