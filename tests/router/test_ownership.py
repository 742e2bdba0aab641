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

HEARTBEAT_S = 0.5
TICK_S = HEARTBEAT_S / 5


class Bucket:
    """A bucket that everyone who does not stand still watches without delay, and the routers on it."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.ticks = 0
        self.still: dict[str, list[tuple[str, bytes, int]]] = {}
        """Routers that stand still, with what waits to be read by each."""
        self.revision = 0
        self.entries: dict[str, tuple[bytes, int]] = {}
        self.routers: dict[str, Ownership] = {}
        self.owned: dict[str, dict[int, int]] = {}
        self.writes = 0
        self.events: dict[str, list[Effect]] = {}

    def start(self, name: str, epoch: str = "1") -> Ownership:
        presence = RouterPresence(router=name, epoch=epoch, started_ms=round(self.now * 1000))
        self.routers[name] = router = Ownership(presence, HEARTBEAT_S, 3)
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
        self.routers[name].beaten()

    def stop(self, name: str) -> None:
        self.still[name] = []

    def wake(self, name: str) -> None:
        """It looks around first, then has the answer to its last heartbeat, and then reads what has come meanwhile."""
        router = self.routers[name]
        self.run(name, router.tick(self.now))
        router.beaten()
        self.run(name, router.tick(self.now))
        for change in self.still.pop(name):
            self.run(name, router.changed(self.now, *change))

    def put(self, key: str, value: bytes) -> int:
        self.revision += 1
        self.entries[key] = (value, self.revision)
        for name, router in list(self.routers.items()):
            if name in self.still:
                self.still[name].append((key, value, self.revision))
            else:
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
        """Time passes as in the shell: five looks to a heartbeat. Not `beating`: nothing is written, the bus hangs."""
        for _ in range(round(seconds / TICK_S)):
            self.ticks += 1
            self.now = 1000.0 + self.ticks * TICK_S
            for name in list(self.routers):
                if beating and name not in self.still and self.ticks % 5 == 0:
                    self.beat(name)
            for name, router in list(self.routers.items()):
                if name not in self.still:
                    self.run(name, router.tick(self.now))

    def two(self) -> None:
        """Two routers that have shared everything; both have just beaten."""
        self.start("r0")
        self.start("r1")
        self.time(3)
        self.check()

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


def test_a_death_is_noticed_in_three_heartbeats_and_not_before():
    b = Bucket()
    b.two()
    b.kill("r1")
    mine, before = len(b.owned["r0"]), b.writes
    b.time(3 * HEARTBEAT_S)
    assert b.writes == before
    b.time(TICK_S)
    b.check()
    assert b.writes == before + PARTITIONS - mine


@given(st.integers(1, 80))
def test_a_router_that_stood_still_takes_nothing_from_another(ticks: int):
    b = Bucket()
    b.two()
    shares = {n: set(owned) for n, owned in b.owned.items()}
    b.stop("r0")
    b.time(ticks * TICK_S)
    tried = len(b.events["r0"])
    b.wake("r0")
    b.time(2 * HEARTBEAT_S)
    assert not [e for e in b.events["r0"][tried:] if isinstance(e, TryClaim)]
    assert shares["r1"] <= set(b.owned["r1"])
    b.time(4)
    b.check()
    assert {n: set(owned) for n, owned in b.owned.items()} == shares, "what it lost meanwhile came back to it"


@given(st.integers(1, 80), st.booleans())
def test_a_death_while_it_stood_still_is_noticed_in_three_heartbeats(ticks: int, goodbye: bool):
    b = Bucket()
    b.two()
    b.stop("r0")
    if goodbye:
        b.beat("r1")
    b.kill("r1")
    b.time(ticks * TICK_S)
    b.wake("r0")
    b.time(3 * HEARTBEAT_S + TICK_S)
    b.check()


@given(st.integers(1, 80), st.sampled_from(["r0", "r1"]), st.integers(0, 10))
def test_nobody_dies_of_a_bus_that_is_away(ticks: int, last: str, later: int):
    """However long, and though one router is back up to two heartbeats before the other."""
    b = Bucket()
    b.two()
    before = b.writes
    b.time(ticks * TICK_S, beating=False)
    for router in b.routers.values():
        router.forgive(b.now)
    b.stop(last)
    b.time(later * TICK_S)
    b.wake(last)
    b.time(4)
    b.check()
    assert b.writes == before, "nothing has moved"


@given(st.integers(1, 80))
def test_a_bus_that_hangs_unnoticed_costs_nobody_anything(ticks: int):
    """Whoever takes part in it is silent for all others at the same time."""
    b = Bucket()
    b.two()
    before = b.writes
    b.time(ticks * TICK_S, beating=False)
    b.time(4)
    b.check()
    assert b.writes == before


def test_a_death_during_an_outage_is_noticed_in_three_heartbeats_after_it():
    b = Bucket()
    b.two()
    b.kill("r1")
    b.time(5, beating=False)
    b.routers["r0"].forgive(b.now)
    b.time(3 * HEARTBEAT_S + TICK_S)
    b.check()


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


def lost(b: Bucket, *sees: str) -> None:
    """The bucket is gone with its server's disk, and empty again; only those who are named find it so."""
    b.entries.clear()
    b.revision = 0
    for name in sees:
        for p in range(PARTITIONS):
            b.run(name, b.routers[name].changed(b.now, partition_key(p), None, 0))


def test_a_lost_bucket_leaves_nothing_with_two_owners():
    """r1 finds the new bucket when r0 has taken everything there already: under revisions that it had seen long ago."""
    b = Bucket()
    b.start("r0")
    b.time(3)
    b.start("r1")
    b.time(6)
    b.stop("r1")
    lost(b, "r0")
    b.time(4)
    assert len(b.owned["r0"]) == PARTITIONS
    b.wake("r1")
    assert not b.owned["r1"]
    b.time(6)
    b.check()
    assert b.owned["r1"]


def test_a_lost_bucket_leaves_nothing_without_an_owner():
    """r1 hears of what r0 took again in the new bucket before it looks there itself; then r0 dies."""
    b = Bucket()
    b.two()
    lost(b, "r0")
    b.time(0.2)
    r1 = b.routers["r1"]
    for p in list(r1.mine):
        b.run("r1", r1.changed(b.now, partition_key(p), None, 0))
    b.time(1)
    b.check()
    b.kill("r0")
    b.time(3)
    b.check()


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
