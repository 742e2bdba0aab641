"""Places kept between calls, cheapest first, so that a decision looks at a few instances and not at all of them.

One board per model that was ever asked for. What changed since the last decision (a snapshot, a charge of ours) is
evaluated anew when the model is asked for next, or before, while nobody waits for an answer: with each view and tick
for the models that were asked for lately, after an answer and a completion for their own. Averages over all instances
(`Profiles`) reach a place with a later snapshot (`cluster.LEARN_S` at most): they move slowly, and every completion
moves them.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Collection, Iterable, Iterator

from talaria_router.cluster import Cluster
from talaria_router.cost import Place, place_of
from talaria_router.overlay import Overlay
from talaria_router.profiles import Profiles

HELD = frozenset({"active", "host", "loading"})
"""States in which a replica exists already or is on its way."""

WANTED = 2
"""A board is kept up to date until so many views have come without an ask for its model."""
FEW = 8
"""So many changed places are put in one by one, however few there are."""

Rank = tuple[float, int, str]
"""(base_ms, calls, iid)."""


class Board:
    """The places of one model."""

    __slots__ = ("_budget_ms", "busy", "dirty", "fresh", "full", "held", "least_prefill", "places", "unready", "wanted")

    def __init__(self, iids: Iterable[str], budget_ms: float) -> None:
        self._budget_ms = budget_ms
        self.places: dict[str, Place] = {}
        self.held: list[Rank] = []
        """Where the model is held, cheapest first."""
        self.fresh: list[Rank] = []
        """Where it would have to be opened, cheapest first."""
        self.busy: list[tuple[float, str]] = []
        """(floor_ms, iid) where the round check refuses any call, the least busy first."""
        self.full: list[str] = []
        """Where as many calls wait as the instance accepts, sorted."""
        self.unready: Counter[str] = Counter()
        """Places that take no call at all, by reason."""
        self.least_prefill = float("inf")
        """No place prefills a token in fewer ms. A bound: it does not rise when that place goes."""
        self.dirty: set[str] = set(iids)
        self.wanted = WANTED
        """For so many more views it is kept up to date although nobody asks."""

    def put(self, place: Place) -> None:
        """Add or replace a place."""
        if place.iid in self.places:
            self.drop(place.iid)
        self.places[place.iid] = place
        self.least_prefill = min(self.least_prefill, place.prefill_ms_per_token)
        if place.unready:
            self.unready[place.unready] += 1
        elif place.full:
            insort(self.full, place.iid)
        elif self._busy(place):
            insort(self.busy, (place.floor_ms, place.iid))
        else:
            insort(self._side(place), (place.base_ms, place.calls, place.iid))

    def fill(self, places: dict[str, Place]) -> None:
        """Many at once, into an empty board: sorted once."""
        self.places = places
        for place in places.values():
            self.least_prefill = min(self.least_prefill, place.prefill_ms_per_token)
            if place.unready:
                self.unready[place.unready] += 1
            elif place.full:
                self.full.append(place.iid)
            elif self._busy(place):
                self.busy.append((place.floor_ms, place.iid))
            else:
                self._side(place).append((place.base_ms, place.calls, place.iid))
        for ranks in (self.held, self.fresh, self.busy, self.full):
            ranks.sort()

    def drop(self, iid: str) -> None:
        """Forget a place, if it is there."""
        old = self.places.pop(iid, None)
        if old is None:
            return
        if old.unready:
            self.unready[old.unready] -= 1
            self.unready = +self.unready
        elif old.full:
            del self.full[bisect_left(self.full, iid)]
        elif self._busy(old):
            del self.busy[bisect_left(self.busy, (old.floor_ms, iid))]
        else:
            side = self._side(old)
            del side[bisect_left(side, (old.base_ms, old.calls, iid))]

    def open(self, iid: str) -> bool:
        """Whether the place is in `held`."""
        place = self.places.get(iid)
        if place is None or place.unready or place.full or self._busy(place):
            return False
        return place.model.state in HELD

    def shut(self) -> Iterator[tuple[str, int, Iterator[str]]]:
        """Places that a check refuses whatever the call: (reason, how many, their ids from the least busy one on)."""
        yield "queue", len(self.full), iter(self.full)
        yield "round", len(self.busy), (iid for _, iid in self.busy)

    def _busy(self, place: Place) -> bool:
        return place.measured and place.floor_ms > self._budget_ms

    def _side(self, place: Place) -> list[Rank]:
        return self.held if place.model.state in HELD else self.fresh


class Boards:
    """All boards, over live tables, which it only reads (but for their lists of what changed)."""

    def __init__(self, cluster: Cluster, overlay: Overlay, profiles: Profiles, budget_ms: float) -> None:
        self._budget_ms = budget_ms
        self._cluster = cluster
        self._overlay = overlay
        self._profiles = profiles
        self._boards: dict[str, Board] = {}
        self._had: dict[str, Collection[str]] = {}
        """Models of each instance when it was last seen to change: where it may have a place still."""

    def of(self, model: str) -> Board:
        """The model's board as things stand now."""
        self._take_changes()
        board = self._boards.get(model)
        if board is None:
            board = self._boards[model] = Board(self._cluster.serving(model), self._budget_ms)
        if board.dirty:
            board = self._refresh(model, board)
        board.wanted = WANTED
        return board

    def settle(self, *, viewed: bool) -> None:
        """Nobody waits: bring the boards up to date that were asked for lately. `viewed`: a view has come."""
        self._take_changes()
        for model, board in list(self._boards.items()):
            if board.dirty and board.wanted:
                board = self._refresh(model, board)  # noqa: PLW2901 - it may be another one
            if viewed and board.wanted:
                board.wanted -= 1

    def settle_one(self, model: str) -> None:
        """Nobody waits: bring this board up to date, if it was asked for lately."""
        board = self._boards.get(model)
        if board is not None and board.wanted:
            self._take_changes()
            if board.dirty:
                self._refresh(model, board)

    def _take_changes(self) -> None:
        boards = self._boards
        for changed in (self._cluster.changed, self._overlay.changed):
            for iid in changed:
                instance = self._cluster.get(iid)
                has = instance.models if instance is not None else ()
                had = self._had.get(iid, ())
                for model in has:
                    if model in boards:
                        boards[model].dirty.add(iid)
                if has is had:
                    continue
                for model in had:
                    if model in boards and model not in has:
                        boards[model].dirty.add(iid)
                if has:
                    self._had[iid] = has
                else:
                    self._had.pop(iid, None)
            changed.clear()

    def _refresh(self, model: str, board: Board) -> Board:
        dirty = sorted(board.dirty)  # what is told of a decision must not depend on a set's order
        if len(dirty) > FEW and len(dirty) * 4 > len(board.places):
            # Cheaper from the start: one sort instead of many insertions.
            fresh = Board((), self._budget_ms)
            places = {iid: p for iid, p in board.places.items() if iid not in board.dirty}
            for iid in dirty:
                place = self._place(iid, model)
                if place is not None:
                    places[iid] = place
            fresh.fill(places)
            fresh.wanted = board.wanted
            self._boards[model] = fresh
            return fresh
        for iid in dirty:
            place = self._place(iid, model)
            if place is None:
                board.drop(iid)
            else:
                board.put(place)
        board.dirty.clear()
        return board

    def _place(self, iid: str, model: str) -> Place | None:
        instance = self._cluster.get(iid)
        state = instance.models.get(model) if instance is not None else None
        if instance is None or state is None:
            return None
        return place_of(instance, state, self._overlay, self._profiles, self._budget_ms)
