"""What the engine's reports mean for the calls and for what is known of the engine. Part of the core, sans-I/O."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from talaria_common.errors import (
    DeadlineError,
    EngineError,
    ModelNotFoundError,
    OverloadedError,
    UnavailableError,
)
from talaria_common.wire.error import from_info
from talaria_gpu.engine.contract import StepResult, StepTokens, join_steps
from talaria_gpu.engine.ipc import (
    Closed,
    Fatal,
    Opened,
    Progress,
    Ready,
    Refused,
    Report,
    SlotEnded,
    Status,
    Stepped,
    Switched,
)
from talaria_instance import events
from talaria_instance.calls import Call
from talaria_instance.engine_state import EngineState
from talaria_instance.ledger import Ledger
from talaria_instance.outbox import Outbox


class Reports:
    """Reads reports.

    Args:
        engine: what is known of it.
        ledger: the calls.
        out: for events.
        switched: called when another model has become active, or one was opened or closed.
        lost: called when the engine gives up, with the reason.
    """

    def __init__(
        self,
        engine: EngineState,
        ledger: Ledger,
        out: Outbox,
        *,
        switched: Callable[[float], None],
        lost: Callable[[float, str], None],
    ) -> None:
        self._engine = engine
        self._ledger = ledger
        self._out = out
        self._active_changed = switched
        self._lost = lost
        self._steps: dict[str, tuple[StepTokens, StepResult]] = {}
        self._on: dict[type, Callable[[float, Any], None]] = {
            Status: self._status,
            Ready: self._engine.ready,
            Progress: self._progress,
            Refused: self._refused,
            Switched: self._switched,
            SlotEnded: self._slot_ended,
            Opened: self._opened,
            Closed: self._closed,
            Fatal: self._fatal,
        }

    def read(self, now: float, reports: Sequence[Report]) -> None:
        """Take what the present engine has reported since the last time, in order.

        Steps in a row count as one for each call: whoever cannot keep up with single tokens pays for few messages.
        """
        self._engine.heard(now)
        for report in reports:
            if isinstance(report, Stepped):
                self._gather(now, report)
                continue
            self._tokens(now)
            self._on[type(report)](now, report)
            if isinstance(report, Fatal):
                return  # what it said after that is of an engine that was given up
        self._tokens(now)

    def _gather(self, now: float, report: Stepped) -> None:
        for step in report.result.tokens:
            before = self._steps.get(step.rid)
            if before is None:
                self._steps[step.rid] = (step, report.result)
                continue
            joined = join_steps(before[0], step)
            if joined is None:
                self._tokens(now)
                self._steps[step.rid] = (step, report.result)
            else:
                self._steps[step.rid] = (joined, before[1])  # the first token's figures are those that count

    def _tokens(self, now: float) -> None:
        steps, self._steps = self._steps, {}
        for rid, (step, result) in steps.items():
            call = self._ledger.in_engine(rid)
            if call is not None:  # else it ended here already, and the engine has been told
                self._stepped(now, call, step, result)

    def _stepped(self, now: float, call: Call, step: StepTokens, result: StepResult) -> None:
        ledger = self._ledger
        fed = ledger.feed(now, call, step, result)
        if fed.stopped:
            ledger.finish(now, call, fed, "stop", tell=not step.finished)
            return
        match step.finished:
            case "":
                if step.token_ids:
                    ledger.send(call, fed)
            case "stop" | "length":
                assert call.stream is not None
                text, stopped = call.stream.tail()
                finish = "stop" if stopped else step.finished
                ledger.finish(now, call, fed._replace(text=fed.text + text), finish, tell=False)
            case "deadline":
                late = DeadlineError("the deadline passed while the call ran")
                ledger.fail(now, call, late, retryable=False, tell=False)
            case "abort":
                ledger.fail(now, call, EngineError("the engine dropped the call"), retryable=True, tell=False)
            case "error":
                failure = EngineError(step.message or "the engine failed on the call")
                ledger.fail(now, call, failure, retryable=True, tell=False)

    def _status(self, now: float, report: Status) -> None:
        before = self._engine.status.active if self._engine.status else None
        self._engine.status = report
        if report.active != before:
            self._active_changed(now)

    def _progress(self, _now: float, report: Progress) -> None:
        self._engine.reason = report.message

    def _refused(self, now: float, report: Refused) -> None:
        call = self._ledger.in_engine(report.rid)
        if call is not None:
            error = from_info(report.error)
            if isinstance(error, ModelNotFoundError):
                # It was open when the call was sent to the engine, and was closed there before it came.
                error = UnavailableError(f"{call.head.model} is not open here any more")
            elsewhere = isinstance(error, UnavailableError | OverloadedError)
            self._ledger.fail(now, call, error, retryable=elsewhere, tell=False)

    def _switched(self, now: float, report: Switched) -> None:
        for timing in report.timings:
            self._out.event(now, "switch", events.switch(timing))

    def _opened(self, now: float, report: Opened) -> None:
        self._engine.opened(report)
        self._active_changed(now)

    def _closed(self, now: float, report: Closed) -> None:
        self._engine.closed(report)
        self._active_changed(now)

    def _slot_ended(self, now: float, report: SlotEnded) -> None:
        self._out.event(now, "round", events.round_(report))

    def _fatal(self, now: float, report: Fatal) -> None:
        self._lost(now, report.message)
