"""What one of two substrate ranks does in a test: a pool, a registry and copies of its own, and agreement over gloo."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import torch

from talaria_gpu.hkvr.agreement import agree_on
from talaria_gpu.hkvr.gloo import GlooRanks, RankLostError
from talaria_gpu.hkvr.keys import BlockKeys
from talaria_gpu.hkvr.records import Snapshot
from talaria_gpu.hkvr.states import Found, find
from talaria_gpu.hkvr.store import HostKv
from tests.gpu.hkvr.fake_device import FakeDevice, FakeStates, descriptor, found

IDS = list(range(24))


def lags(ranks: GlooRanks, store: HostKv, device: FakeDevice) -> object:
    """Rank 1's copy takes its time: no rank sees the prefix before it is over."""
    rows = device.take(24)
    device.compute(IDS, rows)
    gate = threading.Event()
    if ranks.rank:
        store._out.submit(gate.wait, 0)
    store.save(device.kv, device.keys(IDS), rows, lambda: None)
    if not ranks.rank:
        store._saves[0].transfer.wait()
    store.poll()
    before = len(store.registry.match(device.keys(IDS)))
    gate.set()
    store.drain()
    return before, len(store.registry.match(device.keys(IDS)))


def has_less(ranks: GlooRanks, store: HostKv, device: FakeDevice) -> object:
    """Rank 1 has four blocks of six."""
    return agree_on(ranks, device.keys(IDS[: 16 if ranks.rank else 24]))


def differs(ranks: GlooRanks, store: HostKv, device: FakeDevice) -> object:
    """Rank 1's third block is another one."""
    ids = [*IDS[:9], 999, *IDS[10:]] if ranks.rank else IDS
    return agree_on(ranks, device.keys(ids))


def has_nothing(ranks: GlooRanks, store: HostKv, device: FakeDevice) -> object:
    return agree_on(ranks, [] if ranks.rank else device.keys(IDS))


def kept(ranks: GlooRanks, store: HostKv, device: FakeDevice) -> list[str]:
    """All six blocks are saved on both, and rank 1 loses the last three. What `done` will be told goes to the list."""
    rows, ended = device.take(24), []
    device.compute(IDS, rows)
    store.save(device.kv, device.keys(IDS), rows, lambda: ended.append("first"))
    store.drain()
    if ranks.rank:
        store.registry.drop(store.registry.get(device.keys(IDS)[3]))
    store.save(device.kv, device.keys(IDS[:8]), rows[:8], lambda: ended.append("nothing new"))
    store.save(device.kv, device.keys(IDS), rows, lambda: ended.append("what rank 1 lost"))
    return ended


def saves_what_only_it_lacks(ranks: GlooRanks, store: HostKv, device: FakeDevice) -> object:
    """Rank 0 has nothing to copy where rank 1 has: their saves end together all the same."""
    ended = kept(ranks, store, device)
    waiting = list(ended)
    store.drain()
    return waiting, ended, len(store.registry.match(device.keys(IDS))), store.check_idle()


def drops_what_only_it_has(ranks: GlooRanks, store: HostKv, device: FakeDevice) -> object:
    """Rank 1 has lost three blocks: rank 0 drops them, too, and both save and restore them again."""
    rows = device.take(24)
    device.compute(IDS, rows)
    store.save(device.kv, device.keys(IDS), rows, lambda: None)
    store.drain()
    if ranks.rank:
        store.registry.drop(store.registry.get(device.keys(IDS)[3]))
    had = len(store.registry.match(device.keys(IDS)))
    agreed = store.agreed(found(store.registry.match(device.keys(IDS))))
    left = len(store.registry.match(device.keys(IDS)))
    store.save(device.kv, device.keys(IDS), rows, lambda: None)
    before = store.stats().d2h_bytes
    store.drain()
    copied = (store.stats().d2h_bytes - before) // device.kv.descriptor.block_bytes
    whole = store.agreed(found(store.registry.match(device.keys(IDS))))
    back = device.take(24)
    got = store.restored(store.restore(device.kv, whole, back, 0))
    device.assert_holds(IDS, back)
    return had, agreed.tokens, left, copied, got, store.stats().counts.disagreed, store.check_idle()


def has_another_state(ranks: GlooRanks, store: HostKv, device: FakeDevice) -> object:
    """Rank 1 lacks the last part of a hybrid's state: neither has a use for the other. The KV stays, for other states."""
    kv = FakeDevice(descriptor("hybrid", complete=False))
    states, keys = FakeStates(kv.kv.descriptor), BlockKeys(kv.kv.descriptor.identity, "", 4)
    rows, slot = kv.take(8), states.take()
    kv.compute(IDS[:8], rows)
    states.compute(IDS[:8], slot)
    snapshot = Snapshot(states.parts, keys.exact(IDS, 8), slot)

    def there() -> Found:
        return find(store.registry, keys, IDS, 8, kv=kv.kv.descriptor, parts=2)

    def save() -> None:
        store.save(kv.kv, keys.upto(IDS, 8), rows, lambda: None, snapshot)
        store.drain()

    save()
    if ranks.rank:
        store.registry.drop(there().states[1])
    agreed = store.agreed(there())
    left = there().tokens
    blocks = len(store.registry.match(keys.upto(IDS, 8)))
    save()
    return agreed.tokens, left, blocks, store.agreed(there()).tokens, store.check_idle()


def is_corrupt(ranks: GlooRanks, store: HostKv, device: FakeDevice) -> object:
    """A block of rank 1 was damaged: both restore what is before it, and forget it."""
    rows = device.take(24)
    device.compute(IDS, rows)
    store.save(device.kv, device.keys(IDS), rows, lambda: None)
    store.drain()
    blocks = store.registry.match(device.keys(IDS))
    if ranks.rank:
        store._pool[blocks[3].cell.offset] ^= 1
    rows = device.take(24)
    got = store.restored(store.restore(device.kv, found(blocks), rows, 0))
    device.assert_holds(IDS, rows[:got])
    return got, len(store.registry.match(device.keys(IDS))), store.check_idle()


def park_is_damaged(ranks: GlooRanks, store: HostKv, device: FakeDevice) -> object:
    parked = store.park(device.kv, device.take(8))
    assert parked is not None
    if ranks.rank:
        store._pool[parked.pieces[1].cell.offset] ^= 1
    return store.unpark(parked)


def dies(ranks: GlooRanks, store: HostKv, device: FakeDevice) -> object:
    """Rank 1 is killed in the middle of a copy."""
    rows = device.take(24)
    if ranks.rank:
        store._out.submit(lambda: os.kill(os.getpid(), signal.SIGKILL), 0)
    store.save(device.kv, device.keys(IDS), rows, lambda: None)
    try:
        store.drain()
    except RankLostError:
        return "lost"
    return "nothing happened"


def hangs(ranks: GlooRanks, store: HostKv, device: FakeDevice) -> object:
    """Rank 1 stops for good."""
    if ranks.rank:
        os.kill(os.getpid(), signal.SIGSTOP)
    try:
        ranks.least([1])
    except RankLostError:
        return "lost"
    return "nothing happened"


def run(scenarios: list[str], rank: int, meeting: str, out) -> None:
    """One after the other, each with a pool of its own; what came of each goes to `out`."""
    ranks = GlooRanks(rank, 2, Path(meeting), timeout_s=30.0)
    if scenarios == ["hangs"]:  # the time-out holds for the meeting too: a short one only once both are here
        ranks.least([0])
        ranks = GlooRanks(rank, 2, Path(f"{meeting}-again"), timeout_s=4.0)
    for scenario in scenarios:
        device = FakeDevice(descriptor("m"))
        store = HostKv(64 << 10, torch.device("cpu"), ranks=ranks)
        out.send(globals()[scenario](ranks, store, device))
        store.close()
