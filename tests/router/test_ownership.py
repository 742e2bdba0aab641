"""Partition ownership over an imagined bucket: claims, deaths, joins, restarts, races."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from talaria_common.ids import PARTITIONS
from talaria_common.wire import decode, encode
from talaria_router.messages import Gained, Lost
from talaria_router.ownership import (
    Claim,
    Effect,
    Ownership,
    RouterPresence,
    Superseded,
    TryClaim,
    TryRelease,
    partition_key,
    router_key,
)


class Bucket:
    """A bucket that everyone watches without delay, and the routers on it."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.revision = 0
        self.entries: dict[str, tuple[bytes, int]] = {}
        self.routers: dict[str, Ownership] = {}
        self.owned: dict[str, dict[int, int]] = {}
        self.writes = 0
        self.events: dict[str, list[Effect]] = {}

    def start(self, name: str, epoch: str = "1") -> Ownership:
        presence = RouterPresence(router=name, epoch=epoch, started_ms=round(self.now * 1000))
        self.routers[name] = router = Ownership(presence, 0.5, 3)
        self.owned[name] = {}
        self.events[name] = []
        for key, (value, revision) in list(self.entries.items()):
            self.run(name, router.changed(self.now, key, value, revision))
        self.beat(name)
        return router

    def kill(self, name: str) -> None:
        del self.routers[name]
        del self.owned[name]

    def beat(self, name: str) -> None:
        self.put(router_key(name), encode(self.routers[name].me))

    def put(self, key: str, value: bytes) -> int:
        self.revision += 1
        self.entries[key] = (value, self.revision)
        for name, router in list(self.routers.items()):
            self.run(name, router.changed(self.now, key, value, self.revision))
        return self.revision

    def run(self, name: str, effects: Sequence[Effect]) -> None:
        for e in effects:
            self.events[name].append(e)
            router = self.routers[name]
            if isinstance(e, Gained):
                self.owned[name][e.partition] = e.rev
            elif isinstance(e, Lost):
                self.owned[name].pop(e.partition)
            elif isinstance(e, TryClaim):
                last = self.entries.get(partition_key(e.partition), (b"", None))[1]
                if last != e.last:
                    router.refused(e.partition)
                    continue
                self.writes += 1
                self.run(name, router.claimed(e, self.put(partition_key(e.partition), router.claim(e))))
            elif isinstance(e, TryRelease):
                self.owned[name].pop(e.partition, None)
                if self.entries[partition_key(e.partition)][1] != e.last:
                    router.refused(e.partition)
                    continue
                self.writes += 1
                router.released(e, self.put(partition_key(e.partition), router.release(e)))

    def time(self, seconds: float, beating: bool = True) -> None:
        for _ in range(round(seconds / 0.5)):
            self.now += 0.5
            for name in list(self.routers):
                if beating:
                    self.beat(name)
            for name, router in list(self.routers.items()):
                self.run(name, router.tick(self.now))

    def check(self) -> None:
        """Everything is owned, once."""
        everyone = [p for owned in self.owned.values() for p in owned]
        assert sorted(everyone) == list(range(PARTITIONS))


def test_one_router_owns_all():
    b = Bucket()
    b.start("r0")
    b.time(0.5)
    b.check()
    assert b.writes == PARTITIONS
    assert all(not e.may_hold for e in b.events["r0"] if isinstance(e, Gained))
    b.time(10)
    assert b.writes == PARTITIONS, "and then there is peace"


def test_two_share_and_a_join_moves_only_what_must_move():
    b = Bucket()
    b.start("r0")
    b.time(2)
    b.start("r1")
    b.time(5)
    b.check()
    share = len(b.owned["r1"])
    assert 90 < share < 166
    assert b.writes == PARTITIONS + 2 * share, "a release and a claim for each that moved"
    b.time(10)
    assert b.writes == PARTITIONS + 2 * share


def test_a_death_is_noticed_in_three_heartbeats_and_moves_only_its_share():
    b = Bucket()
    for name in ("r0", "r1", "r2"):
        b.start(name)
    b.time(6)
    b.check()
    kept = {n: dict(b.owned[n]) for n in ("r0", "r1")}
    lost = len(b.owned["r2"])
    before = b.writes
    b.kill("r2")
    b.time(2.5)
    b.check()
    assert b.writes == before + lost
    for n, owned in kept.items():
        assert owned.items() <= b.owned[n].items(), "what was theirs stayed, under the same fence"


def test_a_restart_reclaims_its_own_at_once_under_a_higher_fence():
    b = Bucket()
    b.start("r0")
    b.time(2)
    old = dict(b.owned["r0"])
    b.kill("r0")
    b.start("r0", "2")
    b.time(0.5)
    b.check()
    assert all(b.owned["r0"][p] > old[p] for p in old)
    assert all(e.may_hold for e in b.events["r0"] if isinstance(e, Gained))


def test_a_restart_with_another_alive_takes_back_its_own_only():
    b = Bucket()
    b.start("r0")
    b.start("r1")
    b.time(6)
    mine = set(b.owned["r0"])
    b.kill("r0")
    b.start("r0", "2")
    b.time(1)
    assert set(b.owned["r0"]) == mine
    b.check()


def test_the_older_process_of_one_name_gives_way():
    b = Bucket()
    first = b.start("r0")
    b.time(1)
    b.now += 1
    second = RouterPresence(router="r0", epoch="2", started_ms=round(b.now * 1000))
    b.put(router_key("r0"), encode(second))
    assert any(isinstance(e, Superseded) for e in b.events["r0"])
    effects = first.changed(b.now, router_key("r0"), encode(RouterPresence(router="r0", epoch="0", started_ms=1)), 1)
    assert effects == [], "an older one's last heartbeat is no reason to go"


def test_a_lost_answer_is_mended_by_the_watch():
    b = Bucket()
    router = b.start("r0")
    effects = router.tick(b.now)
    claim = next(e for e in effects if isinstance(e, TryClaim))
    router.refused(claim.partition)  # the write was done, its answer never came
    got = router.changed(b.now, partition_key(claim.partition), router.claim(claim), 77)
    assert got == [Gained(claim.partition, claim.fence, may_hold=False)]
    assert router.claimed(claim, 77) == []


def test_a_fence_rises_when_the_bucket_was_lost():
    b = Bucket()
    b.start("r0")
    b.time(1)
    old = dict(b.owned["r0"])
    b.entries.clear()
    b.revision = 0
    for p in range(PARTITIONS):
        b.run("r0", b.routers["r0"].changed(b.now, partition_key(p), None, 0))
    b.time(1)
    b.check()
    assert all(b.owned["r0"][p] > old[p] for p in old)


def test_leaving_gives_everything_back():
    b = Bucket()
    b.start("r0")
    b.start("r1")
    b.time(6)
    b.run("r0", b.routers["r0"].release_all())
    b.kill("r0")
    b.entries.pop(router_key("r0"))
    b.run("r1", b.routers["r1"].changed(b.now, router_key("r0"), None, 0))
    b.time(0.5)
    b.check()


def test_claims_of_another_version_are_left_alone():
    b = Bucket()
    router = b.start("r0")
    assert router.changed(b.now, "p.3", b"not json", 9) == []
    assert router.changed(b.now, "p.999", encode(Claim(owner="x")), 9) == []
    assert router.changed(b.now, "x.y", b"{}", 9) == []


@given(
    st.lists(
        st.tuples(st.sampled_from(["start", "kill", "time", "silence"]), st.sampled_from(["r0", "r1", "r2"])),
        max_size=12,
    )
)
def test_whatever_happens_it_settles(steps: list[tuple[str, str]]):
    b = Bucket()
    epoch = 0
    fences: dict[int, int] = {}
    for what, name in [*steps, ("start", "r9")]:
        if what == "start" and name not in b.routers:
            epoch += 1
            b.start(name, str(epoch))
        elif what == "kill" and name in b.routers:
            b.kill(name)
        elif what == "time":
            b.time(1.0)
        elif what == "silence":
            b.time(2.0, beating=False)
        for key, (value, _) in b.entries.items():
            if key.startswith("p."):
                claim = decode(value, Claim)
                partition = int(key[2:])
                assert claim.fence >= fences.get(partition, 0), "a fence never falls"
                fences[partition] = claim.fence
    b.time(8)
    b.check()
