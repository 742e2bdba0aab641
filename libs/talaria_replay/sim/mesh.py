"""A simulated mesh: router, telemetry and instances behind an edge, with a message's delay between each two of them.

Only transport is modelled here: what arrives where, and when. Every decision is made by a production core.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from talaria_api.call import Call as ApiCall
from talaria_api.messages import Answered, Arrived, Ask, Begin, Facts, Finish, Forward, Limits, Routed, SendCancel
from talaria_api.messages import Effect as ApiEffect
from talaria_api.messages import Emit as EmitFrame
from talaria_api.messages import Tick as ApiTick
from talaria_api.peers import Peers
from talaria_common.errors import TalariaError
from talaria_common.ids import PARTITIONS, hash_id
from talaria_common.settings import InstanceSettings
from talaria_common.wire import Completion, ControlReply, ForwardReply, Frame, RouteReply, Snapshot, TokenBatch
from talaria_gpu.sched.config import SlotConfig
from talaria_instance.messages import Answer, CancelCall, Params, Prompt, Publish
from talaria_replay.sim.device import ProfiledDevice
from talaria_replay.sim.events import EventHeap
from talaria_replay.sim.instance import SimInstance
from talaria_replay.sim.scenario import Scenario
from talaria_replay.sim.tally import SlotTally
from talaria_router import messages as router
from talaria_router.config import RouterConfig
from talaria_router.core import RouterCore
from talaria_telemetry import messages as telemetry
from talaria_telemetry.core import TelemetryCore

ROUTER_TICK_S = 0.1
CALL_TICK_S = 1.0
SILENCE_S = 1e9
"""Simulated parts do not die; the silence of an instance without work means nothing."""
TENANT = "default"
API = "api-0"
BYTES_PER_TOKEN = 4


@dataclass(frozen=True, slots=True)
class Request:
    """What a client sends. `on_frame` and `on_end` are told what it gets."""

    session: str
    model: str
    prompt: Prompt
    on_frame: Callable[[Frame], None]
    on_end: Callable[[str, TalariaError | None], None]
    """(instance, error)."""


class SimMesh:
    """The parts and the wires between them.

    Args:
        heap: of the simulation.
        scenario: policies and delays.
        devices: (instance settings, device, slot budgets) of each instance.
        slots: told of each slot and switch.
        opened: the window's start, seconds.
    """

    def __init__(
        self,
        heap: EventHeap,
        scenario: Scenario,
        devices: Sequence[tuple[InstanceSettings, ProfiledDevice, SlotConfig]],
        slots: SlotTally,
        opened: float,
    ) -> None:
        self._heap = heap
        self._clock = heap.clock
        self._hop_s = scenario.hop_ms / 1000
        self._scenario = scenario
        models = {m for settings, _, _ in devices for m in settings.models}
        self.router = RouterCore(
            RouterConfig(
                catalog=frozenset(models),
                policy=scenario.policy,
                tau_s=scenario.tau_s,
                t_ttft_ms=scenario.t_ttft_s * 1000 if scenario.admission else math.inf,
                gamma=scenario.gamma,
                mu_ms_per_gib=scenario.mu_ms_per_gib,
                nu_ms=scenario.nu_ms,
                control_window_s=scenario.control_window_s,
                replica_idle_s=scenario.replica_idle_s,
                overload=scenario.overload,
                queue_max=1_000_000,
                heartbeat_s=scenario.heartbeat_s,
                ask_again_s=scenario.deadline_s,  # an api of the simulation is never gone
            ),
            "router-0",
            "0",
        )
        self.telemetry = TelemetryCore("telemetry-0", "0", heartbeat_s=scenario.heartbeat_s, missed=3, full_every=10)
        tokenize = scenario.tokenize_ms_per_ktoken / 1e6 / BYTES_PER_TOKEN
        self.instances = {
            settings.id: SimInstance(
                heap,
                settings,
                device,
                config,
                prompt=lambda rid: self._calls[rid][0].prompt,
                tokenize_s=lambda size: size * tokenize,
                out=self._instance_says,
                heartbeat_s=scenario.heartbeat_s,
                slots=slots,
                opened=opened,
            )
            for settings, device, config in devices
        }
        self._limits = Limits(
            route_timeout_s=scenario.deadline_s,
            route_give_up_s=math.inf,
            accept_timeout_s=2.0,
            alive_grace_s=2 * scenario.heartbeat_s,
            max_attempts=4,
        )
        self._peers = Peers(SILENCE_S, SILENCE_S)
        self._calls: dict[str, tuple[Request, ApiCall]] = {}
        self._serial = 0
        self.replicas = {"opened": 0, "closed": 0, "refused": 0}
        """What instances answered when the router had them open or close a model (Eq. 2)."""

    @property
    def events(self) -> int:
        """Actions that the simulation took."""
        return self._heap.count

    def start(self) -> None:
        """Everything is up; heartbeats of the parts are spread over their interval."""
        for partition in range(PARTITIONS):
            self._tell_router(router.Gained(partition, rev=1, may_hold=False))
        spread = self._scenario.heartbeat_s / (len(self.instances) + 1)
        for n, instance in enumerate(self.instances.values()):
            instance.start(n * spread)
        self._heap.after(len(self.instances) * spread, self._telemetry_beat)
        self._heap.after(ROUTER_TICK_S, self._router_tick)
        self._heap.after(CALL_TICK_S, self._call_tick)

    # --- the edge

    def call(self, request: Request) -> None:
        """A client's call reaches the api."""
        now = self._clock.now()
        self._serial += 1
        rid = f"{self._serial:032x}"
        params = request.prompt.params
        facts = Facts(
            rid=rid,
            endpoint="chat",
            api=API,
            api_epoch="0",
            tenant=TENANT,
            session=hash_id(TENANT, request.session),
            session_source="header",
            model=request.model,
            prompt_bytes=request.prompt.text_bytes,
            max_tokens=params.max_tokens,
            stream=True,
            deadline=now + self._scenario.deadline_s,
        )
        call = ApiCall(facts, self._limits, self._peers)
        self._calls[rid] = (request, call)
        self._edge(rid, call.handle(now, Begin()))

    def _edge(self, rid: str, effects: list[ApiEffect]) -> None:
        for effect in effects:
            match effect:
                case Ask(request=asked):
                    self._later(lambda r=asked: self._tell_router(router.Ask(r, (r.rid, r.attempt))))
                case Forward(head=head):
                    size = self._calls[rid][0].prompt.text_bytes
                    to = self.instances[head.placement.iid]
                    handle = (rid, head.placement.fence.attempt)
                    self._later(lambda h=head, t=to, n=size, k=handle: t.forward(k, h, n))
                case SendCancel(iid=iid, cancel=cancel):
                    self._later(lambda i=iid, c=cancel: self.instances[i].cancel(CancelCall(c)))
                case EmitFrame(frame=frame):
                    self._calls[rid][0].on_frame(frame)
                case Finish(error=error):
                    request, call = self._calls.pop(rid)
                    request.on_end(call.iid, error)
                case _:
                    pass  # Replaced: for counters

    def _call_tick(self) -> None:
        now = self._clock.now()
        for rid, (_, call) in list(self._calls.items()):
            if call.phase != "ended":
                self._edge(rid, call.handle(now, ApiTick()))
        self._heap.after(CALL_TICK_S, self._call_tick)

    # --- the router

    def _tell_router(self, message: router.Input) -> None:
        for effect in self.router.handle(self._clock.now(), message):
            if isinstance(effect, router.Reply):
                self._later(lambda e=effect: self._routed(e.to, e.reply))
            elif isinstance(effect, router.Probe):
                # There and back; a simulated instance is well.
                self._later(
                    lambda iid=effect.iid: self._later(
                        lambda: self._tell_router(router.Probed(iid, ok=True, epoch="0"))
                    )
                )
            elif isinstance(effect, router.Control):
                self._later(lambda c=effect: self.instances[c.iid].control(c, c.verb, c.model))
            elif isinstance(effect, router.Load):
                self._later(lambda key=effect.key: self._tell_router(router.Restored(key, None)))

    def _routed(self, to: Any, reply: RouteReply) -> None:
        rid, attempt = to
        if rid in self._calls:
            self._edge(rid, self._calls[rid][1].handle(self._clock.now(), Routed(attempt, reply)))

    def _router_tick(self) -> None:
        self._tell_router(router.Tick())
        self._heap.after(ROUTER_TICK_S, self._router_tick)

    # --- the instances and telemetry

    def _instance_says(self, iid: str, effect: Answer | Publish) -> None:
        message = effect.message
        if isinstance(message, ControlReply):
            assert isinstance(effect, Answer)
            self._later(lambda: self._controlled(effect.handle, message))
        elif isinstance(effect, Answer):
            assert isinstance(message, ForwardReply)
            rid, attempt = effect.handle
            self._later(lambda: self._answered(rid, attempt, message))
        elif isinstance(message, Completion):
            self._later(lambda: self._tell_router(message))
        elif isinstance(message, TokenBatch):
            self._later(lambda: self._frames(iid, message))
        elif isinstance(message, Snapshot):
            self._later(lambda: self._tell_telemetry(message))

    def _controlled(self, control: Any, reply: ControlReply) -> None:
        what = {"open": "opened", "close": "closed"}[control.verb] if reply.ok else "refused"
        self.replicas[what] += 1
        self._tell_router(router.Controlled(control, reply.ok))

    def _answered(self, rid: str, attempt: int, reply: ForwardReply) -> None:
        if rid in self._calls:
            self._edge(rid, self._calls[rid][1].handle(self._clock.now(), Answered(attempt, reply)))

    def _frames(self, iid: str, batch: TokenBatch) -> None:
        now = self._clock.now()
        self._peers.hear(now, iid, batch.epoch)
        for frame in batch.frames:
            live = self._calls.get(frame.rid)
            if live is None:
                continue
            request, call = live
            if call.follows(iid, batch.epoch, frame):
                request.on_frame(frame)
            else:
                self._edge(frame.rid, call.handle(now, Arrived(iid, batch.epoch, frame)))

    def _tell_telemetry(self, message: telemetry.Input) -> None:
        for effect in self.telemetry.handle(self._clock.now(), message):
            if isinstance(effect, telemetry.Publish):
                self._later(lambda view=effect.view: self._tell_router(view))

    def _telemetry_beat(self) -> None:
        self._tell_telemetry(telemetry.Beat())
        self._heap.after(self._scenario.heartbeat_s, self._telemetry_beat)

    def _later(self, action: Callable[..., None]) -> None:
        self._heap.after(self._hop_s, action)


def prompt_of(input_ids: Any, completion_tokens: int) -> Prompt:
    """A tokenised prompt that asks for exactly so many tokens."""
    params = Params(max_tokens=completion_tokens, temperature=0.0, ignore_eos=True)
    return Prompt(input_ids, params, len(input_ids) * BYTES_PER_TOKEN)
