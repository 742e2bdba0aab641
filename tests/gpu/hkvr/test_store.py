"""Bytes out and back, beside the computation: exact, whole, checked, within the bandwidth that was asked for."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from talaria_gpu.hkvr.store import HostKv
from tests.gpu.hkvr.fake_device import FakeDevice, descriptor, found

CPU = torch.device("cpu")
MHA, MLA = descriptor("mha"), descriptor("mla", "mla", (12, 12, 12))


@pytest.fixture
def make():
    made = []

    def build(capacity=64 << 10, **options):
        made.append(HostKv(capacity, CPU, **options))
        return made[-1]

    yield build
    for store in made:
        store.drain()
        assert store.check_idle() == ""
        store.close()


def saved(store, device, ids, scattered=0):
    rows = device.take(len(ids), scattered)
    device.compute(ids, rows)
    assert store.save(device.kv, device.keys(ids), rows, lambda: None) == 0
    store.drain()
    device.give(rows)


def restored(store, device, ids, have=0, scattered=0):
    blocks = store.registry.match(device.keys(ids))
    end = len(blocks) * device.kv.descriptor.block_tokens
    rows = device.take(end - have, scattered)
    got = store.restored(store.restore(device.kv, found(blocks), rows, have))
    return rows, got


@pytest.mark.parametrize("spec", [MHA, MLA], ids=["mha", "mla"])
@pytest.mark.parametrize("out", [0, 1])
@pytest.mark.parametrize("back", [0, 1])
@pytest.mark.parametrize("have", [0, 2, 4, 6])
def test_there_and_back(make, spec, out, back, have):
    store, device = make(), FakeDevice(spec)
    ids = list(range(22))
    saved(store, device, ids, out)
    device.take(3)
    rows, got = restored(store, device, ids, have, back)
    assert got == len(rows) == 20 - have
    device.assert_holds(ids, rows, have)
    assert store.stats().h2d_bytes == got * spec.bytes_per_token
    assert store.restore_ms_per_token(spec.model) > 0


def test_only_new_blocks_are_copied(make):
    store, device = make(), FakeDevice(MHA)
    saved(store, device, list(range(16)))
    before = store.stats().d2h_bytes
    saved(store, device, list(range(24)))
    assert store.stats().d2h_bytes - before == 2 * MHA.block_bytes
    saved(store, device, list(range(24)))
    assert store.stats().d2h_bytes - before == 2 * MHA.block_bytes


def gate(stream):
    """Holds a stream's next copies back until set."""
    event = threading.Event()
    stream.submit(event.wait, 0)
    return event


def test_not_visible_and_rows_not_free_before_the_copy_has_completed(make):
    store, device = make(), FakeDevice(MHA)
    ids, ended = list(range(8)), []
    rows = device.take(8)
    device.compute(ids, rows)
    go = gate(store._out)
    store.save(device.kv, device.keys(ids), rows, lambda: ended.append(True))
    store.poll()
    assert store.registry.match(device.keys(ids)) == []
    assert not ended
    go.set()
    assert store.drain() == 1
    assert len(store.registry.match(device.keys(ids))) == 2
    assert ended


def test_the_barrier_is_the_outgoing_models_own(make):
    store, a, b = make(), FakeDevice(MHA), FakeDevice(MLA)
    ids = list(range(8))
    store.save(a.kv, a.keys(ids), a.take(8), lambda: None)
    store.drain()
    go = gate(store._out)
    store.save(b.kv, b.keys(ids), b.take(8), lambda: None)
    assert store.drain(MHA.identity) == 0
    assert store.saving == 1
    go.set()
    assert store.drain(MLA.identity) == 1


def test_a_corrupt_block_cuts_the_prefix_and_is_gone(make):
    store, device = make(), FakeDevice(MHA)
    ids = list(range(20))
    saved(store, device, ids)
    third = store.registry.match(device.keys(ids))[2]
    store._pool[third.cell.offset + 5] ^= 1
    rows, got = restored(store, device, ids)
    assert got == 8
    device.assert_holds(ids, rows[:8])
    assert (device.kv.segments[0][rows[8:]] == 0xFF).all()
    assert store.stats().counts.corrupt == 1
    assert len(store.registry.match(device.keys(ids))) == 2
    saved(store, device, ids)
    assert len(store.registry.match(device.keys(ids))) == 5


def test_without_verification_nothing_is_hashed(make):
    store, device = make(verify=False), FakeDevice(MHA)
    ids = list(range(8))
    saved(store, device, ids)
    store._pool[store.registry.match(device.keys(ids))[0].cell.offset] ^= 1
    assert restored(store, device, ids)[1] == 8
    assert store.stats().counts.corrupt == 0


def test_a_failed_copy_is_never_visible(make):
    store, device = make(), FakeDevice(MHA)
    ids, ended = list(range(8)), []
    store.save(device.kv, device.keys(ids), torch.arange(1000, 1008), lambda: ended.append(True))
    store.drain()
    assert ended
    assert store.registry.match(device.keys(ids)) == []
    assert store.stats().counts.failed == 2
    saved(store, device, ids)
    assert restored(store, device, ids)[1] == 8


def test_a_full_pool_evicts_and_one_full_of_transfers_refuses(make):
    store, device = make(4 * MHA.block_bytes, slab_bytes=MHA.block_bytes), FakeDevice(MHA)
    saved(store, device, list(range(16)))
    go = gate(store._out)
    assert store.save(device.kv, device.keys(range(100, 124)), device.take(24), lambda: None) == 2
    assert store.stats().counts.evicted == 4
    go.set()


def test_dropped_while_being_restored(make):
    """A block that goes in mid-restore keeps its bytes until the copy is over."""
    store, device = make(), FakeDevice(MHA)
    ids = list(range(8))
    saved(store, device, ids)
    go = gate(store._in)
    rows = device.take(8)
    restore = store.restore(device.kv, found(store.registry.match(device.keys(ids))), rows, 0)
    store.registry.drop_model(MHA.identity)
    assert store.stats().taken_bytes == 2 * MHA.block_bytes
    go.set()
    assert store.restored(restore) == 8
    device.assert_holds(ids, rows)
    assert store.stats().taken_bytes == 0


@pytest.mark.parametrize("poison", [False, True])
def test_cells_that_are_given_back_are_garbage_if_asked_for(make, poison):
    store, device = make(poison=poison), FakeDevice(MHA)
    ids = list(range(8))
    saved(store, device, ids)
    cells = [block.cell for block in store.registry.match(device.keys(ids))]
    parked = store.park(device.kv, device.take(4))
    cells += [piece.cell for piece in parked.pieces]
    store.forget(parked)
    store.registry.drop_model(MHA.identity)
    spoilt = [bool((store._pool[cell.offset : cell.offset + cell.size] == 0xFF).all()) for cell in cells]
    assert spoilt[:2] == [poison] * 2


def test_parked_rows_come_back_exactly_and_to_their_places(make):
    store, device = make(), FakeDevice(MLA)
    rows = device.take(11, scattered=1)
    device.compute(range(11), rows)
    parked = store.park(device.kv, rows)
    for segment in device.kv.segments:
        segment.fill_(0xFF)
    assert store.unpark(parked)
    device.assert_holds(range(11), rows)
    assert store.stats().taken_bytes == 0


def test_damaged_parked_rows_are_not_put_back(make):
    store, device = make(), FakeDevice(MHA)
    parked = store.park(device.kv, device.take(6))
    store._pool[parked.pieces[1].cell.offset] ^= 1
    assert not store.unpark(parked)
    assert store.stats().taken_bytes == 0


def test_no_room_to_park(make):
    store, device = make(4 * MHA.block_bytes, slab_bytes=MHA.block_bytes), FakeDevice(MHA)
    saved(store, device, list(range(16)))
    assert store.park(device.kv, device.take(17)) is None
    assert store.registry.counts.evicted == 0
    parked = store.park(device.kv, device.take(16))
    assert store.registry.counts.evicted == 4
    store.forget(parked)


def broken(*_arguments, **_options):
    raise OSError("the link is down")


def test_a_park_that_fails_keeps_nothing(make, monkeypatch):
    store, device = make(), FakeDevice(MHA)
    with monkeypatch.context() as patch:
        patch.setattr(store._outward, "out", broken)
        assert store.park(device.kv, device.take(6)) is None
    assert store.stats().taken_bytes == 0
    assert store.stats().counts.failed == 1
    store.forget(store.park(device.kv, device.take(6)))


def test_an_unpark_that_fails_is_as_if_the_rows_were_damaged(make, monkeypatch):
    store, device = make(), FakeDevice(MHA)
    parked = store.park(device.kv, device.take(6))
    with monkeypatch.context() as patch:
        patch.setattr(store._inward, "back", broken)
        assert not store.unpark(parked)
    assert store.stats().taken_bytes == 0
    assert (store.stats().counts.failed, store.stats().counts.corrupt) == (1, 0)


def test_emulated_bandwidth_is_kept_to(make):
    size = 64 * MHA.bytes_per_token
    store, device = make(h2d_gbps=size / 0.05 / 1e9), FakeDevice(MHA)
    ids = list(range(64))
    saved(store, device, ids)
    started = time.perf_counter()
    restored(store, device, ids)
    assert time.perf_counter() - started >= 0.05
