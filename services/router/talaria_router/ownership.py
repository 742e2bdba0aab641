"""Who owns which partition (DESIGN 3): a pure machine over the bucket `talaria_partitions`.

The bucket holds `p.N` = who owns partition N and under which fence, and `r.ID` = a router's heartbeat. Each router
works out alone who should own what: the highest rendezvous hash of (router, partition) among those whose heartbeat came
within the last three. A router claims what should be its own and is unclaimed, released, a dead router's, or its own
from an earlier life; it releases what should be another's once the set of routers has been stable for a while. Every
change is a compare-and-set on the partition's revision, so the worst that a wrong picture does is a lost race. A join
or a death moves only the partitions that have to move.

Silence counts only as far as our own heartbeats were written meanwhile. A router that stood still, or whose bus hangs
or is away, has heard nobody either; were that a death of all others, it would take every partition from the living.

The fencing token (`owner_rev`) is not the revision itself but max(previous fence + 1, now in ms), written with the
claim: it rises with every claim as the revision does, and goes on rising when the bucket was lost with its server's
disk. Instances that had seen higher revisions would otherwise refuse every call until they were restarted; and a router
that took revisions for the order of events would not believe what stands in the new bucket. So what has a higher fence
is news, or the same one and a higher revision.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from talaria_common.clock import to_ms
from talaria_common.ids import PARTITIONS, hash_id
from talaria_common.wire import WireError, decode, encode
from talaria_common.wire.base import Wire
from talaria_router.messages import Gained, Lost

STABLE_HEARTBEATS = 4
"""A set of routers must stand this long before anything is released: a death is noticed in three."""


class Claim(Wire, frozen=True, kw_only=True):
    """Value of `p.N`. Owner "": released."""

    owner: str
    epoch: str = ""
    fence: int = 0


class RouterPresence(Wire, frozen=True, kw_only=True):
    """Value of `r.ID`."""

    router: str
    epoch: str
    started_ms: int


class TryClaim(NamedTuple):
    """Write our claim over revision `last` (None: create it); then tell `claimed` or `refused`."""

    partition: int
    last: int | None
    fence: int


class TryRelease(NamedTuple):
    """Stop routing (`Lost`), write out what the partition's sessions still owe, then claim for nobody over `last`."""

    partition: int
    last: int
    fence: int


class Superseded(NamedTuple):
    """A younger process runs under our name: this one must end."""

    epoch: str


Effect = TryClaim | TryRelease | Superseded | Gained | Lost


@dataclass(slots=True)
class _Known:
    claim: Claim
    revision: int

    @property
    def place(self) -> tuple[int, int]:
        """In the order of what happened to a partition, whichever bucket it stands in."""
        return self.claim.fence, self.revision


@dataclass(slots=True)
class _Router:
    presence: RouterPresence
    heard_at: float
    missed: int = 0
    """Heartbeats of our own that were written since its last."""


def partition_key(partition: int) -> str:
    """The bucket's key of a partition."""
    return f"p.{partition}"


def router_key(router: str) -> str:
    """The bucket's key of a router's heartbeat."""
    return f"r.{router}"


class Ownership:
    """One router's part in it. Times in seconds, by the router's own clock."""

    def __init__(self, presence: RouterPresence, heartbeat_s: float, missed: int) -> None:
        self.me = presence
        self._dead_after = heartbeat_s * missed
        self._missed = missed
        self._stable_for = heartbeat_s * STABLE_HEARTBEATS
        self._known: dict[int, _Known] = {}
        self._routers: dict[str, _Router] = {}
        self._mine: dict[int, int] = {}
        self._busy: set[int] = set()
        self._live: frozenset[str] = frozenset()
        self._live_since = 0.0
        self._wanted: dict[int, str] = {}
        self._current = False

    @property
    def mine(self) -> dict[int, int]:
        """Our partitions and the revisions we hold them under; to be read only."""
        return self._mine

    @property
    def unowned(self) -> int:
        """Partitions that no live router owns, as far as we know."""
        owned = sum(1 for p, k in self._known.items() if p not in self._mine and k.claim.owner in self._live)
        return PARTITIONS - owned - len(self._mine)

    @property
    def live(self) -> frozenset[str]:
        """The routers that are alive, this one included."""
        return self._live

    def claim(self, effect: TryClaim) -> bytes:
        """What our claim says."""
        return encode(Claim(owner=self.me.router, epoch=self.me.epoch, fence=effect.fence))

    @staticmethod
    def release(effect: TryRelease) -> bytes:
        """What a released partition says: nobody's, under the fence that the next claim must pass."""
        return encode(Claim(owner="", fence=effect.fence))

    def changed(self, now: float, key: str, value: bytes | None, revision: int) -> list[Effect]:
        """The bucket's watch delivered a key (None: deleted)."""
        kind, _, name = key.partition(".")
        try:
            if kind == "r":
                return self._router_changed(now, name, None if value is None else decode(value, RouterPresence))
            if kind == "p" and name.isdigit() and int(name) < PARTITIONS:
                if value is None:
                    return self._partition_gone(int(name))
                return self._partition_changed(int(name), decode(value, Claim), revision)
        except (WireError, msgspec.ValidationError):
            return []  # another version's key: not ours to judge
        return []

    def beaten(self) -> None:
        """Our heartbeat was written: the bucket works, and by now the others could have written theirs."""
        for router in self._routers.values():
            router.missed += 1

    def forgive(self, now: float) -> None:
        """The bus is there again: others may need longer to come back than we did, so nobody was silent before now."""
        for router in self._routers.values():
            router.heard_at, router.missed = now, 0

    def tick(self, now: float) -> list[Effect]:
        """Look at who lives, and claim or release. Nothing before our own heartbeat was seen: the watch is behind."""
        if not self._current:
            return []
        live = {
            name for name, r in self._routers.items() if now - r.heard_at <= self._dead_after or r.missed < self._missed
        }
        self._see(now, frozenset(live | {self.me.router}))
        out: list[Effect] = []
        for partition, wanted in self._wanted.items():
            if partition in self._busy:
                continue
            known = self._known.get(partition)
            if partition in self._mine:
                if wanted != self.me.router and now - self._live_since >= self._stable_for:
                    self._busy.add(partition)
                    out.append(self._let_go(partition))
            elif known is None:
                if wanted == self.me.router:
                    self._busy.add(partition)
                    out.append(TryClaim(partition, None, to_ms(now)))
            elif known.claim.owner == self.me.router or (
                wanted == self.me.router and known.claim.owner not in self._live
            ):
                self._busy.add(partition)
                out.append(TryClaim(partition, known.revision, max(known.claim.fence + 1, to_ms(now))))
        return out

    def claimed(self, effect: TryClaim, revision: int) -> list[Effect]:
        """Our claim was written."""
        partition = effect.partition
        self._busy.discard(partition)
        known = self._known.get(partition)
        if known is not None and known.place >= (effect.fence, revision):
            return []  # the watch was quicker
        self._known[partition] = _Known(Claim(owner=self.me.router, epoch=self.me.epoch, fence=effect.fence), revision)
        self._mine[partition] = revision
        return [Gained(partition, effect.fence, may_hold=effect.last is not None)]

    def released(self, effect: TryRelease, revision: int) -> None:
        """Our release was written."""
        self._busy.discard(effect.partition)
        known = self._known.get(effect.partition)
        if known is None or known.place < (effect.fence, revision):
            self._known[effect.partition] = _Known(Claim(owner="", fence=effect.fence), revision)

    def refused(self, partition: int) -> None:
        """The race was lost, or nobody answered: the watch will tell how things stand."""
        self._busy.discard(partition)

    def release_all(self) -> list[TryRelease]:
        """We leave: give everything back."""
        self._busy |= self._mine.keys()
        return [self._let_go(partition) for partition in list(self._mine)]

    def _let_go(self, partition: int) -> TryRelease:
        return TryRelease(partition, self._mine.pop(partition), self._known[partition].claim.fence)

    def _router_changed(self, now: float, name: str, presence: RouterPresence | None) -> list[Effect]:
        if presence is None:
            self._routers.pop(name, None)
            return []
        if name == self.me.router:
            if presence.epoch == self.me.epoch:
                self._current = True
            elif self._current and presence.started_ms >= self.me.started_ms:
                return [Superseded(presence.epoch)]
            return []
        self._routers[name] = _Router(presence, now)
        return []

    def _partition_changed(self, partition: int, claim: Claim, revision: int) -> list[Effect]:
        known = self._known.get(partition)
        if known is not None and (claim.fence, revision) <= known.place:
            return []
        self._known[partition] = _Known(claim, revision)
        ours = claim.owner == self.me.router and claim.epoch == self.me.epoch
        if ours and self._mine.get(partition) != revision:
            # A write of ours whose answer was lost.
            self._busy.discard(partition)
            self._mine[partition] = revision
            return [Gained(partition, claim.fence, may_hold=known is not None)]
        if not ours and partition in self._mine:
            del self._mine[partition]
            return [Lost(partition)]
        return []

    def _partition_gone(self, partition: int) -> list[Effect]:
        self._known.pop(partition, None)
        return [Lost(partition)] if self._mine.pop(partition, None) is not None else []

    def _see(self, now: float, live: frozenset[str]) -> None:
        if live == self._live:
            return
        self._live = live
        self._live_since = now
        self._wanted = {p: max(live, key=lambda r, p=p: hash_id(r, str(p))) for p in range(PARTITIONS)}  # type: ignore[misc]
