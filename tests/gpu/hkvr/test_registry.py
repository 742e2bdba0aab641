"""What is visible, what stays, what goes first."""

from __future__ import annotations

import random

import pytest

from talaria_gpu.hkvr.descriptor import KvDescriptor
from talaria_gpu.hkvr.registry import Registry
from talaria_gpu.hkvr.slabs import SlabPool
from tests.gpu.hkvr.fake_device import descriptor as small

BLOCK = 64


def descriptor(name="m", family="mha", rows=(2, 2)):
    return KvDescriptor(
        model=name,
        identity=name.encode() * 16,
        family=family,
        dtype="f",
        page_tokens=16,
        block_tokens=16,
        row_bytes=rows,
    )


M = descriptor()


@pytest.fixture
def registry():
    return Registry(SlabPool(4 * BLOCK, BLOCK), lambda _: None)


def chain(registry, names, d=M, parent=None):
    blocks = []
    for name in names:
        parent = registry.reserve(d, name.encode(), parent)
        assert parent is not None
        registry.commit(parent, 7)
        blocks.append(parent)
    return blocks


def names(registry, text):
    return "".join(b.key.decode() for b in registry.match([c.encode() for c in text]))


def test_a_block_is_visible_only_when_its_copy_has_completed(registry):
    a = registry.reserve(M, b"a", None)
    b = registry.reserve(M, b"b", a)
    registry.commit(b, 1)
    assert names(registry, "ab") == ""
    registry.commit(a, 1)
    assert names(registry, "ab") == "ab"
    assert registry.tokens("m") == 32


def test_leaves_go_first_and_the_longest_unused_among_them(registry):
    chain(registry, "abc")
    chain(registry, "x")
    chain(registry, "y")
    assert names(registry, "abc") == "ab"
    assert names(registry, "x") == "x"
    assert registry.counts.evicted == 1


def test_what_came_back_stays_longer(registry):
    a, b, c, _ = (chain(registry, n)[0] for n in "abcd")
    registry.touch([a])
    chain(registry, "e")
    chain(registry, "f")
    assert a.state == "host"
    assert {b.state, c.state} == {"gone"}


def test_what_is_dear_to_recompute_per_byte_stays_longer():
    cost = {"dear": 9.0, "cheap": 1.0}
    registry = Registry(SlabPool(2 * BLOCK, BLOCK), lambda _: None, cost.__getitem__)
    dear, cheap = chain(registry, "a", descriptor("dear"))[0], chain(registry, "b", descriptor("cheap"))[0]
    chain(registry, "c", descriptor("cheap"))
    assert (dear.state, cheap.state) == ("host", "gone")


def test_but_not_for_ever():
    registry = Registry(SlabPool(2 * BLOCK, BLOCK), lambda _: None, {"dear": 9.0, "cheap": 1.0}.__getitem__)
    dear = chain(registry, "a", descriptor("dear"))[0]
    for i in range(40):
        block = registry.reserve(descriptor("cheap"), bytes([i]), None)
        registry.commit(block, 0)
        registry.touch([block])
    assert dear.state == "gone"


def test_a_pin_keeps_the_bytes_and_a_full_pool_of_pins_refuses(registry):
    blocks = chain(registry, "abcd")
    registry.pin(blocks)
    assert registry.reserve(M, b"e", None) is None
    assert registry.counts.refused == 1
    registry.drop(blocks[0])
    assert names(registry, "abcd") == ""
    assert registry.pool.taken_bytes == 4 * BLOCK
    assert registry.check() == ""
    registry.unpin(blocks)
    assert registry.pool.taken_bytes == 0
    assert registry.check() == ""


def test_a_ref_delays_eviction_but_does_not_forbid_it(registry):
    a, b, c, d = (chain(registry, n)[0] for n in "abcd")
    registry.refer([a, b])
    chain(registry, "ef")
    assert [x.state for x in (a, b, c, d)] == ["host", "host", "gone", "gone"]
    chain(registry, "ghij")
    assert [x.state for x in (a, b)] == ["gone", "gone"]
    registry.unrefer([a, b])
    assert registry.check() == ""


def test_pins_and_refs_are_counted_apart(registry):
    (a,) = chain(registry, "a")
    registry.refer([a])
    registry.pin([a])
    registry.unrefer([a])
    assert (a.pins, a.refs) == (1, 0)
    with pytest.raises(ValueError, match="refs"):
        registry.unrefer([a])
    registry.unpin([a])
    with pytest.raises(ValueError, match="unpinned"):
        registry.unpin([a])


def test_dropping_takes_what_follows_along(registry):
    a, b = chain(registry, "ab")
    chain(registry, "cd", parent=a)
    assert registry.drop(b) == 1
    assert names(registry, "acd") == "acd"
    assert registry.drop(a) == 3
    assert len(registry) == registry.pool.taken_bytes == 0


def test_a_model_can_be_forgotten_alone(registry):
    chain(registry, "ab")
    chain(registry, "x", descriptor("n"))
    assert registry.drop_model(M.identity) == 2
    assert (registry.tokens("m"), registry.tokens("n")) == (0, 16)


def test_families_share_the_pool_and_take_from_each_other():
    moved = []
    registry = Registry(SlabPool(4 * BLOCK, BLOCK), moved.append)
    latent = descriptor("latent", "mla", (1,))
    chain(registry, "abcdefghijklmnop", latent)
    assert registry.tokens("latent") == 256
    chain(registry, "AB")
    assert registry.tokens("m") == 32
    assert registry.tokens("latent") == 128
    assert names(registry, "abcdefghijklmnop") == "abcdefgh"
    assert registry.check() == ""


def test_half_empty_slabs_are_compacted_rather_than_emptied_by_eviction():
    moved = []
    registry = Registry(SlabPool(2 * BLOCK, BLOCK), moved.append)
    latent = descriptor("latent", "mla", (1,))
    blocks = [chain(registry, n, latent)[0] for n in "abcdefgh"]
    for block in blocks[::2]:
        registry.drop(block)
    chain(registry, "A")
    assert len(moved) == 2
    assert registry.counts.evicted == 0
    assert names(registry, "b") + names(registry, "d") + names(registry, "f") + names(registry, "h") == "bdfh"
    assert registry.check() == ""


def test_private_cells_are_nobodys_prey(registry):
    chain(registry, "abcd")
    cells = registry.take_private(BLOCK, 3)
    assert registry.take_private(BLOCK, 2) is None
    assert registry.reserve(M, b"x", None) is not None
    assert registry.reserve(M, b"y", None) is None
    registry.give_private(cells)
    assert registry.reserve(M, b"y", None) is not None
    assert registry.check() == ""


def test_a_block_larger_than_a_slab_finds_no_room(registry):
    assert registry.reserve(descriptor("big", rows=(4, 4)), b"a", None) is None


def test_a_descriptor_says_what_cannot_be():
    with pytest.raises(ValueError, match="pages"):
        KvDescriptor(model="m", identity=b"", family="mla", dtype="f", page_tokens=16, block_tokens=24, row_bytes=(1,))
    with pytest.raises(ValueError, match="segments"):
        descriptor(rows=(1, 1, 1))
    assert descriptor(rows=(2, 4)).fragments() == [(0, 2), (32, 4)]


def test_void_entries_of_the_eviction_queue_do_not_pile_up():
    """What blocks leave there as they gain and lose children, pins and refs: finding a leaf must not wade through it."""
    registry = Registry(SlabPool(2000, 4), lambda _: None)
    d = descriptor("tiny", "mla", (1,))
    d = KvDescriptor(**{**{n: getattr(d, n) for n in d.__slots__}, "page_tokens": 1, "block_tokens": 1})
    for prompt in range(200):
        blocks = chain(registry, [f"{prompt}/{n}" for n in range(32)], d)
        registry.refer(blocks)
        registry.touch(blocks)
        registry.pin(blocks)
        registry.unpin(blocks)
        registry.unrefer(blocks)
        leaves = sum(not block.children for block in registry._blocks.values())
        assert len(registry._queue) <= 64 + 2 * leaves
    assert registry.counts.evicted > 1000
    assert registry.check() == ""


@pytest.mark.parametrize("seed", [1, 2, 3, 260, 679, 909, 919])
def test_there_is_room_exactly_when_it_says_so(seed):
    """Pins, private cells and cells of three sizes in any order; the last four need a full slab to be emptied into gaps."""
    r = random.Random(seed)
    specs = (
        small("mha"), small("mla", "mla", (12, 12, 12)), small("wide", rows=(16, 48)),
        small("hybrid", complete=False),
    )  # fmt: skip
    registry = Registry(SlabPool(2400, 300), lambda _: None)
    blocks, copying, pinned, private = [], [], [], []
    for number in range(120):
        what = r.random()
        if what < 0.45:
            spec = r.choice(specs)
            live = [b for b in blocks if b.state != "gone" and b.descriptor is spec]
            parent = r.choice(live) if live and r.random() < 0.7 else None
            block = registry.reserve(spec, number.to_bytes(4, "big"), parent)
            if block is not None:
                blocks.append(block)
                if r.random() < 0.6:
                    registry.commit(block, 0)
                else:
                    copying.append(block)
        elif what < 0.5 and copying:
            registry.commit(copying.pop(r.randrange(len(copying))), 0)
        elif what < 0.6 and (live := [b for b in blocks if b.state == "host"]):
            pinned.append(r.choice(live))
            registry.pin(pinned[-1:])
        elif what < 0.7 and pinned:
            registry.unpin([pinned.pop(r.randrange(len(pinned)))])
        elif what < 0.75 and (live := [b for b in blocks if b.state == "host"]):
            registry.drop(r.choice(live))
        elif what < 0.82 and private:
            registry.give_private(private.pop(r.randrange(len(private))))
        else:
            size, count = r.choice(specs).block_bytes, r.randint(1, 4)
            room = registry.has_room([(size, count)])
            cells = registry.take_private(size, count)
            assert (cells is not None) == room
            private += [] if cells is None else [cells]
        assert registry.check() == ""
