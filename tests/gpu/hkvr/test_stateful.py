"""Any order of saves, restores, evictions, corruption, parking and failures, against a model of the truth."""

from __future__ import annotations

import threading

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from talaria_gpu.hkvr.keys import BlockKeys
from talaria_gpu.hkvr.records import Snapshot
from talaria_gpu.hkvr.states import find
from talaria_gpu.hkvr.store import HostKv
from tests.gpu.hkvr.fake_device import FakeDevice, FakeStates, descriptor, found

SPECS = (descriptor("mha"), descriptor("mla", "mla", (12, 12, 12)), descriptor("wide", rows=(16, 48)))
HYBRID = descriptor("hybrid", complete=False)
CAPACITY = 2400
models = st.sampled_from(range(len(SPECS)))
prefixes = st.tuples(st.integers(0, 2), st.integers(1, 24), st.sampled_from(["", "t"]))


def ids_of(root, length):
    """Sequences that share prefixes: of one root, the shorter is the longer's beginning."""
    return [root * 1000 + i for i in range(length)]


class Life(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.store = HostKv(CAPACITY, torch.device("cpu"), slab_bytes=300)
        self.devices = [FakeDevice(spec, 256) for spec in SPECS]
        self.saves, self.reads, self.parked, self.referred = {}, [], [], []
        self.corrupted: set[bytes] = set()
        self.gate: threading.Event | None = None
        self.hybrid, self.states = FakeDevice(HYBRID, 256), FakeStates(HYBRID, 64)

    @rule(prefix=prefixes)
    def save_state(self, prefix):
        root, length, salt = prefix
        if len(self.hybrid.free) < length or length < 4:
            return
        ids, rows, slot = ids_of(root, length), self.hybrid.take(length), self.states.take()
        self.hybrid.compute(ids, rows)
        self.states.compute(ids, slot)
        entry = object()
        self.saves[entry] = self.hybrid

        def done():
            del self.saves[entry]
            self.hybrid.give(rows)
            self.states.give(slot)

        keys = BlockKeys(HYBRID.identity, salt, 4)
        snapshot = Snapshot(self.states.parts, keys.exact(ids, length), slot)
        self.store.save(self.hybrid.kv, keys.upto(ids, length), rows, done, snapshot)

    @rule(prefix=prefixes, have=st.integers(0, 6))
    def restore_state(self, prefix, have):
        root, length, salt = prefix
        ids, keys = ids_of(root, length), BlockKeys(HYBRID.identity, salt, 4)
        what = find(self.store.registry, keys, ids, length, kv=HYBRID, parts=2)
        have *= 2
        if what.tokens <= have or len(self.hybrid.free) < what.tokens or self.gate is not None:
            return
        rows, slot = self.hybrid.take(what.tokens - have), self.states.take()
        got = self.store.restored(self.store.restore(self.hybrid.kv, what, rows, have, (self.states.parts, slot)))
        if got:
            assert got == len(rows)
            self.hybrid.assert_holds(ids, rows, have)
            self.states.assert_holds(ids[: what.tokens], slot)
        else:
            assert self.corrupted
        self.hybrid.give(rows)
        self.states.give(slot)

    @rule(m=models, prefix=prefixes, scattered=st.integers(0, 1))
    def save(self, m, prefix, scattered):
        device, (root, length, salt) = self.devices[m], prefix
        if len(device.free) < 2 * length:
            return
        ids, rows = ids_of(root, length), device.take(length, scattered)
        device.compute(ids, rows)
        entry = object()
        self.saves[entry] = device

        def done():
            del self.saves[entry]
            device.give(rows)

        self.store.save(device.kv, device.keys(ids, salt), rows, done)

    @rule(m=models, prefix=prefixes)
    def save_fails(self, m, prefix):
        device, (root, length, salt) = self.devices[m], prefix
        rows = torch.full((length,), 10**6, dtype=torch.int64)
        self.store.save(device.kv, device.keys(ids_of(root, length), salt), rows, lambda: None)

    @rule(m=models, prefix=prefixes, have=st.integers(0, 6), scattered=st.integers(0, 1))
    def restore(self, m, prefix, have, scattered):
        device, (root, length, salt) = self.devices[m], prefix
        ids = ids_of(root, length)
        blocks = self.store.registry.match(device.keys(ids, salt))
        end, have = len(blocks) * 4, have * 2
        if end <= have or len(device.free) < 2 * (end - have):
            return
        rows = device.take(end - have, scattered)
        self.reads.append((self.store.restore(device.kv, found(blocks), rows, have), device, ids, rows, have))

    @rule(pick=st.integers(0, 9))
    def restored(self, pick):
        if not self.reads:
            return
        self.open()
        restore, device, ids, rows, have = self.reads.pop(pick % len(self.reads))
        got = self.store.restored(restore)
        device.assert_holds(ids, rows[:got], have)
        if got < len(rows):
            assert self.corrupted
        device.give(rows)

    @rule(pick=st.integers(0, 99))
    def corrupt(self, pick):
        self.open()
        blocks = [b for b in self.store.registry._blocks.values() if b.state == "host" and not b.pins]
        if blocks:
            block = blocks[pick % len(blocks)]
            self.store._pool[block.cell.offset + pick % block.cell.size] ^= 255
            self.corrupted.add(block.key)

    @rule(m=models, count=st.integers(1, 13), scattered=st.integers(0, 1))
    def park(self, m, count, scattered):
        device = self.devices[m]
        if len(device.free) < 2 * count:
            return
        self.open()
        rows = device.take(count, scattered)
        device.compute(range(count), rows)
        evicted, room = self.store.registry.counts.evicted, self.store.has_room([(device.kv, rows)])
        parked = self.store.park(device.kv, rows)
        assert (parked is not None) == room
        for segment in device.kv.segments:
            segment[rows] = 0xFF
        if parked is None:
            assert self.store.registry.counts.evicted == evicted
            device.give(rows)
        else:
            self.parked.append((parked, device, rows))

    @rule(pick=st.integers(0, 9), back=st.booleans())
    def unpark(self, pick, back):
        if not self.parked:
            return
        self.open()
        parked, device, rows = self.parked.pop(pick % len(self.parked))
        if back:
            assert self.store.unpark(parked)
            device.assert_holds(range(len(rows)), rows)
        else:
            self.store.forget(parked)
        device.give(rows)

    @rule(m=models, prefix=prefixes)
    def refer(self, m, prefix):
        root, length, salt = prefix
        blocks = self.store.registry.match(self.devices[m].keys(ids_of(root, length), salt))
        self.store.registry.refer(blocks)
        self.referred.append(blocks)

    @rule(pick=st.integers(0, 9))
    def unrefer(self, pick):
        if self.referred:
            self.store.registry.unrefer(self.referred.pop(pick % len(self.referred)))

    @rule()
    def hold_copies_back(self):
        if self.gate is None:
            self.gate = threading.Event()
            for stream in (self.store._in, self.store._out):
                stream.submit(self.gate.wait, 0)

    @rule()
    def poll(self):
        self.store.poll()

    @rule(m=st.none() | models)
    def drain(self, m):
        self.open()
        identity = None if m is None else SPECS[m].identity
        self.store.drain(identity)
        assert all(m is not None and device.kv.descriptor.identity != identity for device in self.saves.values())

    @rule(m=models)
    def drop_model(self, m):
        self.store.registry.drop_model(SPECS[m].identity)
        assert self.store.registry.tokens(SPECS[m].model) == 0

    def open(self):
        if self.gate is not None:
            self.gate.set()
            self.gate = None

    @invariant()
    def books_are_right(self):
        assert self.store.registry.check() == ""
        assert self.store.stats().taken_bytes <= CAPACITY
        for restore, *_ in self.reads:
            assert all(block.pins for block in restore.blocks)

    def teardown(self):
        self.open()
        while self.reads:
            self.restored(0)
        while self.parked:
            self.unpark(0, back=True)
        self.store.drain()
        assert not self.saves
        for blocks in self.referred:
            self.store.registry.unrefer(blocks)
        for spec in (*SPECS, HYBRID):
            self.store.registry.drop_model(spec.identity)
        assert self.store.check_idle() == ""
        assert self.store.stats().taken_bytes == 0
        for device in self.devices:
            assert len(device.free) == 256
        assert (len(self.hybrid.free), len(self.states.free)) == (256, 63)
        self.store.close()


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
