"""A slot driver over a sim engine in virtual time."""

from __future__ import annotations

from talaria_common.clock import ManualClock
from talaria_common.settings import InstanceSettings, SimSettings
from talaria_gpu.engine.contract import EngineCall, Sampling, StepTokens
from talaria_gpu.engine.driver import SlotDriver
from talaria_gpu.engine.ipc import Refused, Report, Stepped
from talaria_gpu.engine.sim import SimEngine
from talaria_gpu.sched.slots import SlotConfig


def make_call(rid: str, ids: list[int], model: str = "a", new: int = 4, **kw) -> EngineCall:
    sampling = kw.pop("sampling", None) or Sampling(max_new_tokens=new)
    return EngineCall(rid=rid, model=model, input_ids=ids, sampling=sampling, **kw)


class Rig:
    def __init__(
        self,
        models: tuple[str, ...] = ("a", "b"),
        slot_ms: float = 200.0,
        drain_ms: float = 50.0,
        config: SlotConfig | None = None,
        **sim,
    ) -> None:
        self.clock = ManualClock()
        defaults = {"ttft_ms": 5.0, "decode_step_ms": 10.0, "switch_ms": 20.0}
        self.instance = InstanceSettings(
            id="i-0", engine="sim", models=models, page_size=4, sim=SimSettings(**(defaults | sim))
        )
        self.engine = SimEngine(self.instance, self.clock)
        self.driver = SlotDriver(self.engine, config or SlotConfig(slot_ms, drain_ms), self.clock)
        self.reports: list[Report] = []
        self.at: list[float] = []
        """Time of each report, ms from the start."""
        self._start = self.clock.now()
        self.turns = 0

    def submit(self, *calls: EngineCall) -> None:
        for call in calls:
            self._keep(self.driver.submit(call))

    def abort(self, rid: str) -> None:
        self._keep(self.driver.abort(rid))

    def turn(self) -> None:
        self.turns += 1
        assert self.turns < 200_000, "no end in sight"
        self._keep(self.driver.turn(self.clock.now()))

    def until(self, ms: float) -> None:
        """Run to `ms` after the start."""
        while True:
            wait = self.driver.next_wakeup()
            left = self._start + ms / 1000 - self.clock.now()
            if wait is None or wait > left:
                self.clock.advance(max(0.0, left))
                return
            self.clock.advance(wait)
            self.turn()

    def rest(self) -> None:
        """Run until only a new call could bring work."""
        while (wait := self.driver.next_wakeup()) is not None:
            self.clock.advance(wait)
            self.turn()

    @property
    def ms(self) -> float:
        return (self.clock.now() - self._start) * 1000

    def of(self, kind: type) -> list:
        return [r for r in self.reports if isinstance(r, kind)]

    def steps(self, rid: str) -> list[StepTokens]:
        return [t for r in self.of(Stepped) for t in r.result.tokens if t.rid == rid]

    def tokens(self, rid: str) -> list[int]:
        return [token for t in self.steps(rid) for token in t.token_ids]

    def finished(self) -> dict[str, str]:
        out = {t.rid: t.finished for r in self.of(Stepped) for t in r.result.tokens if t.finished}
        return out | {r.rid: r.error.code for r in self.of(Refused)}

    def first_token_ms(self, rid: str) -> float:
        return next(
            at
            for at, r in zip(self.at, self.reports, strict=True)
            if isinstance(r, Stepped) and any(t.rid == rid and t.token_ids for t in r.result.tokens)
        )

    def _keep(self, reports: list[Report]) -> None:
        self.reports += reports
        self.at += [self.ms] * len(reports)
