"""A router core on a clock that stands still, with builders for what it is told."""

from __future__ import annotations

from itertools import count
from typing import Any, TypeVar

from talaria_common.clock import ManualClock, to_ms
from talaria_common.wire import (
    ClusterView,
    Completion,
    Event,
    InstanceView,
    ModelState,
    Placement,
    RouteReply,
    RouteRequest,
    SeenPlacements,
    Snapshot,
    Verdict,
    decode,
    encode,
)
from talaria_router.config import RouterConfig
from talaria_router.core import RouterCore
from talaria_router.messages import Ask, Effect, Emit, Gained, Input, Reply, Tick
from talaria_router.sessions import key_of

M = "m"
T = TypeVar("T")


def model(name: str = M, state: Any = "active", **more: Any) -> ModelState:
    more = {
        "context_tokens": 4096,
        "kv_capacity_tokens": 8192,
        "prefill_ms_per_token": 1.0,
        "decode_step_ms": 10.0,
        "switch_ms": 500.0,
        "open_ms": 20_000.0,
        "max_running": 8,
        "kv_epoch": 1,
    } | more
    return ModelState(name=name, state=state, **more)


class Rig:
    def __init__(self, own: bool = True, **config: Any) -> None:
        self.clock = ManualClock()
        config = {"catalog": frozenset({M, "other"}), "patience_s": 0.0} | config
        self.core = RouterCore(RouterConfig(**config), "r0", "e0")
        self.versions: dict[str, int] = {}
        self.view_version = 0
        self.effects: list[Effect] = []
        self._rids = count()
        if own:
            for p in range(256):
                self.do(Gained(p, 1000 + p, may_hold=False))

    @property
    def now(self) -> float:
        return self.clock.now()

    @property
    def state(self) -> Any:
        return self.core.state

    def do(self, message: Input) -> list[Effect]:
        effects = self.core.handle(self.now, message)
        self.effects += effects
        return effects

    def snapshot(self, iid: str = "a", models: tuple[ModelState, ...] | None = None, **more: Any) -> Snapshot:
        version = more.pop("version", self.versions.get(iid, 0) + 1)
        self.versions[iid] = max(version, self.versions.get(iid, 0))
        more = {
            "epoch": f"{iid}-1",
            "pool": "cold",
            "status": "ready",
            "max_queued": 64,
            "at_ms": to_ms(self.now),
        } | more
        return Snapshot(iid=iid, version=version, models=(model(),) if models is None else models, **more)

    def view(self, *snapshots: Snapshot, full: bool = False, health: Any = "ok", **more: Any) -> list[Effect]:
        self.view_version += 1
        views = tuple(InstanceView(snapshot=s, age_ms=more.pop("age_ms", 0), health=health) for s in snapshots)
        more = {"telemetry": "t0", "epoch": "te", "version": self.view_version} | more
        return self.do(ClusterView(at_ms=to_ms(self.now), full=full, instances=views, **more))

    def request(self, session: str = "s", **more: Any) -> RouteRequest:
        more = {
            "rid": f"{next(self._rids):032x}",
            "tenant": "t",
            "model": M,
            "api": "api-0",
            "prompt_bytes": 400,
            "deadline_ms": to_ms(self.now + 60),
        } | more
        return RouteRequest(session=session, **more)

    def ask(self, session: str = "s", **more: Any) -> Placement | Verdict | None:
        return self.send(self.request(session, **more))

    def send(self, request: RouteRequest) -> Placement | Verdict | None:
        """The answer, None if the call waits."""
        return outcome(self.do(Ask(request, "waiter")))

    def placed(self, session: str = "s", **more: Any) -> Placement:
        got = self.ask(session, **more)
        assert isinstance(got, Placement), got
        return got

    def refused(self, session: str = "s", **more: Any) -> Verdict:
        got = self.ask(session, **more)
        assert isinstance(got, Verdict), got
        return got

    def completion(self, p: Placement, session: str = "s", **more: Any) -> Completion:
        more = {
            "model": M,
            "tenant": "t",
            "ok": True,
            "epoch": f"{p.iid}-1",
            "kv_tokens": 90,
            "kv_epoch": 1,
            "prefix_handle": "h",
            "prompt_tokens": 100,
            "completion_tokens": 20,
            "at_ms": to_ms(self.now),
        } | more
        return Completion(
            iid=p.iid, rid=p.fence.rid, attempt=p.fence.attempt, router=p.router, router_epoch=p.router_epoch,
            seq=p.seq, partition=p.fence.partition, session=session, **more,
        )  # fmt: skip

    def complete(self, p: Placement, session: str = "s", **more: Any) -> list[Effect]:
        return self.do(self.completion(p, session, **more))

    def turn(self, session: str = "s", **more: Any) -> Placement:
        """A whole call."""
        p = self.placed(session)
        self.complete(p, session, **more)
        return p

    def later(self, seconds: float) -> list[Effect]:
        self.clock.advance(seconds)
        return self.do(Tick())

    def entry(self, session: str = "s", name: str = M) -> Any:
        return self.state.sessions.get(key_of("t", session, name)[0])

    def events(self, kind: str) -> list[Event]:
        """As they come off the bus."""
        told = [e.event for e in self.effects if isinstance(e, Emit) and e.event.kind == kind]
        return [decode(encode(event), Event) for event in told]

    @property
    def books(self) -> Any:
        return self.state.leases.books

    @property
    def load(self) -> tuple[int, int, int]:
        return self.state.overlay.total()


def outcome(effects: list[Effect]) -> Placement | Verdict | None:
    replies = only(effects, Reply)
    assert len(replies) <= 1
    if not replies:
        return None
    reply = replies[0].reply
    assert isinstance(reply, RouteReply)
    assert (reply.placement is None) != (reply.verdict is None)
    return reply.placement or reply.verdict


def only(effects: list[Effect], kind: type[T]) -> list[T]:
    return [e for e in effects if isinstance(e, kind)]


def seen(upto: int, *missing: int) -> dict[str, SeenPlacements]:
    return {"r0/e0": SeenPlacements(upto=upto, missing=missing)}
