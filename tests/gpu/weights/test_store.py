"""The bounded store of weight images: space, eviction, reading back, damaged files."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from talaria_common.errors import EngineError
from talaria_gpu.weights.store import WeightStore

KB = 1 << 10


def image(seed: int, size: int = 64 * KB) -> torch.Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def put(store: WeightStore, name: str, seed: int, size: int = 64 * KB) -> torch.Tensor:
    made = store.make(name, size)
    made.copy_(image(seed, size))
    store.put(name, made)
    return made


@pytest.fixture
def store(tmp_path):
    made = WeightStore(150 * KB, tmp_path)
    yield made
    made.close()


def test_what_does_not_fit_goes_to_disk_and_comes_back_the_same(store):
    for seed, name in enumerate("abc"):
        put(store, name, seed)
    assert [store.place(n) for n in "abc"] == ["disk", "host", "host"]
    assert store.host_bytes == 128 * KB
    assert torch.equal(store.acquire("a"), image(0))
    assert [store.place(n) for n in "abc"] == ["host", "disk", "host"]
    assert store.stats.evictions == 2
    assert store.stats.loads == 1


def test_a_prefetch_runs_in_the_background(store):
    for seed, name in enumerate("abc"):
        put(store, name, seed)
    ready = store.prefetch("a")
    assert ready or store.place("a") in {"loading", "host"}
    store._entries["a"].loading and store._entries["a"].loading.result()
    assert store.prefetch("a")
    assert store.place("a") == "host"


def test_a_pinned_image_is_never_evicted(store):
    put(store, "a", 0)
    held = store.acquire("a")
    put(store, "b", 1)
    put(store, "c", 2)
    assert store.place("a") == "host"
    assert store.place("b") == "disk"
    store.acquire("c")
    assert not store.prefetch("b")
    with pytest.raises(EngineError, match="host_weights_mib"):
        store.acquire("b")
    assert torch.equal(held, image(0))
    store.release("a")
    assert torch.equal(store.acquire("b"), image(1))


def test_what_is_being_read_for_a_wrong_guess_makes_room_for_what_is_needed(store):
    for seed, name in enumerate("abc"):
        put(store, name, seed)
    store.acquire("c")
    store.prefetch("a")  # in the place of b
    assert torch.equal(store.acquire("b"), image(1))
    assert store.place("a") == "disk"


@pytest.mark.parametrize("damage", ["cut", "changed"])
def test_a_damaged_file_fails_its_model_only(store, damage):
    for seed, name in enumerate("abc"):
        put(store, name, seed)
    descriptor = store._entries["a"].file._file.fileno()
    if damage == "cut":
        os.ftruncate(descriptor, 10_000)
    else:
        os.pwrite(descriptor, b"\xff\x00\xff", 30_000)
    with pytest.raises(EngineError, match="a: its image file"):
        store.acquire("a")
    assert store.place("a") == "disk"
    assert torch.equal(store.acquire("b"), image(1))


def test_dropped_files_give_their_space_back(store):
    put(store, "a", 0)
    put(store, "b", 1)
    put(store, "c", 2)
    descriptor = store._entries["a"].file._file.fileno()
    store.drop("a")
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
    store.drop("b")
    store.drop("b")
    assert store.host_bytes == 64 * KB


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["acquire", "release", "prefetch", "drop", "put"]), st.integers(0, 4)), max_size=25
    )
)
def test_any_life_keeps_the_bound_and_the_bytes(steps):
    store = WeightStore(200 * KB)
    pins = dict.fromkeys(range(5), 0)
    held: dict[int, torch.Tensor] = {}
    known: set[int] = set()
    for what, number in steps:
        name = str(number)
        size = (20 + 20 * number) * KB
        if what == "put" and number not in known:
            try:
                put(store, name, number, size)
            except EngineError:
                continue
            known.add(number)
        elif what == "acquire" and number in known:
            try:
                held[number] = store.acquire(name)
            except EngineError:
                continue
            pins[number] += 1
        elif what == "release" and pins[number]:
            store.release(name)
            pins[number] -= 1
        elif what == "prefetch" and number in known:
            store.prefetch(name)
        elif what == "drop" and number in known and not pins[number]:
            store.drop(name)
            known.discard(number)
        assert store.host_bytes <= 200 * KB
        for pinned in [n for n, p in pins.items() if p]:
            assert store.place(str(pinned)) == "host"
            assert torch.equal(held[pinned], image(pinned, (20 + 20 * pinned) * KB))
    store.close()
    assert store.host_bytes == 0
