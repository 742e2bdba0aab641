"""Recurrent states: each of one exact prefix, whole or not at all, and gone before KV that something else still needs."""

from __future__ import annotations

import pytest
import torch

from talaria_gpu.hkvr.keys import BlockKeys
from talaria_gpu.hkvr.records import Snapshot
from talaria_gpu.hkvr.states import Found, find
from talaria_gpu.hkvr.store import HostKv
from tests.gpu.hkvr.fake_device import FakeDevice, FakeStates, descriptor

KV = descriptor("hybrid", complete=False)
BLOCK = KV.block_tokens


class Rig:
    def __init__(self, capacity: int, slab: int = 256) -> None:
        self.store = HostKv(capacity, torch.device("cpu"), slab_bytes=slab)
        self.device = FakeDevice(KV)
        self.states = FakeStates(KV)

    def save(self, ids, tokens: int, salt="", rows: torch.Tensor | None = None) -> int:
        """Checkpoint the prefix of `tokens`, with the state there."""
        rows = self.device.take(tokens)
        self.device.compute(ids[:tokens], rows)
        slot = self.states.take()
        self.states.compute(ids[:tokens], slot)
        keys = BlockKeys(KV.identity, salt, BLOCK)
        snapshot = Snapshot(self.states.parts, keys.exact(ids, tokens), slot)
        refused = self.store.save(self.device.kv, keys.upto(ids, tokens), rows, lambda: None, snapshot)
        self.store.drain()
        self.device.give(rows)
        self.states.give(slot)
        return refused

    def find(self, ids, tokens: int | None = None, salt="") -> Found:
        keys = BlockKeys(KV.identity, salt, BLOCK)
        wanted = len(ids) if tokens is None else tokens
        return find(self.store.registry, keys, ids, wanted, kv=KV, parts=len(self.states.parts))

    def restore(self, ids, found: Found, have: int = 0) -> int:
        rows, slot = self.device.take(found.tokens - have), self.states.take()
        restore = self.store.restore(self.device.kv, found, rows, have, (self.states.parts, slot))
        got = self.store.restored(restore)
        if got:
            assert got == found.tokens - have
            self.device.assert_holds(ids, rows, have)
            self.states.assert_holds(ids[: found.tokens], slot)
        self.device.give(rows)
        self.states.give(slot)
        return got


@pytest.fixture
def rig():
    made = Rig(64 << 10)
    yield made
    assert made.store.check_idle() == ""
    made.store.close()


IDS = list(range(100, 140))


@pytest.mark.parametrize("tokens", [4, 8, 11, 23])
@pytest.mark.parametrize("have", [0, 2, 4])
def test_a_state_comes_back_with_its_exact_prefix(rig, tokens, have):
    assert rig.save(IDS, tokens) == 0
    found = rig.find(IDS)
    assert found.tokens == tokens
    if have < tokens:
        assert rig.restore(IDS, found, have) == tokens - have


def test_the_longest_state_below_the_limit(rig):
    for tokens in (6, 12, 17):
        rig.save(IDS, tokens)
    assert [rig.find(IDS, limit).tokens for limit in (40, 17, 16, 12, 11, 6, 5)] == [17, 17, 12, 12, 6, 6, 0]


def test_another_continuation_finds_only_what_it_shares(rig):
    rig.save(IDS, 8)
    rig.save(IDS, 14)
    other = [*IDS[:13], 1, 2, 3]
    assert rig.find(other).tokens == 8
    assert rig.find([1, *IDS]).tokens == 0
    assert rig.find(IDS, salt="tenant").tokens == 0


def test_kv_is_shared_between_states(rig):
    rig.save(IDS, 20)
    before = rig.store.stats().d2h_bytes
    rig.save(IDS, 24)
    assert rig.store.stats().d2h_bytes - before == KV.block_bytes + rig.states.bytes
    rig.save(IDS, 24)
    assert rig.store.stats().d2h_bytes - before == KV.block_bytes + rig.states.bytes


def test_without_its_state_kv_is_not_found(rig):
    rig.save(IDS, 12)
    rig.store.registry.drop(rig.find(IDS).states[0])
    assert rig.find(IDS).tokens == 0


def test_a_state_that_lacks_a_part_is_not_found(rig):
    rig.save(IDS, 8)
    rig.save(IDS, 12)
    rig.store.registry.drop(rig.find(IDS).states[-1])
    assert rig.find(IDS).tokens == 8


@pytest.mark.parametrize("which", [0, 1, -2, -1])
def test_with_one_corrupt_block_nothing_is_restored(rig, which):
    """Neither KV without the state nor a state without its KV; afterwards an earlier state serves."""
    rig.save(IDS, 8)
    rig.save(IDS, 18)
    found = rig.find(IDS)
    victim = found.all_blocks[which]
    rig.store._pool[victim.cell.offset + 1] ^= 1
    assert rig.restore(IDS, found) == 0
    assert rig.store.stats().counts.corrupt == 1
    again = rig.find(IDS)
    assert again.tokens == (8 if which < 0 else 0)
    if again.tokens:
        assert rig.restore(IDS, again) == 8


def test_a_near_state_goes_before_a_far_one_and_kv_without_a_state_first():
    """Two states of one session 2 tokens apart: what the later one spares is little. Then whatever leads nowhere."""
    rig = Rig(2400)
    registry = rig.store.registry
    rig.save(IDS, 16)
    rig.save(IDS, 18)
    assert rig.find(IDS).tokens == 18
    while rig.find(IDS).tokens == 18:
        assert registry._evict()
    assert rig.find(IDS).tokens == 16
    registry._evict()  # the other part, and then the tail: they lead nowhere
    registry._evict()
    assert rig.find(IDS).tokens == 16
    assert len(registry) == 4 + len(rig.states.parts)
    while rig.find(IDS).tokens:
        registry._evict()
    rig.save([7, 8, 9, 10], 4)
    for _ in range(4 + len(rig.states.parts) - 1):  # the orphaned KV, though it was used no longer ago
        registry._evict()
    assert rig.find([7, 8, 9, 10]).tokens == 4
    assert rig.store.check_idle() == ""
    rig.store.close()


def test_a_full_pool_refuses_the_state_and_nothing_is_found():
    rig = Rig(KV.block_bytes * 3, slab=KV.block_bytes)
    assert rig.save(IDS, 12) > 0
    assert rig.find(IDS).tokens == 0
    assert rig.store.check_idle() == ""
    rig.store.close()
