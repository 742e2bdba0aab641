"""The whole substrate over one buffer: allocate, decode, finish, checkpoint, evict, stage, dirty, switch, suspend,
restore, cancel and crash in any order, against a model of the truth.

Policy and copies are the production ones; what SGLang and the stager's thread do with them is played here, step by
step, so that an order that fails can be found again. Released bytes are garbage at once, on the device and on the host.
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from talaria_gpu.hkvr.block import Block
from talaria_gpu.hkvr.records import Parked, Restore
from talaria_gpu.hkvr.store import HostKv
from talaria_gpu.staging.chunks import ChunkMap, State
from talaria_gpu.staging.gather import gather
from talaria_gpu.staging.plan import StagePlan, stage_plan, switch_plan
from talaria_gpu.streams import CopyThread
from tests.gpu.hkvr.fake_buffer import GARBAGE, FakeModel
from tests.gpu.hkvr.fake_device import descriptor, found

CPU = torch.device("cpu")
BUFFER, HOST, SLAB, BLOCK, CHUNK, LEAST = 3600, 2100, 300, 4, 64, 16
MODELS = (
    (descriptor("mha"), 700, 24),
    (descriptor("mla", "mla", (12, 12, 12), page=1), 1100, 40),
    (descriptor("wide", rows=(16, 48), page=4), 400, 10),
)
LONGEST = 36
EVENTS = (
    "reused",
    "decoded",
    "restored",
    "dirty",
    "retracted",
    "retracted at a switch",
    "resumed",
    "rolled back",
    "refused what was corrupt",
    "crashed with blocks",
    "cancelled waiting",
    "cancelled coming",
    "cancelled running",
    "cancelled suspended",
    "d2d",
    "partial",
    "h2d",
)
numbers = st.integers(0, 99)
models = st.sampled_from(range(len(MODELS)))
prompts = st.tuples(st.integers(0, 1), st.integers(1, 24), st.sampled_from(["", "", "", "t"]))
seen: Counter[str] = Counter()
"""Of `EVENTS`, in all lives together: a test that never gets anywhere proves nothing."""
operations: list[tuple[str, dict[str, Any]]] = []


def operation(often=1, **arguments):
    """One of the things that can come next, `often` times as probable as others.

    They are one rule's: Hypothesis leaves most rules out of most lives, and here each needs the others.
    """

    def note(method):
        operations.extend([(method.__name__, arguments)] * often)
        return method

    return note


def named(chosen):
    name, arguments = chosen
    return st.tuples(st.just(name), st.fixed_dictionaries(arguments))


@dataclass(eq=False)
class Call:
    """`state`: waiting; coming: its prefix is on its way from the host; running; over."""

    m: int
    ids: list[int]
    salt: str
    refs: list[Block]
    state: str = "waiting"
    pages: list[int] = field(default_factory=list)


@dataclass(eq=False)
class Coming:
    call: Call
    ids: list[int]
    have: int
    base: list[int]
    pages: list[int]
    restore: Restore


@dataclass(eq=False)
class Staging:
    target: int
    chunks: ChunkMap
    flying: list[int] = field(default_factory=list)


class Life(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.buffer = torch.full((BUFFER,), GARBAGE, dtype=torch.uint8)
        self.d2d, self.h2d = CopyThread("d2d", CPU), CopyThread("h2d", CPU)
        self.gate: threading.Event | None = None
        self.boot()

    def boot(self):
        """As a new process: nothing is anywhere."""
        self.models = [FakeModel(spec, size, pages, self.buffer) for spec, size, pages in MODELS]
        self.store = HostKv(HOST, CPU, slab_bytes=SLAB, poison=True)
        self.calls: list[Call] = []
        self.cached: list[list[tuple[list[int], str, list[int]]]] = [[] for _ in MODELS]
        self.coming: list[Coming] = []
        self.parked: dict[int, Parked] = {}
        self.staging: Staging | None = None
        self.saved: dict[bytes, tuple[int, tuple[int, ...]]] = {}
        self.corrupted: set[Block] = set()
        self.active: int | None = None
        self.bring_weights(0, None)
        self.enter(0)

    @rule(step=st.deferred(lambda: st.sampled_from(operations).flatmap(named)))
    def do(self, step):
        name, arguments = step
        getattr(self, name)(**arguments)

    def those(self, state, m=None):
        m = self.active if m is None else m
        return [call for call in self.calls if call.m == m and call.state == state]

    # --- calls

    @operation(m=st.none() | models, prompt=prompts)
    def arrive(self, m, prompt):
        root, length, salt = prompt
        m = self.active if m is None else m
        ids = [root * 1000 + i for i in range(length)]
        refs = self.visible(m, ids, salt)
        self.store.registry.refer(refs)
        self.calls.append(Call(m, ids, salt, refs))

    @operation(4, prompt=prompts, tokens=st.integers(0, 6), ends=st.booleans())
    def turn(self, prompt, tokens, ends):
        """A call from its arrival on, perhaps to its end."""
        self.store.poll()
        self.arrive(None, prompt)
        self.restore(-1)
        if self.those("coming") and ends:
            self.arrived(-1)
        self.allocate(-1)
        for _ in range(tokens):
            self.decode(branch=False)
        if ends:
            self.finish(-1)

    @operation(pick=numbers)
    def allocate(self, pick):
        """A prefill, over what the device has of the prefix."""
        waiting = self.those("waiting")
        if not waiting:
            return
        call = waiting[pick % len(waiting)]
        model = self.models[call.m]
        base, have = self.on_device(call)
        model.hold(base)
        more = self.take(-(-len(call.ids) // model.page) - len(base))
        if more is None:
            model.drop(base)
            return
        call.pages, call.state = base + more, "running"
        model.compute(call.ids, call.pages, have)
        seen["reused"] += have > 0

    @operation(2, branch=st.booleans())
    def decode(self, branch):
        """A token for everybody; who finds no room for it is retracted."""
        for call in self.those("running"):
            model = self.models[call.m]
            if len(call.ids) == len(call.pages) * model.page:
                more = self.take(1) if len(call.ids) < LONGEST else None
                if more is None:
                    self.retract(call)
                    continue
                call.pages += more
            call.ids.append(call.ids[0] // 1000 * 1000 + len(call.ids) + 500 * branch)
            model.compute(call.ids, call.pages, len(call.ids) - 1)
            seen["decoded"] += 1

    @operation(pick=numbers)
    def checkpoint(self, pick):
        running = self.those("running")
        if running:
            self.save(running[pick % len(running)])

    @operation(pick=numbers)
    def finish(self, pick):
        """Its whole pages become the prefix cache's."""
        running = self.those("running")
        if not running:
            return
        call = running[pick % len(running)]
        model = self.models[call.m]
        self.save(call)
        whole = len(call.ids) // model.page
        if whole:
            self.cached[call.m].append((call.ids[: whole * model.page], call.salt, call.pages[:whole]))
        model.drop(call.pages[whole:])
        self.over(call)

    @operation(2, pick=numbers, first=st.sampled_from(["", "coming", "suspended"]))
    def cancel(self, pick, first):
        """In whatever state, of whatever model; those in state `first` before others."""
        suspended = [call for m in self.parked for call in self.those("running", m)]
        calls = {"": [], "coming": self.those("coming"), "suspended": suspended}[first] or self.calls
        if not calls:
            return
        call = calls[pick % len(calls)]
        seen[f"cancelled {call.state}"] += 1
        model, was = self.models[call.m], call.state
        self.over(call)
        if was == "running":
            model.drop(call.pages)
            if call.m in self.parked:
                seen["cancelled suspended"] += 1
                if not self.those("running", call.m):
                    self.store.forget(self.parked.pop(call.m))

    @operation(count=st.integers(1, 3))
    def evict(self, count):
        for _ in range(min(count, len(self.cached[self.active]))):
            self.uncache()

    @operation(2, count=st.integers(1, 40))
    def dirty(self, count):
        """Something takes many pages, writes them and gives them back."""
        model = self.models[self.active]
        pages = self.take(min(count, model.allocator.available_size() // model.page))
        rows = model.rows(pages)
        for segment in model.kv.segments:
            segment[rows] = 7
        model.drop(pages)

    # --- the host

    @operation(2, pick=numbers)
    def restore(self, pick):
        waiting = self.those("waiting")
        if not waiting:
            return
        call = waiting[pick % len(waiting)]
        model = self.models[call.m]
        blocks = self.visible(call.m, call.ids[:-1], call.salt)
        base, have = self.on_device(call)
        end = len(blocks) * BLOCK
        if end <= have:
            return
        model.hold(base)
        pages = self.take((end - have) // model.page)
        if pages is None:
            model.drop(base)
            return
        restore = self.store.restore(model.kv, found(blocks), model.rows(pages), have)
        call.state = "coming"
        self.coming.append(Coming(call, call.ids[:end], have, base, pages, restore))

    @operation(pick=numbers)
    def arrived(self, pick):
        if not self.coming:
            return
        self.open()
        coming = self.coming.pop(pick % len(self.coming))
        call, model = coming.call, self.models[coming.call.m]
        got = self.store.restored(coming.restore)
        if got < len(coming.ids) - coming.have:
            assert self.corrupted & set(coming.restore.blocks)
            seen["refused what was corrupt"] += 1
        whole = (coming.have + got) // model.page
        pages = coming.base + coming.pages
        model.assert_holds(coming.ids[: coming.have + got], pages[:whole])
        model.drop(pages[whole:])
        if got and call.state == "coming":
            self.cached[call.m].append((coming.ids[: coming.have + got], call.salt, pages[:whole]))
            seen["restored"] += 1
        else:
            model.drop(pages[:whole])
        if call.state == "coming":
            call.state = "waiting"

    @operation()
    def hold_copies_back(self):
        if self.gate is None:
            self.gate = threading.Event()
            for stream in (self.store._in, self.store._out):
                stream.submit(self.gate.wait, 0)

    @operation()
    def poll(self):
        self.store.poll()

    @operation(pick=numbers)
    def corrupt(self, pick):
        self.open()
        identity = MODELS[self.active][0].identity
        blocks = [b for b in self.store.registry._blocks.values() if b.state == "host" and not b.pins]
        blocks = [b for b in blocks if b.descriptor.identity == identity] or blocks
        if blocks:
            block = blocks[pick % len(blocks)]
            self.store._pool[block.cell.offset + pick % block.cell.size] ^= 0x55
            self.corrupted.add(block)

    @operation(m=models)
    def forget_model(self, m):
        self.store.registry.drop_model(MODELS[m][0].identity)
        assert self.store.registry.tokens(MODELS[m][0].model) == 0

    # --- staging

    @operation(2, other=models, written=st.integers(0, 30))
    def stage(self, other, written):
        if other == self.active:
            return
        self.halt()
        self.staging = None
        source = self.models[self.active]
        plan = stage_plan(
            len(self.models[other].image),
            source.segments,
            source.allocator.unleased_pages(),
            source.gap,
            chunk_bytes=CHUNK,
            least_bytes=LEAST,
        )
        self.staging = Staging(other, ChunkMap(plan))
        source.allocator.lease(plan.pages, self.reclaim)
        self.write_chunks(written, land=True)

    @operation(count=st.integers(1, 30), land=st.booleans())
    def write_chunks(self, count, land):
        """Begun ones are half there."""
        for _ in range(count if self.staging else 0):
            index = self.staging.chunks.begin()
            if index is None:
                return
            source, target, size, _ = self.staging.chunks.plan.chunks[index]
            self.buffer[source : source + size // 2] = self.models[self.staging.target].image[target:][: size // 2]
            self.staging.flying.append(index)
            if land:
                self.land(index)

    @operation(pick=numbers, fails=st.integers(0, 5))
    def chunk_over(self, pick, fails):
        if self.staging and self.staging.flying:
            index = self.staging.flying[pick % len(self.staging.flying)]
            if fails:
                self.land(index)
            else:
                self.staging.flying.remove(index)
                self.staging.chunks.failed(index)

    def land(self, index):
        self.staging.flying.remove(index)
        source, target, size, _ = self.staging.chunks.plan.chunks[index]
        self.buffer[source : source + size] = self.models[self.staging.target].image[target : target + size]
        self.staging.chunks.written(index)

    def reclaim(self, page):
        """What the stager does when calls need its pages."""
        chunks = self.staging.chunks
        chunks.bar(page)
        for index in [i for i in self.staging.flying if chunks.plan.chunks[i].page < page]:
            self.land(index)
        seen["dirty"] += chunks.reclaim(page) > 0

    def halt(self):
        if self.staging is not None:
            self.staging.chunks.stop()
            self.models[self.active].allocator.end_lease()

    # --- switches

    @operation(2, other=st.none() | models, fails=st.integers(0, 7))
    def switch(self, other, fails):
        """To a model, or to the one that is being staged."""
        if other is None:
            other = self.staging.target if self.staging else self.active
        if other == self.active:
            return
        target, source, staging = other, self.active, self.staging
        self.halt()
        self.leave()
        for index in list(staging.flying if staging else ()):
            self.land(index)
        self.staging = None
        if not fails:
            self.buffer[: len(self.models[target].image) // 2] = 1  # a copy broke off
            target, staging = source, None
            seen["rolled back"] += 1
        self.bring_weights(target, staging.chunks if staging and staging.target == target else None)
        self.enter(target)

    @operation(other=models)
    def there_and_back(self, other):
        back = self.active
        self.switch(other, fails=1)
        self.switch(back, fails=1)

    def leave(self):
        """The barrier; then what runs keeps its exact rows on the host, if there is room, and is retracted if not."""
        m, model = self.active, self.models[self.active]
        self.settle()
        while self.cached[m]:
            self.uncache()
        running = self.those("running")
        assert model.held == Counter(page for call in running for page in call.pages), "somebody holds pages for nobody"
        rows = model.rows(sorted(model.held))
        if running and self.store.has_room([(model.kv, rows)]):
            self.parked[m] = self.store.park(model.kv, rows)
            assert self.parked[m] is not None
        elif running:
            seen["retracted at a switch"] += len(running)
            for call in running:
                self.retract(call)
        model.allocator.on_free = None
        self.active = None

    def bring_weights(self, m, chunks):
        image = self.models[m].image
        plan = (
            switch_plan(StagePlan(len(image), (), ()), (), (), chunk_bytes=CHUNK)
            if chunks is None
            else chunks.switch_plan(CHUNK)
        )
        bounce = torch.empty(CHUNK, dtype=torch.uint8)
        gather(plan, buffer=self.buffer, image=image, bounce=bounce, d2d=self.d2d, h2d=self.h2d)
        assert plan.d2d_bytes + plan.h2d_bytes == len(image)
        assert plan.dirty_bytes + plan.missing_bytes == plan.h2d_bytes
        assert torch.equal(self.buffer[: len(image)], image)
        seen[plan.path] += 1

    def enter(self, m):
        model = self.models[m]
        self.buffer[len(model.image) :] = GARBAGE
        model.allocator.on_free = model.spoil
        self.active = m
        if m in self.parked:
            assert self.store.unpark(self.parked.pop(m))
        for call in self.those("running"):
            model.assert_holds(call.ids, call.pages)
            seen["resumed"] += 1

    @operation(sure=st.sampled_from([False, False, False, True]))
    def crash(self, sure):
        """Whatever was under way: what closes must not wait, and what begins has nothing."""
        if not sure:
            return
        self.open()
        self.store.close()
        self.buffer.fill_(GARBAGE)
        before = self.saved
        self.boot()
        assert not self.store.check_idle()
        seen["crashed with blocks"] += bool(before)

    # --- parts of the above

    def visible(self, m, ids, salt):
        """What the host shows of a prefix: only what was saved, of these very tokens."""
        keys = self.models[m].block_keys(salt).upto(ids, len(ids))
        blocks = self.store.registry.match(keys)
        for n, block in enumerate(blocks):
            assert self.saved[block.key] == (m, tuple(ids[: (n + 1) * BLOCK]))
        return blocks

    def on_device(self, call):
        """(pages, tokens) of the longest cached prefix; the last token is always computed."""
        page = self.models[call.m].page
        best, have = [], 0
        for ids, salt, pages in self.cached[call.m]:
            same = next((i for i, (a, b) in enumerate(zip(ids, call.ids, strict=False)) if a != b), len(ids))
            whole = min(same, len(call.ids) - 1) // page
            if salt == call.salt and whole * page > have:
                best, have = pages[:whole], whole * page
        return list(best), have

    def take(self, pages):
        """So many of the active model's, cached prefixes evicted for them; None: there is no room."""
        model = self.models[self.active]
        while model.allocator.available_size() < pages * model.page:
            if not self.cached[self.active]:
                return None
            self.uncache()
        return model.take(pages)

    def uncache(self):
        _, _, pages = self.cached[self.active].pop(0)
        self.models[self.active].drop(pages)

    def save(self, call):
        model, tokens = self.models[call.m], len(call.ids) // BLOCK * BLOCK
        pages = call.pages[: tokens // model.page]
        if not tokens:
            return
        model.hold(pages)
        keys = model.block_keys(call.salt).upto(call.ids, tokens)
        self.saved |= {key: (call.m, tuple(call.ids[: (n + 1) * BLOCK])) for n, key in enumerate(keys)}
        self.store.save(model.kv, keys, model.rows(pages), lambda: model.drop(pages))

    def retract(self, call):
        seen["retracted"] += 1
        self.models[call.m].drop(call.pages)
        call.pages, call.state = [], "waiting"

    def over(self, call):
        call.state = "over"
        self.store.registry.unrefer(call.refs)
        self.calls.remove(call)

    def settle(self):
        self.open()
        self.store.drain()
        while self.coming:
            self.arrived(0)

    def open(self):
        if self.gate is not None:
            self.gate.set()
            self.gate = None

    # --- what always holds

    @invariant()
    def the_device_is_as_the_books_say(self):
        for m, model in enumerate(self.models):
            free = model.allocator.get_all_free_pages().tolist()
            assert sorted([*free, *model.held]) == list(range(1, model.allocator.pages + 1))
            unleased = model.allocator.unleased_pages()
            assert all(a < b for a, b in pairwise(unleased))
            assert m == self.active or not model.allocator.leased_pages
        active = self.models[self.active]
        assert torch.equal(self.buffer[: len(active.image)], active.image)
        if self.staging is None:
            return
        chunks, image = self.staging.chunks, self.models[self.staging.target].image
        for (source, target, size, _), state in zip(chunks.plan.chunks, chunks.states, strict=True):
            if state is State.CLEAN:
                assert torch.equal(self.buffer[source : source + size], image[target : target + size])

    @invariant()
    def the_host_holds_what_its_blocks_are_named_for(self):
        registry = self.store.registry
        assert registry.check() == ""
        under_way = [block for coming in self.coming for block in coming.restore.blocks]
        assert all(block.pins for block in under_way)
        for block in {*registry._blocks.values(), *under_way} - self.corrupted:
            if block.state != "copying":
                m, ids = self.saved[block.key]
                cell = self.store._pool[block.cell.offset : block.cell.offset + block.cell.size]
                assert torch.equal(cell, self.models[m].block(ids)), "a block was freed or overwritten under its holder"

    def teardown(self):
        """Everything ends, and nothing is left."""
        if self.staging:
            self.halt()
            self.staging = None
        self.settle()
        for m, model in enumerate(self.models):
            if m != self.active and m in self.parked:
                self.switch(m, fails=1)
            for call in self.those("running", m):
                model.drop(call.pages)
                self.over(call)
            self.settle()
        for call in list(self.calls):
            self.over(call)
        while self.cached[self.active]:
            self.uncache()
        for spec, _, _ in MODELS:
            self.store.registry.drop_model(spec.identity)
        assert self.store.check_idle() == ""
        assert self.store.stats().taken_bytes == 0
        assert not any(model.held for model in self.models)
        for closing in (self.store, self.d2d, self.h2d):
            closing.close()


def test_any_life_of_the_substrate():
    """Other lives are tried until all that can happen has: which examples come depends on this file's own text."""
    seen.clear()
    for lives in range(4):
        machine = seed(lives)(Life)
        run_state_machine_as_test(machine, settings=settings(max_examples=60, stateful_step_count=60, deadline=None))
        if all(seen[event] for event in EVENTS):
            return
    pytest.fail(f"never seen: {[event for event in EVENTS if not seen[event]]}")
