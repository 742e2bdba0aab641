"""Key-value buckets: the same tests in memory and on JetStream."""

from __future__ import annotations

import asyncio

import pytest

from talaria_common.bus import Bus, KvBucket, KvEntry, KvWatch
from talaria_common.errors import BusError, BusNameError, PayloadTooLargeError, RevisionError


@pytest.fixture
async def kv(bus: Bus) -> KvBucket:
    return await bus.kv("bucket")


async def take(watch: KvWatch, count: int, timeout_s: float = 10.0) -> list[tuple[str, KvEntry | None]]:
    """The next `count` changes."""
    got: list[tuple[str, KvEntry | None]] = []

    async def read() -> None:
        async for item in watch:
            got.append(item)
            if len(got) == count:
                return

    await asyncio.wait_for(read(), timeout_s)
    return got


async def test_get_put_delete(kv: KvBucket):
    assert await kv.get("k") is None
    first = await kv.put("k", b"1")
    assert await kv.get("k") == KvEntry("k", b"1", first)
    second = await kv.put("k", b"2")
    assert second > first
    assert await kv.get("k") == KvEntry("k", b"2", second)
    await kv.delete("k")
    await kv.delete("k")
    await kv.delete("never")
    assert await kv.get("k") is None


async def test_revisions_rise_across_the_bucket(kv: KvBucket):
    revisions = [await kv.put("a", b"x"), await kv.create("b", b"x"), await kv.put("a", b"x")]
    revisions.append(await kv.update("b", b"y", revisions[1]))
    assert revisions == sorted(set(revisions))


async def test_create_only_where_nothing_lives(kv: KvBucket):
    await kv.create("k", b"1")
    with pytest.raises(RevisionError):
        await kv.create("k", b"2")
    entry = await kv.get("k")
    assert entry is not None
    assert entry.value == b"1"


async def test_create_over_a_deleted_key(kv: KvBucket):
    old = await kv.create("k", b"1")
    await kv.delete("k")
    new = await kv.create("k", b"2")
    assert new > old
    assert await kv.get("k") == KvEntry("k", b"2", new)


async def test_update_only_over_the_expected_revision(kv: KvBucket):
    first = await kv.create("k", b"1")
    second = await kv.update("k", b"2", first)
    with pytest.raises(RevisionError):
        await kv.update("k", b"3", first)
    with pytest.raises(RevisionError):
        await kv.update("absent", b"3", second)
    await kv.delete("k")
    with pytest.raises(RevisionError):
        await kv.update("k", b"3", second)


async def test_of_many_racing_creates_one_wins(bus_pair: tuple[Bus, Bus]):
    buckets = [await b.kv("race") for b in bus_pair]
    done = await asyncio.gather(
        *(buckets[i % 2].create("k", b"%d" % i) for i in range(20)),
        return_exceptions=True,
    )
    won = [i for i, r in enumerate(done) if isinstance(r, int)]
    lost = [r for r in done if isinstance(r, RevisionError)]
    assert (len(won), len(lost)) == (1, 19)
    entry = await buckets[1].get("k")
    assert entry is not None
    assert entry.value == b"%d" % won[0]


async def test_racing_increments_lose_nothing(bus_pair: tuple[Bus, Bus]):
    buckets = [await b.kv("count") for b in bus_pair]
    await buckets[0].create("n", b"0")

    async def add(bucket: KvBucket) -> None:
        while True:
            entry = await bucket.get("n")
            assert entry is not None
            try:
                await bucket.update("n", b"%d" % (int(entry.value) + 1), entry.revision)
            except RevisionError:
                continue
            return

    await asyncio.gather(*(add(buckets[i % 2]) for i in range(20)))
    entry = await buckets[0].get("n")
    assert entry is not None
    assert entry.value == b"20"


async def test_opening_at_once_is_no_race(bus_pair: tuple[Bus, Bus]):
    buckets = await asyncio.gather(*(bus_pair[i % 2].kv("same", ttl_s=3600) for i in range(10)))
    await buckets[0].put("k", b"v")
    assert [await b.keys() for b in buckets] == [["k"]] * 10


async def test_keys_lists_the_live_ones(kv: KvBucket):
    assert await kv.keys() == []
    for key in ("a", "b", "dir/c", "d=e.f"):
        await kv.put(key, b"x")
    await kv.delete("b")
    assert sorted(await kv.keys()) == ["a", "d=e.f", "dir/c"]
    for key in await kv.keys():
        await kv.delete(key)
    assert await kv.keys() == []


@pytest.mark.parametrize("key", ["", "a:b", "u@x", "a..b", ".a", "a.", "a b", "a*", ">", "ä", "a\n"])
async def test_illegal_keys_are_refused(kv: KvBucket, key: str):
    """NATS trap 5: session ids are not keys."""
    for call in (kv.get(key), kv.put(key, b"x"), kv.create(key, b"x"), kv.update(key, b"x", 1), kv.delete(key)):
        with pytest.raises(BusNameError):
            await call


@pytest.mark.parametrize("bucket", ["", "a.b", "a b", "a/b", "*"])
async def test_illegal_buckets_are_refused(bus: Bus, bucket: str):
    with pytest.raises(BusNameError):
        await bus.kv(bucket)


async def test_values_have_a_size(bus: Bus, kv: KvBucket):
    with pytest.raises(ValueError, match="empty"):
        await kv.put("k", b"")
    with pytest.raises(ValueError, match="empty"):
        await kv.create("k", b"")
    with pytest.raises(PayloadTooLargeError):
        await kv.put("k", bytes(bus.max_payload_bytes + 1))
    assert await kv.get("k") is None


async def test_a_watch_shows_what_is_there_and_then_what_changes(bus_pair: tuple[Bus, Bus]):
    mine, theirs = [await b.kv("watched") for b in bus_pair]
    await theirs.put("gone", b"x")
    await theirs.delete("gone")
    there = {key: await theirs.put(key, key.encode()) for key in ("a", "b")}
    watch = await mine.watch()
    assert dict(await take(watch, 2)) == {k: KvEntry(k, k.encode(), r) for k, r in there.items()}
    changed = await theirs.put("a", b"new")
    assert await take(watch, 1) == [("a", KvEntry("a", b"new", changed))]
    await theirs.delete("b")
    assert await take(watch, 1) == [("b", None)]
    again = await theirs.create("b", b"back")
    assert await take(watch, 1) == [("b", KvEntry("b", b"back", again))]
    await watch.stop()
    assert [item async for item in watch] == []
    await watch.stop()


async def test_stopping_a_watch_ends_a_waiting_reader(kv: KvBucket):
    watch = await kv.watch()
    reader = asyncio.ensure_future(take(watch, 1))
    await asyncio.sleep(0)
    await watch.stop()
    assert await asyncio.wait_for(reader, 5) == []


async def test_closing_the_bus_ends_its_watches(bus: Bus):
    watch = await (await bus.kv("bucket")).watch()
    reader = asyncio.ensure_future(take(watch, 1))
    await asyncio.sleep(0)
    await bus.close()
    assert await asyncio.wait_for(reader, 5) == []


async def test_a_slow_reader_sees_the_last_state_of_every_key(kv: KvBucket):
    watch = await kv.watch()
    last = {}
    for i in range(600):
        last[f"k{i % 5}"] = await kv.put(f"k{i % 5}", b"%d" % i)
    seen: dict[str, KvEntry | None] = {}
    for _ in range(600):
        seen.update(await take(watch, 1))
        if {k: e.revision for k, e in seen.items() if e} == last:
            break
    assert {k: e.revision for k, e in seen.items() if e} == last
    await watch.stop()


async def test_a_closed_bus_refuses(bus: Bus, kv: KvBucket):
    await bus.close()
    for call in (kv.get("k"), kv.put("k", b"x"), kv.keys(), kv.watch(), bus.kv("other")):
        with pytest.raises(BusError):
            await call
