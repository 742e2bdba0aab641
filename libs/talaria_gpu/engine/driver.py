"""The slot driver: carries out what the slot scheduler decides on one engine, and measures it.

`submit`, `abort` and `turn` return what the I/O process has to be told. One `turn` is at most one step or one switch. A
refusal of one call, or of a model to be opened, is a report; any other exception out of the engine (a lost rank, too)
leaves the driver and is the end of the process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from talaria_common.clock import Clock
from talaria_common.errors import BadRequestError, DeadlineError, EngineError, TalariaError
from talaria_common.wire.error import info_of
from talaria_gpu.engine.contract import (
    Engine,
    EngineCall,
    ModelInfo,
    Staged,
    StepResult,
    StepTokens,
    SwitchFailedError,
    SwitchTiming,
)
from talaria_gpu.engine.ipc import Closed, Opened, Refused, Report, SlotEnded, Status, Stepped, Switched
from talaria_gpu.hkvr.agreement import RankLostError
from talaria_gpu.sched import messages as ask
from talaria_gpu.sched.config import SlotConfig
from talaria_gpu.sched.demand import Capacity
from talaria_gpu.sched.report import WHY
from talaria_gpu.sched.slots import SlotScheduler

_STUCK_PAUSE_MAX_S = 0.05
_OPENING_POLL_S = 0.05
"""How often an idle driver asks whether the files of a model that is being opened have been read."""


class Spent(NamedTuple):
    """Where the engine process's time went so far, seconds."""

    scheduler_s: float = 0.0
    """Deciding, the look-ups of prefixes for it included."""
    engine_s: float = 0.0
    """Steps and switches."""


@dataclass(frozen=True, slots=True)
class _Switching:
    """A switch under way."""

    timing: SwitchTiming
    since: float


class SlotDriver:
    """An engine, its scheduler and a clock."""

    def __init__(
        self,
        engine: Engine,
        config: SlotConfig,
        clock: Clock,
        *,
        models: Sequence[str] = (),
        idle_check_s: float = 0.05,
        stuck_s: float = 20.0,
    ) -> None:
        """Drive `engine`; the rotation is the order of `models`.

        Args:
            engine: owned from now on.
            config: slot budgets.
            clock: read around steps and switches.
            models: all that may ever be open; default: those that are.
            idle_check_s: idle time before the engine checks itself for leaks, once after work.
            stuck_s: an engine that finds nothing to run for this long, though calls wait, is broken.
        """
        self._engine = engine
        self._clock = clock
        capacity = {name: _capacity(info) for name, info in engine.models().items()}
        names = tuple(models) or tuple(capacity)
        self._scheduler = SlotScheduler(names, config, engine.active, clock.now(), capacity)
        self._opening: dict[str, float] = {}
        """Models that are being opened, with the time of the command."""
        self._poll_at = 0.0
        """When to ask the engine about the first of them."""
        self._staging = config.ablation.staging
        self._under_way: ask.RunStep | _Switching | None = None
        self._idle_check_s = idle_check_s
        self._stuck_s = stuck_s
        self._stuck_since: float | None = None
        self._pause_s = 0.0
        self._pause_until = 0.0
        self._check_at: float | None = None
        """When the leak check after the last work is due; None: it is done."""
        self._prefilled_tokens = 0
        self._switches = 0
        self._idle_checked = 0
        self._scheduler_s = self._engine_s = 0.0

    # --- calls

    def submit(self, call: EngineCall) -> list[Report]:
        """Queue a call; returns its refusal if the engine refuses."""
        now = self._clock.now()
        try:
            if self._scheduler.model_of(call.rid) is not None:
                raise BadRequestError(f"call {call.rid} is running already")
            if call.deadline and call.deadline <= now:
                raise DeadlineError("the call's deadline passed before it reached the engine")
            self._engine.submit(call)
        except RankLostError:
            raise
        except TalariaError as e:
            return [Refused(rid=call.rid, error=info_of(e))]
        self._pause_until = 0.0  # a new call may be one that can run
        known = ask.Call.of(call)
        self._scheduler.handle(now, ask.Arrived(known if known.arrival else known._replace(arrival=now)))
        return []

    def abort(self, rid: str) -> list[Report]:
        """Drop a call and confirm it; an unknown one is ignored: it finished meanwhile."""
        model = self._scheduler.model_of(rid)
        if model is None:
            return []
        self._scheduler.handle(self._clock.now(), ask.Left(rid))
        return [self._dropped(rid, model, "abort")]

    # --- models

    def open(self, model: str) -> list[Report]:
        """Begin to open a configured model; `turn` goes on with it, and reports."""
        info = self._engine.models().get(model)
        if info is not None:
            return [Opened(info=info)]
        self._opening.setdefault(model, self._clock.now())
        self._poll_at = 0.0
        return []

    def close_model(self, model: str) -> list[Report]:
        """Close a model without unfinished calls."""
        info = self._engine.models().get(model)
        if info is not None and (self._scheduler.calls_of(model) or self._engine.active == model):
            return [Opened(info=info)]
        self._opening.pop(model, None)
        if info is not None:
            self._engine.close_model(model)
        return [Closed(model=model), self.status()]

    def _open_next(self) -> list[Report]:
        """Ask for the model whose opening was asked for first."""
        model, since = next(iter(self._opening.items()))
        try:
            self._poll_at = self._clock.now() + _OPENING_POLL_S
            if not self._engine.open_model(model):
                return []
        except RankLostError:
            raise
        except TalariaError as e:
            del self._opening[model]
            return [Closed(model=model, error=str(e))]
        del self._opening[model]
        info = self._engine.models()[model]
        self._scheduler.opened(model, _capacity(info))
        return [Opened(info=info, open_ms=(self._clock.now() - since) * 1000), self.status()]

    # --- time

    def next_wakeup(self) -> float | None:
        """Seconds until `turn` has something to do: 0 at once, None when only a new call can bring it."""
        wait = self._until_work()
        if not self._opening or self._under_way is not None:  # the files are asked about between steps
            return wait
        poll = max(0.0, self._poll_at - self._clock.now())
        return poll if wait is None else min(wait, poll)

    def _until_work(self) -> float | None:
        now = self._clock.now()
        if self._under_way is not None:
            wait = self._engine.next_event_in() or 0.0
            deadline = self._scheduler.next_deadline()
            return wait if deadline is None else min(wait, max(0.0, deadline - now))
        if not self._scheduler.resting:
            until = max(self._pause_until, self._scheduler.linger_until(now))
            deadline = self._scheduler.next_deadline()
            return max(0.0, (until if deadline is None else min(until, deadline)) - now)
        return None if self._check_at is None else max(0.0, self._check_at - now)

    def turn(self, now: float) -> list[Report]:
        """Do the next thing: at most one step or one switch."""
        reports: list[Report] = []
        under_way = self._under_way
        if under_way is not None:
            if (self._engine.next_event_in() or 0.0) > 0:
                self._carry(now, self._scheduler.handle(now, ask.Tick()), reports)
            elif isinstance(under_way, _Switching):
                self._switched(under_way, reports)
            else:
                self._step(under_way, reports)
            return reports
        if self._opening:
            reports += self._open_next()
        began = self._clock.now()
        prefixes = {rid: self._engine.prefix_state(rid) for rid in self._scheduler.asks()}
        if self._staging and (upcoming := self._scheduler.upcoming) is not None:
            self._engine.stage(upcoming)
        effects = self._scheduler.handle(now, ask.Turn(prefixes))
        self._scheduler_s += self._clock.now() - began
        self._carry(now, effects, reports)
        return reports

    def spent(self) -> Spent:
        """Where the time went."""
        return Spent(self._scheduler_s, self._engine_s)

    @property
    def boundary_ms(self) -> float:
        """See `SlotScheduler.boundary_ms`."""
        return self._scheduler.boundary_ms(self._clock.now())

    @property
    def boundary_steps(self) -> int | None:
        """See `SlotScheduler.boundary_steps`."""
        return self._scheduler.boundary_steps(self._clock.now())

    def status(self) -> Status:
        """What the heartbeat says."""
        now, estimates, plan = self._clock.now(), self._scheduler.estimates, self._scheduler.plan
        staged = self._engine.staged
        return Status(
            active=self._engine.active,
            loads={model: self._engine.load(model) for model in self._engine.models()},
            prefilled_tokens=self._prefilled_tokens,
            switches=self._switches,
            switch_ms=estimates.switch_ms,
            decode_step_ms=estimates.decode_step_ms,
            prefill_ms_per_token=estimates.prefill_ms_per_token,
            slot_remaining_ms=self._scheduler.slot_remaining_ms(now),
            idle_checked=self._idle_checked,
            restore_ms_per_token=estimates.restore_ms_per_token,
            staging_slack_bytes=self._engine.staging_slack_bytes,
            staged=staged,
            switch_now_ms=estimates.switch_now_ms(self._staged_share(staged)),
            at_risk=self._scheduler.at_risk(now),
            round_planned_ms=plan.round_ms if plan else 0.0,
            infeasible=",".join(plan.infeasible) if plan else "",
            scheduler_ms=self._scheduler_s * 1000,
            engine_ms=self._engine_s * 1000,
            host_kv=self._engine.host_kv,
        )

    def _staged_share(self, staged: Staged) -> dict[str, float]:
        info = self._engine.models().get(staged.model) if staged.model else None
        return {staged.model: staged.bytes / info.weight_bytes} if info is not None and info.weight_bytes else {}

    def close(self) -> None:
        """Release the engine."""
        self._engine.close()

    # --- carrying out

    def _carry(self, now: float, effects: Sequence[ask.Effect], reports: list[Report]) -> None:
        over: ask.SlotOver | None = None
        for effect in effects:
            match effect:
                case ask.AbortCall(rid=rid, model=model, reason=reason):
                    reports.append(self._dropped(rid, model, reason))
                case ask.SlotOver():
                    over = effect
                case ask.RunStep():
                    self._check_at = None
                    self._step(effect, reports)
                case ask.RunSwitch(model=model):
                    self._check_at = None
                    self._switch(model, over, reports)
        if self._under_way is None and self._scheduler.resting:
            self._rest(now)

    def _step(self, order: ask.RunStep, reports: list[Report]) -> None:
        began = self._clock.now()
        result = self._engine.step(order.admit)
        if result.kind == "idle" and (self._engine.next_event_in() or 0.0) > 0:
            self._under_way = order
            return
        self._under_way = None
        now = self._clock.now()
        self._engine_s += now - began
        stepped = ask.Stepped(order.model, result, self._engine.waiting(order.model))
        self._scheduler.handle(now, stepped)
        self._scheduler_s += self._clock.now() - now
        self._watch(now, idle=result.kind == "idle")
        self._prefilled_tokens += result.prefilled_tokens
        if result.tokens:
            reports.append(Stepped(model=order.model, result=result))
        if self._scheduler.resting:
            self._check_at = now + self._idle_check_s

    def _switch(self, model: str, over: ask.SlotOver | None, reports: list[Report]) -> None:
        """Switch, and report the slot `over`: only the switch shows what became of the calls that still ran in it."""
        since = self._clock.now()
        try:
            switching = _Switching(self._engine.switch(model), since)
        except SwitchFailedError as e:
            if over is not None:
                kept = min(over.running, self._engine.running(over.model)) if e.active == over.model else 0
                reports.append(_slot_ended(over, kept, over.running - kept))
            self._switch_failed(e, since, reports)
            return
        if over is not None:
            reports.append(_slot_ended(over, switching.timing.suspended, switching.timing.retracted))
        if (self._engine.next_event_in() or 0.0) > 0:
            self._under_way = switching
        else:
            self._switched(switching, reports)

    def _switched(self, switching: _Switching, reports: list[Report]) -> None:
        self._under_way = None
        now, timing = self._clock.now(), switching.timing
        took_ms = max((now - switching.since) * 1000, timing.total_ms)
        self._switches += 1
        self._engine_s += took_ms / 1000
        left = self._engine.waiting(timing.source) if timing.source else ()
        switched = ask.Switched(
            timing.target,
            took_ms,
            left,
            timing.suspended,
            timing.retracted,
            timing.h2d_bytes,
            timing.weight_bytes,
        )
        self._scheduler.handle(now, switched)
        self._watch(now, idle=False)
        if self._scheduler.resting:
            self._check_at = now + self._idle_check_s
        reports += [Switched(timings=[timing]), self.status()]

    def _switch_failed(self, failure: SwitchFailedError, since: float, reports: list[Report]) -> None:
        """The model could not be brought in: its calls fail, it is closed, and what was active serves on."""
        now = self._clock.now()
        for rid in self._scheduler.calls_of(failure.model):
            self._scheduler.handle(now, ask.Left(rid))
            self._engine.abort(rid)
            end = StepTokens(rid=rid, token_ids=[], finished="error", message=str(failure))
            reports.append(Stepped(model=failure.model, result=StepResult(kind="idle", tokens=[end])))
        self._engine.close_model(failure.model)
        if failure.active is not None:
            waiting = self._engine.waiting(failure.active)
            kept = self._engine.running(failure.active)
            took_ms = (now - since) * 1000
            back = ask.Switched(failure.active, took_ms, waiting, suspended=kept, failed=True)
            self._scheduler.handle(now, back)
        reports += [Closed(model=failure.model, error=str(failure)), self.status()]

    def _dropped(self, rid: str, model: str, reason: Literal["abort", "deadline"]) -> Stepped:
        self._engine.abort(rid)
        if self._scheduler.resting:
            self._check_at = self._clock.now() + self._idle_check_s
        end = StepTokens(rid=rid, token_ids=[], finished=reason)
        return Stepped(model=model, result=StepResult(kind="idle", tokens=[end]))

    def _watch(self, now: float, *, idle: bool) -> None:
        """An idle step though calls wait: ask again, ever more slowly, and give up on the engine at last."""
        if not idle or self._scheduler.resting:
            self._stuck_since, self._pause_s, self._pause_until = None, 0.0, 0.0
            return
        self._pause_s = min(_STUCK_PAUSE_MAX_S, max(0.001, self._pause_s * 2))
        self._pause_until = now + self._pause_s
        if self._stuck_since is None:
            self._stuck_since = now
        elif now - self._stuck_since > self._stuck_s:
            raise EngineError(f"the engine has run nothing for {self._stuck_s} s, though calls wait")

    def _rest(self, now: float) -> None:
        """Nothing to do: let the engine look for leaks, once after work and off the way of the next call."""
        if self._check_at is None or now < self._check_at:
            return
        self._check_at = None
        if not any(self._engine.has_unfinished(model) for model in self._engine.models()):
            self._engine.check_idle()
            self._idle_checked += 1


def _capacity(info: ModelInfo) -> Capacity:
    return Capacity(info.kv_capacity_tokens, info.max_running)


def _slot_ended(over: ask.SlotOver, suspended: int, retracted: int) -> SlotEnded:
    told: dict[str, Any] = {
        "suspended": suspended,
        "retracted": retracted,
        "infeasible": ",".join(over.infeasible),
        **{f"deferred_{why}": over.deferred_why.get(why, 0) for why in WHY},
    }
    fields = {name: getattr(over, name) for name in SlotEnded.__struct_fields__ if name not in told}
    return SlotEnded(**fields, **told)
