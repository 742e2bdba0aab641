"""The core of one call at the api: ask for a place, hand over the body, pass frames on, place again (DESIGN 4 and 10).

Sans-I/O: `Call.handle(now, event) -> effects`, over plain state. The shell (`link`) carries effects out and feeds
results back; it ticks every call regularly, so every wait here ends by the call's deadline at the latest.

    asking ──placement──▶ forwarding ──accepted──▶ waiting ──first token──▶ streaming ──final──▶ ended
      ▲ │                     │                       │                        │
      │ └ pausing             └──── rejected, silent, dead, frames lost ───┐    └─ dead, frames lost ─▶ ended (error)
      └────────────────────── attempt + 1, instance excluded ◀─────────────┘
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from talaria_api.errors import ClientGoneError
from talaria_api.messages import (
    Absent,
    Answered,
    Arrived,
    Ask,
    Begin,
    CancelReason,
    ClientGone,
    Effect,
    Emit,
    Event,
    Facts,
    Finish,
    Forward,
    ForwardFailed,
    Gone,
    Limits,
    Replaced,
    Routed,
    RouteFailed,
    SendCancel,
    SlowClient,
    Tick,
)
from talaria_api.peers import Peers
from talaria_common.clock import to_ms
from talaria_common.errors import (
    BusError,
    BusTimeoutError,
    DeadlineError,
    EngineError,
    InstanceLostError,
    ModelNotFoundError,
    NoRespondersError,
    OverloadedError,
    TalariaError,
    UnavailableError,
)
from talaria_common.ids import partition_of
from talaria_common.wire import Cancel, ForwardHead, ForwardReply, Frame, Placement, RouteReply, RouteRequest, Verdict
from talaria_common.wire.error import ErrorInfo, from_info

Phase = Literal["asking", "pausing", "forwarding", "waiting", "streaming", "ended"]
_VERDICTS: dict[str, type[TalariaError]] = {
    "overloaded": OverloadedError,
    "no_instance": UnavailableError,
    "unknown_model": ModelNotFoundError,
    "expired": DeadlineError,
}


@dataclass(slots=True)
class Call:
    """State of one call. Read-only for others: `phase`, `attempt`, `placement`, `tokens_made`."""

    facts: Facts
    limits: Limits
    peers: Peers
    phase: Phase = "asking"
    attempt: int = 0
    placement: Placement | None = None
    tokens_made: bool = False
    """A frame with an answer has been emitted: from here on a death is an error."""
    _epoch: str = ""
    _exclude: tuple[str, ...] = ()
    _recovering: tuple[str, ...] = ()
    _next_seq: int = 0
    _since: float = 0.0
    """Acceptance of the present attempt."""
    _ask_at: float = 0.0
    _pause_s: float = 0.0
    _unanswered_since: float | None = None
    _route_error: str = ""
    _last_error: TalariaError | None = None

    @property
    def iid(self) -> str:
        """The instance of the present attempt; "" while there is none."""
        return "" if self.placement is None else self.placement.iid

    def handle(self, now: float, event: Event) -> list[Effect]:  # noqa: C901, PLR0911 - one case per event
        """Take in one event. After a `Finish` nothing has an effect any more."""
        if self.phase == "ended":
            return []
        match event:
            case Arrived():
                return self._arrived(now, event)
            case Tick():
                return self._tick(now)
            case Begin():
                return self._ask(now)
            case Routed(attempt, reply):
                return self._routed(now, reply) if self.phase == "asking" and attempt == self.attempt else []
            case RouteFailed(attempt, error):
                return self._route_failed(now, error) if self.phase == "asking" and attempt == self.attempt else []
            case Answered(attempt, reply):
                return self._answered(now, reply) if attempt == self.attempt else []
            case ForwardFailed(attempt, error):
                waits = self.phase == "forwarding" and attempt == self.attempt
                return self._forward_failed(now, error) if waits else []
            case Absent(iid, epoch):
                return self._absent(now, iid, epoch)
            case Gone(iid, epoch):
                return self._gone(now, iid, epoch)
            case ClientGone():
                return self._stop("client_gone", ClientGoneError("the client closed the connection"))
            case SlowClient(error):
                return self._stop("slow_client", error)

    def follows(self, iid: str, epoch: str, frame: Frame) -> bool:
        """Whether `frame` is the next delta of a stream under way. It is counted then, and only to be passed on.

        What `handle` would make of it, without the objects: this is asked for every token.
        """
        if (
            self.phase != "streaming"
            or frame.kind != "delta"
            or frame.seq != self._next_seq
            or frame.attempt != self.attempt
            or epoch != self._epoch
            or iid != self.iid
        ):
            return False
        self._next_seq += 1
        return True

    # --- asking for a place

    def _ask(self, now: float) -> list[Effect]:
        if self._unanswered_since is None:
            self._unanswered_since = now
        self.phase = "asking"
        f = self.facts
        request = RouteRequest(
            rid=f.rid,
            attempt=self.attempt,
            tenant=f.tenant,
            session=f.session,
            session_source=f.session_source,
            parent_session=f.parent_session,
            session_final=f.session_final,
            model=f.model,
            api=f.api,
            prompt_bytes=f.prompt_bytes,
            max_tokens=f.max_tokens,
            stream=f.stream,
            priority=f.priority,
            exclude=self._exclude,
            recovering=self._recovering,
            deadline_ms=to_ms(f.deadline),
            prefix_id=f.prefix_id,
            prefix_bytes=f.prefix_bytes,
            may_wait=True,
        )
        timeout_s = min(self.limits.route_timeout_s, max(0.001, f.deadline - now))
        return [Ask(partition_of(f.tenant, f.session, f.model), request, timeout_s)]

    def _routed(self, now: float, reply: RouteReply) -> list[Effect]:
        self._unanswered_since, self._route_error = None, ""
        if reply.placement is not None:
            return self._forward(now, reply.placement)
        if reply.queued is not None:
            return self._ask(now)
        if reply.verdict is None:
            return self._finish(EngineError("the router answered with neither a placement nor a verdict"))
        if reply.verdict.reason == "not_owner":
            return self._pause(now)
        return self._finish(self._verdict(reply.verdict))

    def _verdict(self, verdict: Verdict) -> TalariaError:
        """The error to report. After a failed attempt "no instance" hides the reason, which we know better."""
        error = from_info(verdict.error)
        if type(error) is TalariaError:
            error = _VERDICTS[verdict.reason](error.message, retry_after_s=error.retry_after_s)
        if verdict.reason == "no_instance" and self._last_error is not None:
            if isinstance(self._last_error, OverloadedError):
                return self._last_error
            return UnavailableError(
                f"{error.message} (before that: {self._last_error.message})", retry_after_s=error.retry_after_s
            )
        return error

    def _route_failed(self, now: float, error: TalariaError) -> list[Effect]:
        if not isinstance(error, BusError):
            return self._finish(error)
        self._route_error = error.message
        if isinstance(error, BusTimeoutError) and not self._given_up(now):
            return self._ask(now)
        return self._pause(now)

    def _given_up(self, now: float) -> bool:
        return self._unanswered_since is not None and now - self._unanswered_since >= self.limits.route_give_up_s

    def _pause(self, now: float) -> list[Effect]:
        self.phase = "pausing"
        self._pause_s = min(self.limits.max_pause_s, (self._pause_s * 2) or self.limits.pause_s)
        self._ask_at = now + self._pause_s
        return self._tick(now)

    # --- handing over the body

    def _forward(self, now: float, placement: Placement) -> list[Effect]:
        self.phase, self.placement = "forwarding", placement
        self._epoch, self._next_seq, self._since, self._pause_s = "", 0, now, 0.0
        f = self.facts
        head = ForwardHead(
            placement=placement,
            endpoint=f.endpoint,
            api=f.api,
            api_epoch=f.api_epoch,
            tenant=f.tenant,
            session=f.session,
            model=f.model,
            session_final=f.session_final,
            stream=f.stream,
            priority=f.priority,
            is_continuation=placement.continuation,
        )
        return [Forward(head, min(self.limits.accept_timeout_s, max(0.001, f.deadline - now)))]

    def _answered(self, now: float, reply: ForwardReply) -> list[Effect]:
        if self.phase != "forwarding":
            # The first frame has overtaken the answer; only a contradiction matters now.
            return [] if reply.accepted or self.phase in ("asking", "pausing") else self._rejected(now, reply)
        if reply.accepted:
            self._accept(now, reply.epoch)
            return self._check_alive(now)
        return self._rejected(now, reply)

    def _accept(self, now: float, epoch: str) -> None:
        self.phase, self._epoch, self._since = "waiting", epoch, now

    def _rejected(self, now: float, reply: ForwardReply) -> list[Effect]:
        error = from_info(reply.error or ErrorInfo("engine_error", f"instance {self.iid} refused the call"))
        if reply.retryable:
            return self._place_again(now, error, "rejected", cancel=False)
        return self._finish(error)

    def _forward_failed(self, now: float, error: TalariaError) -> list[Effect]:
        if not isinstance(error, BusError):
            return self._finish(error)  # too large, for one: no instance would take it
        if isinstance(error, BusTimeoutError | NoRespondersError):
            silent = UnavailableError(f"instance {self.iid} did not take the call in time")
            return self._place_again(now, silent, "no_accept")
        # Our own connection failed: that says nothing against the instance.
        return self._place_again(now, error, "bus", exclude=False)

    # --- frames

    def _arrived(self, now: float, event: Arrived) -> list[Effect]:  # noqa: PLR0911 - one line per kind of frame
        frame = event.frame
        if frame.attempt != self.attempt or event.iid != self.iid:
            return []  # late, of an earlier attempt
        if self.phase == "forwarding":
            self._accept(now, event.epoch)  # frames and answers travel on different subscriptions
        elif self.phase not in ("waiting", "streaming") or event.epoch != self._epoch:
            return []
        if frame.seq < self._next_seq:
            return []
        if frame.seq > self._next_seq:
            return self._failed(now, f"frames {self._next_seq} to {frame.seq - 1} were lost on the bus", "frames_lost")
        self._next_seq += 1
        if frame.kind == "delta":
            self.phase, self.tokens_made = "streaming", True
            return [Emit(frame)]
        if frame.kind == "final" and frame.finish_reason != "abort":
            self.tokens_made = True
            return [Emit(frame), *self._finish(None)]
        info = frame.error or ErrorInfo("engine_error", f"instance {self.iid} aborted the call")
        if frame.retryable and not self.tokens_made:
            return self._place_again(now, from_info(info), "engine", cancel=False)
        return self._finish(from_info(info))

    # --- signs of death

    def _check_alive(self, now: float) -> list[Effect]:
        lost = self.peers.lost(now, self.iid, self._epoch, self._since)
        if lost is None:
            return []
        return self._failed(
            now, f"instance {self.iid} {'was restarted' if lost == 'restarted' else 'went silent'}", lost
        )

    def _absent(self, now: float, iid: str, epoch: str) -> list[Effect]:
        here = self.phase in ("waiting", "streaming") and iid == self.iid and epoch == self._epoch
        if not here or now - self._since < self.limits.alive_grace_s:
            return []
        return self._failed(now, f"instance {iid} no longer knows the call", "forgotten", cancel=False)

    def _gone(self, now: float, iid: str, epoch: str) -> list[Effect]:
        """Telemetry may be wrong (its own connection), so it counts only if we hear nothing either."""
        here = self.phase in ("waiting", "streaming") and iid == self.iid and epoch == self._epoch
        if not here or self.peers.quiet_for(now, iid) < self.limits.alive_grace_s:
            return []
        if now - self._since < self.limits.alive_grace_s:
            return []
        return self._failed(now, f"instance {iid} is gone", "gone")

    def _failed(self, now: float, message: str, reason: str, *, cancel: bool = True) -> list[Effect]:
        return self._place_again(now, InstanceLostError(message), reason, cancel=cancel)

    def _place_again(
        self, now: float, error: TalariaError, reason: str, *, exclude: bool = True, cancel: bool = True
    ) -> list[Effect]:
        """Another attempt elsewhere; or the end, if tokens were passed on or attempts are used up."""
        effects = self._cancel("superseded") if cancel else []
        if self.tokens_made or self.attempt + 1 >= self.limits.max_attempts:
            return effects + self._finish(error)
        effects.append(Replaced(self.iid, reason))
        if exclude:
            self._exclude = (*(i for i in self._exclude if i != self.iid), self.iid)
            others = tuple(i for i in self._recovering if i != self.iid)
            self._recovering = others if isinstance(error, OverloadedError) else (*others, self.iid)
        self.attempt += 1
        self.placement, self._last_error = None, error
        return effects + (self._ask(now) if exclude else self._pause(now))

    # --- time, and the end

    def _tick(self, now: float) -> list[Effect]:
        if now >= self.facts.deadline:
            return self._stop("deadline", self._late(now))
        if self.phase in ("waiting", "streaming"):
            return self._check_alive(now)
        if self.phase == "pausing":
            if self._given_up(now):
                return self._finish(self._late(now))
            if now >= self._ask_at:
                return self._ask(now)
        return []

    def _late(self, now: float) -> TalariaError:
        since = now - self._unanswered_since if self._unanswered_since is not None else 0.0
        if self._route_error or since >= self.limits.route_timeout_s:
            why = f" ({self._route_error})" if self._route_error else ""
            return UnavailableError(f"no router answered for {since:.1f} s{why}", retry_after_s=1.0)
        return DeadlineError("the call's deadline passed")

    def _stop(self, reason: CancelReason, error: TalariaError) -> list[Effect]:
        return self._cancel(reason) + self._finish(error)

    def _cancel(self, reason: CancelReason) -> list[Effect]:
        if self.phase not in ("forwarding", "waiting", "streaming"):
            return []
        return [SendCancel(self.iid, Cancel(rid=self.facts.rid, attempt=self.attempt, reason=reason))]

    def _finish(self, error: TalariaError | None) -> list[Effect]:
        self.phase = "ended"
        return [Finish(error)]
