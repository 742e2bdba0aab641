"""A partition goes to another router: what its sessions owe the bucket is written, whatever happens meanwhile."""

from __future__ import annotations

import asyncio

import pytest

from talaria_common import subjects
from talaria_common.bus import MemoryHub
from talaria_common.bus.memory import _BucketHandle
from talaria_common.clock import to_ms
from talaria_common.ids import partition_of
from talaria_common.wire import Completion, SessionRecord, decode
from talaria_router.sessions import key_of
from talaria_router.writer import SessionWriter
from tests.router.mesh import M, config, router
from tests.router.test_shell import owns_all

KEY, PARTITION = key_of("t", "s", M)


def ended(n: int) -> Completion:
    return Completion(
        iid="a", epoch="a-1", rid=f"{n:032x}", attempt=0, router="r9", seq=n, partition=partition_of("t", "s", M),
        tenant="t", session="s", model=M, ok=True, kv_tokens=100 * n, kv_epoch=1, prefix_handle=f"h{n}",
        at_ms=to_ms(0),
    )  # fmt: skip


async def test_the_record_of_the_last_call_that_was_ours_is_handed_over(monkeypatch: pytest.MonkeyPatch):
    hub = MemoryHub()
    shell = await router(hub.connect(), config())
    put = _BucketHandle.put
    try:
        await owns_all(shell)
        shell._handle(ended(1))

        async def another_ends_meanwhile(kv: _BucketHandle, key: str, value: bytes) -> int:
            if key == KEY:
                shell._handle(ended(2))
            return await put(kv, key, value)

        monkeypatch.setattr(_BucketHandle, "put", another_ends_meanwhile)
        ownership = shell.claims.ownership
        ownership._busy.add(PARTITION)
        await shell.claims._release(ownership._let_go(PARTITION))
        stored = await (await hub.connect().kv(subjects.KV_SESSIONS)).get(KEY)
        assert stored is not None
        known = shell.core.record(KEY)
        assert known is not None
        assert decode(stored.value, SessionRecord).calls == known.calls == 1
    finally:
        await shell.close()


async def test_a_write_under_way_ends_although_the_partition_went():
    hub = MemoryHub()
    bucket = await hub.connect().kv(subjects.KV_SESSIONS)
    record = SessionRecord(tenant="t", session="s", model=M, iid="a", last_use_ms=1)
    ours = True
    writer = SessionWriter(lambda _: record, lambda _: ours)
    writing = asyncio.ensure_future(writer.run(bucket))
    await asyncio.sleep(0)
    writer.mark(KEY)
    flushing = asyncio.ensure_future(writer.flush())
    await asyncio.sleep(0)
    ours = False
    await flushing
    assert await bucket.get(KEY) is not None
    await bucket.delete(KEY)
    writer.mark(KEY)
    await writer.flush()
    assert await bucket.get(KEY) is None, "another owner's record is never overwritten"
    writing.cancel()
