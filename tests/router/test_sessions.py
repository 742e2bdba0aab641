"""The session table: written behind, read lazily, bounded, forgotten."""

from __future__ import annotations

import sys

import pytest

from talaria_common.clock import to_ms
from talaria_common.ids import hash_id, partition_of
from talaria_common.wire import Placement, SessionRecord, decode, encode
from talaria_router.messages import Dirty, Gained, Load, Lost, Restored
from talaria_router.sessions import Entry, SessionTable, key_of
from tests.router.rig import Rig, model, only, outcome

KEY = key_of("t", "s", "m")[0]


def test_key_and_partition_are_the_meshs():
    key, partition = key_of("t", "s", "m")
    assert (key, partition) == (hash_id("t", "s", "m"), partition_of("t", "s", "m"))


def restarted(old: Rig, may_hold: bool = True, **config: object) -> Rig:
    rig = Rig(own=False, **config)
    rig.clock.advance(old.now - rig.now)
    for p in range(256):
        rig.do(Gained(p, 5000 + p, may_hold))
    rig.view(rig.snapshot("a"), rig.snapshot("b"), full=True)
    return rig


def used(**more: object) -> tuple[Rig, SessionRecord]:
    rig = Rig(**more)
    rig.view(rig.snapshot("a", (model(queued=1, queued_tokens=50),)), rig.snapshot("b"), full=True)
    p = rig.turn()
    assert p.iid == "b"
    assert only(rig.effects, Dirty) == [Dirty(KEY)]
    record = rig.core.record(KEY)
    assert record is not None
    return rig, decode(encode(record), SessionRecord)


def test_after_a_restart_the_session_returns_to_its_instance_on_its_lease():
    old, record = used()
    rig = restarted(old)
    assert rig.ask() is None
    assert only(rig.effects, Load) == [Load(KEY)]
    got = outcome(rig.do(Restored(KEY, record)))
    assert (got.iid, got.via) == ("b", "lease")


def test_an_expired_lease_is_not_restored_but_affinity_is():
    old, record = used()
    old.clock.advance(5)
    rig = restarted(old)
    rig.ask()
    got = outcome(rig.do(Restored(KEY, record)))
    assert (got.iid, got.via) == ("b", "cost")
    assert rig.books.installed == 0


def test_a_forgotten_prefix_gives_no_affinity():
    old, record = used()
    rig = restarted(old)
    rig.view(rig.snapshot("b", (model(kv_epoch=9),)))
    rig.ask()
    assert outcome(rig.do(Restored(KEY, record))).via == "cost"
    assert rig.books.discarded == {"prefix": 1}


@pytest.mark.parametrize("answer", ["none", "silence"])
def test_it_waits_for_the_bucket_but_not_for_long(answer: str):
    old, _ = used()
    rig = restarted(old)
    assert rig.ask() is None
    got = outcome(rig.do(Restored(KEY, None)) if answer == "none" else rig.later(0.11))
    assert isinstance(got, Placement)
    assert rig.state.counts.restore_timeouts == (answer == "silence")


def test_a_late_answer_does_not_undo_what_happened_meanwhile():
    old, record = used()
    rig = restarted(old)
    rig.ask()
    p = outcome(rig.later(0.11))
    rig.complete(p, kv_tokens=500)
    rig.do(Restored(KEY, record))
    assert rig.entry().kv_tokens == 500
    assert rig.books.live == 1


def test_a_partition_that_nobody_owned_before_holds_nothing():
    old, _ = used()
    assert isinstance(restarted(old, may_hold=False).ask(), Placement)


def test_what_was_learnt_before_the_partition_moved_away_and_back_is_read_again():
    rig, record = used()
    partition = partition_of("t", "s", "m")
    rig.do(Lost(partition))
    rig.do(Gained(partition, 9999))
    assert rig.ask() is None
    newer = SessionRecord(
        **{f: getattr(record, f) for f in record.__struct_fields__} | {"iid": "a", "iid_epoch": "a-1"}
    )
    got = outcome(rig.do(Restored(KEY, newer)))
    assert got.iid == "a"
    assert rig.books.discarded == {"moved": 1}
    assert rig.load[2] == 0


def test_waiting_calls_are_sent_on_when_the_partition_moves():
    old, _ = used()
    rig = restarted(old)
    rig.ask()
    assert outcome(rig.do(Lost(partition_of("t", "s", "m")))).reason == "not_owner"


def test_a_record_of_another_key_is_not_believed():
    old, record = used()
    rig = restarted(old)
    rig.ask("other-session")
    rig.do(Restored(key_of("t", "other-session", "m")[0], record))
    assert rig.state.counts.restored == 0


def test_idle_sessions_are_forgotten():
    rig, _ = used(session_idle_s=10.0)
    rig.later(9)
    assert rig.entry() is not None
    rig.later(1.1)
    assert rig.entry() is None


def test_the_table_is_bounded_and_the_longest_unused_goes_first():
    rig = Rig(sessions_max=2)
    rig.view(rig.snapshot("a"), full=True)
    for s in ("x", "y"):
        rig.turn(s)
    rig.placed("x")
    rig.turn("z")
    rig.later(0)
    assert rig.entry("y") is None
    assert rig.entry("x") is not None
    assert rig.books.discarded == {"evicted": 1}


def test_a_final_call_is_deleted_from_the_bucket():
    rig, _ = used()
    rig.effects.clear()
    rig.complete(rig.placed(), session_final=True)
    assert Dirty(KEY) in rig.effects
    assert rig.core.record(KEY) is None


def test_the_record_tells_a_consumed_lease():
    rig, record = used()
    assert record.lease_until_ms == to_ms(rig.now + 1)
    rig.placed()
    again = rig.core.record(KEY)
    assert again is not None
    assert again.lease_until_ms == 0


def test_an_entry_is_small():
    table = SessionTable(3600, 1_000_000)
    entries = [Entry("t", hash_id("s", str(i)), "m", 1.0, iid="a", prefix_handle=f"h{i}") for i in range(100)]
    for i, e in enumerate(entries):
        table.put(hash_id(str(i)), e)
    one = entries[7]
    total = sys.getsizeof(one) + sum(sys.getsizeof(getattr(one, f)) for f in ("session", "prefix_handle", "last_use"))
    assert total + 200 < 1024
