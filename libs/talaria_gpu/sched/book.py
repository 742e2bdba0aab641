"""The round in progress: its plan, who has had a slot in it, and what it is measured against (Eq. 3-5)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from talaria_gpu.engine.contract import PrefixState
from talaria_gpu.sched.config import SlotConfig
from talaria_gpu.sched.demand import Batch
from talaria_gpu.sched.estimates import Estimates, Ewma
from talaria_gpu.sched.messages import Call
from talaria_gpu.sched.plan import Demand, Limits, RoundPlan, SlotPlan, plan_round
from talaria_gpu.sched.queue import ModelQueue


class RoundBook:
    """Plans rounds from queues and estimates, and keeps count of them."""

    def __init__(self, config: SlotConfig, estimates: Estimates, queues: Mapping[str, ModelQueue]) -> None:
        self._config = config
        self._estimates = estimates
        self._queues = queues
        self._sp_ms: dict[str, Ewma] = {}
        self._slot_ms: dict[str, Ewma] = {}
        self.lossy = not (config.suspends and config.ablation.hkvr)
        """Whether a switch throws the running calls' prefill away; each switch shows it anew."""
        self._served: set[str] = set()
        self.plan: RoundPlan | None = None
        self.number = 0
        self.began = 0.0
        """Seconds."""

    def sp_ms(self, model: str) -> float:
        """What SP has used of a slot lately."""
        ewma = self._sp_ms.get(model)
        return ewma.value if ewma is not None and ewma.value is not None else 0.0

    def slot_ms(self, model: str) -> float:
        """How long the model's slots have been lately; before the first, as configured."""
        ewma = self._slot_ms.get(model)
        return ewma.value if ewma is not None and ewma.value is not None else self._config.slot_ms

    def begin(
        self, now: float, models: Sequence[str], prefixes: Mapping[str, PrefixState], out: Mapping[str, int]
    ) -> None:
        """A new round over `models`, the first of which has its slot now."""
        self.number += 1
        self.began = now
        self._served = set()
        self._make(now, models, prefixes, out)

    def slot(
        self, now: float, models: Sequence[str], prefixes: Mapping[str, PrefixState], out: Mapping[str, int]
    ) -> SlotPlan:
        """The plan for the slot of `models[0]`, the others having work: of this round, or of the next one.

        A model that got work after the round began joins it, and the rest of the round is planned anew: those that
        have had their slots wait for their next ones no longer than Eq. 5 says, or the plan is infeasible.
        """
        model = models[0]
        if self.plan is None or model in self._served:
            self.begin(now, models, prefixes, out)
        elif model not in self.plan.slots:
            rest = [name for name in models if name not in self._served]
            self._make(now, rest, prefixes, out, spent_ms=max(0.0, (now - self.began) * 1000))
        self._served.add(model)
        assert self.plan is not None
        return self.plan.slots[model]

    def alone(self) -> None:
        """There is nobody to share with: no round."""
        self.plan = None
        self._served = set()

    def closed(self, model: str, sp_ms: float, active_ms: float) -> None:
        """A slot ended after so much SP, and so much time in all."""
        self._sp_ms.setdefault(model, Ewma()).add(sp_ms)
        self._slot_ms.setdefault(model, Ewma()).add(active_ms)

    def _make(
        self,
        now: float,
        models: Sequence[str],
        prefixes: Mapping[str, PrefixState],
        out: Mapping[str, int],
        *,
        spent_ms: float = 0.0,
    ) -> None:
        config = self._config
        limits = Limits(config.slot_ms, config.drain_ms, config.round_limit_ms, config.t_tpot_ms, self.lossy)
        self.plan = plan_round([self._demand(now, model, prefixes, out) for model in models], limits, spent_ms)

    def _demand(self, now: float, model: str, prefixes: Mapping[str, PrefixState], out: Mapping[str, int]) -> Demand:
        musts = self._queues[model].musts(now, self._config.patience_ms)
        return Demand(
            model,
            self._estimates.decode_ms(model),
            self._estimates.to_switch_ms(model),
            self._cost_ms(model, musts, prefixes, out),
            self._cost_ms(model, self._queues[model].waiting.values(), prefixes, out) + self.sp_ms(model),
        )

    def _cost_ms(
        self, model: str, calls: Iterable[Call], prefixes: Mapping[str, PrefixState], out: Mapping[str, int]
    ) -> float:
        batch = Batch(model, self._estimates, prefixes, out)
        for call in calls:
            batch.add(call)
        return batch.cost_ms()
