"""What the slot scheduler knows at a moment: decisions (`slots`), choices (`choice`) and forecasts read the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from talaria_gpu.engine.contract import PrefixState
from talaria_gpu.sched import order
from talaria_gpu.sched.book import RoundBook
from talaria_gpu.sched.config import SlotConfig
from talaria_gpu.sched.demand import Batch, Capacity
from talaria_gpu.sched.estimates import Estimates
from talaria_gpu.sched.queue import ModelQueue
from talaria_gpu.sched.returns import Returns
from talaria_gpu.sched.slot import Slot


class State:
    """Plain data; only `SlotScheduler` changes it.

    Args:
        models: in the order of their slots.
        config: targets and budgets.
        capacity: of the device, by model.
    """

    def __init__(self, models: Sequence[str], config: SlotConfig, capacity: Mapping[str, Capacity]) -> None:
        self.names = tuple(models)
        self.order = {name: position for position, name in enumerate(models)}
        self.config = config
        self.capacity = dict(capacity)
        self.queues = {name: ModelQueue() for name in models}
        self.slot: Slot | None = None
        self.model_of: dict[str, str] = {}
        """The unfinished calls."""
        self.out: dict[str, int] = {}
        """Tokens that they have generated."""
        self.deadlines: list[tuple[float, str]] = []
        """A heap of (deadline, rid); some are of calls that are gone."""
        self.prefixes: dict[str, PrefixState] = {}
        self.fresh: set[str] = set()
        """Calls whose prefix was looked up since the device's cache last changed."""
        self.returns = Returns()
        self.estimates = Estimates()
        self.book = RoundBook(config, self.estimates, self.queues)

    # --- the rotation

    def with_work(self, first: str) -> list[str]:
        """`first` and, in the order of their slots, the other models with work.

        The order is a fixed rotation as long as anybody waits, so that nobody is overtaken twice.
        """
        start = self.order[first]
        names = [self.names[(start + i) % len(self.names)] for i in range(len(self.names))]
        return [name for name in names if name == first or self.queues[name]]

    def next_other(self) -> str | None:
        """The next model in the rotation, after the active one, that has work."""
        active = self.slot.model if self.slot else None
        start = -1 if active is None else self.order[active]
        for i in range(1, len(self.names) + 1):
            name = self.names[(start + i) % len(self.names)]
            if name != active and self.queues[name]:
                return name
        return None

    def reorder(self) -> None:
        """A round begins from nothing: the order that leaves staging most time."""
        if self.config.order == "staging" and self.config.ablation.staging:
            self._rotate(order.for_staging(self.names, self.estimates.stage_ms, self.book.slot_ms))

    def joined(self, model: str) -> None:
        """A model has got work. By arrival, its slot comes after those of all others: it overtakes nobody."""
        if self.config.order == "arrival" and self.slot is not None and self.slot.model != model:
            self._rotate(order.joined(self.names, model, self.slot.model))

    def _rotate(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self.order = {name: position for position, name in enumerate(self.names)}

    # --- what is left of the slot

    def room_ms(self, now: float, slot: Slot, more_ms: float) -> float:
        """See `Slot.room_ms`."""
        return slot.room_ms(now, self.estimates.decode_ms(slot.model), self.book.lossy, more_ms)

    def batch(self, slot: Slot) -> Batch:
        """An empty batch beside what the slot's model runs."""
        return Batch(
            slot.model,
            self.estimates,
            self.prefixes,
            self.out,
            capacity=self.capacity.get(slot.model),
            running=self.queues[slot.model].running.values(),
        )
