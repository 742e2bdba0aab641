"""The bounded store of weight images: space, eviction, reading back, damaged files."""

from __future__ import annotations

import errno
import os
import threading
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from talaria_common.errors import EngineError
from talaria_gpu.weights import memory
from talaria_gpu.weights import store as stores
from talaria_gpu.weights.files import ImageFile
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


def disk_is_quiet(store: WeightStore) -> None:
    """What was asked of the disk so far is over."""
    store._disk.submit(lambda: None).result()


def test_a_prefetch_runs_in_the_background(store):
    for seed, name in enumerate("abc"):
        put(store, name, seed)
    assert not store.prefetch("a")
    disk_is_quiet(store)  # b is written
    assert not store.prefetch("a")
    assert store.place("b") == "disk"
    assert store.place("a") in {"loading", "host"}
    disk_is_quiet(store)
    assert store.prefetch("a")
    assert store.place("a") == "host"


@pytest.fixture
def slow_disk(monkeypatch):
    """Writes wait until the event is set; who wrote is noted."""
    go, writers = threading.Event(), []

    def write(*arguments):
        writers.append(threading.current_thread())
        go.wait(10)
        return ImageFile(*arguments)

    monkeypatch.setattr(stores, "ImageFile", write)
    yield go, writers
    go.set()


def test_nobody_waits_while_an_image_is_written_and_it_stays_until_it_has_been(store, slow_disk):
    go, writers = slow_disk
    go.set()
    for seed, name in enumerate("abc"):
        put(store, name, seed)
    go.clear()
    for _ in range(3):
        assert not store.prefetch("a")
    assert [store.place(n) for n in "abc"] == ["disk", "host", "host"]
    assert torch.equal(store.acquire("b"), image(1))
    store.release("b")
    store.acquire("c")
    go.set()
    while not store.prefetch("a"):
        disk_is_quiet(store)
    assert [store.place(n) for n in "abc"] == ["host", "disk", "host"]
    assert len(writers) == 2
    assert threading.main_thread() not in writers
    assert torch.equal(store.acquire("a"), image(0))


def test_an_image_that_is_dropped_while_it_is_written_leaves_nothing(store, slow_disk, monkeypatch):
    go, writers = slow_disk
    go.set()
    for seed, name in enumerate("abc"):
        put(store, name, seed)
    go.clear()
    assert not store.prefetch("a")
    while len(writers) < 2:
        time.sleep(0.001)  # b's write has begun
    closed, close = [], ImageFile.close
    monkeypatch.setattr(ImageFile, "close", lambda file: (closed.append(True), close(file)))
    threading.Timer(0.05, go.set).start()
    store.drop("b")
    assert closed == [True]  # given up half-way
    assert store.acquire("a") is not None


def test_a_full_disk_is_tried_once_in_the_background_and_again_when_it_has_to_be(store, monkeypatch):
    for seed, name in enumerate("abc"):
        put(store, name, seed)
    tries = []

    def full(*_arguments):
        tries.append(True)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(stores, "ImageFile", full)
    for _ in range(8):
        assert not store.prefetch("a")
        disk_is_quiet(store)
    assert len(tries) == 2  # b, then c
    with pytest.raises(EngineError, match="No space left"):
        store.acquire("a")
    assert [store.place(n) for n in "abc"] == ["disk", "host", "host"]
    monkeypatch.undo()
    assert torch.equal(store.acquire("a"), image(0))


def test_on_a_full_disk_an_image_that_has_its_file_makes_room(store, monkeypatch):
    for seed, name in enumerate("abc"):
        put(store, name, seed)
    store.acquire("a")  # b is written for it
    store.release("a")

    def full(*_arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(stores, "ImageFile", full)
    assert torch.equal(store.acquire("b"), image(1))
    assert [store.place(n) for n in "abc"] == ["disk", "host", "host"], "c, the oldest, could not go"


def test_a_model_is_dropped_at_once_though_the_disk_is_busy_with_another(store, slow_disk):
    go, writers = slow_disk
    go.set()
    for seed, name in enumerate("abc"):
        put(store, name, seed)
    go.clear()
    store.prefetch("a")  # b is being written for it
    store._evict(store._entries["c"], patient=False)  # c's write stands behind that
    store.drop("c")
    assert not store._entries["b"].writing.done()
    go.set()
    disk_is_quiet(store)
    assert len(writers) == 2, "c was never written"


@pytest.mark.parametrize("error", [RuntimeError("can't allocate memory"), EngineError("page-locked")])
def test_no_memory_for_an_image_is_a_failed_load(store, monkeypatch, error):
    for seed, name in enumerate("abc"):
        put(store, name, seed)

    def none_left(*_arguments, **_options):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(memory, "allocate", none_left)
        with pytest.raises(EngineError, match=str(error)):
            store.acquire("a")
        assert store.place("a") == "disk"
    assert torch.equal(store.acquire("a"), image(0))
    store.release("a")
    for name in "bc":  # and a goes to disk again
        store.acquire(name)
        store.release(name)
    assert store.place("a") == "disk"
    store.prefetch("a")
    disk_is_quiet(store)
    assert store.prefetch("a"), "and is read in the background again"


def test_more_memory_than_there_is_is_refused():
    with pytest.raises(EngineError, match="not to be had"):
        memory.allocate(1 << 60, pin=False)


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
    store.prefetch("a")
    disk_is_quiet(store)
    store.prefetch("a")  # in the place of b
    assert store.place("b") == "disk"
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
