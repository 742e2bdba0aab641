"""An instance core under a hand-driven engine, and builders of what it is told."""

from collections import defaultdict
from types import SimpleNamespace

import msgspec
import pytest

from talaria_common.settings import InstanceSettings
from talaria_common.wire import Cancel, Completion, Event, Fence, ForwardHead, Frame, Placement, Snapshot, TokenBatch
from talaria_gpu.engine.contract import ModelInfo, ModelLoad, StepResult, StepTokens
from talaria_gpu.engine.ipc import Abort, Ready, Status, Stepped, Submit
from talaria_gpu.text import ByteTokenizer
from talaria_instance import messages as m
from talaria_instance.core import InstanceCore
from talaria_instance.request import tokenise

IID = "cold-0"
MODELS = ("alpha", "beta")
START = 1_700_000_000.0


def rid_of(n):
    return f"{n:032x}"


def head(rid="0" * 32, attempt=0, *, now=START, api="api-0", api_epoch="e0", model="alpha", **kw):
    partition, rev = kw.pop("partition", 7), kw.pop("rev", 1)
    place = Placement(
        iid=kw.pop("iid", IID),
        fence=Fence(partition=partition, owner_rev=rev, rid=rid, attempt=attempt),
        router=kw.pop("router", "router-0"),
        router_epoch=kw.pop("router_epoch", "r0"),
        seq=kw.pop("seq", 1),
        accept_by_ms=round((now + kw.pop("accept_s", 2.0)) * 1000),
        deadline_ms=round((now + kw.pop("deadline_s", 60.0)) * 1000),
    )
    fields = {"endpoint": "chat", "tenant": "local", "session": "s" * 32} | kw
    return ForwardHead(placement=place, api=api, api_epoch=api_epoch, model=model, **fields)


def body(**kw):
    return msgspec.json.encode({"model": "alpha", "messages": [{"role": "user", "content": "hi"}]} | kw)


def ids(text):
    return ByteTokenizer().encode(text)


class Rig:
    """A core, its clock, and all that it ever asked for."""

    def __init__(self, *, ready=True, auto_prepare=True, **settings):
        self.now = START
        self.settings = InstanceSettings(id=IID, engine="sim", models=MODELS, **settings)
        self.tokenizers = {name: ByteTokenizer() for name in MODELS}
        self.core = InstanceCore(self.settings, "epoch", self.tokenizers, skew_s=2.0, heartbeat_s=0.5)
        self.auto_prepare = auto_prepare
        self.effects = list(self.core.start())
        self.frames = defaultdict(list)
        self.completions = defaultdict(list)
        self.accepted = []
        self.to_prepare = {}
        self.engine_calls = {}
        self.aborted = []
        if ready:
            self.engine_ready()

    # --- told

    def tell(self, message):
        effects = self.core.handle(self.now, message)
        apis = [e.subject for e in effects if isinstance(e, m.Publish) and isinstance(e.message, TokenBatch)]
        assert len(apis) == len(set(apis)), "more than one batch for one api"
        for effect in effects:
            self._look(effect)
        self.effects += effects
        if self.auto_prepare:
            for key in list(self.to_prepare):
                self.prepare(key)
        return effects

    def forward(self, *args, data=None, **kw):
        given = args[0] if args and isinstance(args[0], ForwardHead) else head(*args, now=self.now, **kw)
        handle = object()
        effects = self.tell(m.Forward(handle, given, body() if data is None else data))
        (answer,) = (e for e in effects if isinstance(e, m.Answer) and e.handle is handle)
        if answer.message.accepted:
            self.accepted.append(m.CallKey(given.placement.fence.rid, given.placement.fence.attempt))
        return answer.message

    def prepare(self, key):
        request = self.to_prepare.pop(key)
        self.tell(m.Prepared(key, tokenise(request.body, request.head.endpoint, self.tokenizers[request.head.model])))

    def said(self, *reports):
        return self.tell(m.EngineSaid(self.core.engine.generation, reports))

    def engine_ready(self):
        self.tell(m.EngineStarting(self.core.engine.generation))
        infos = [
            ModelInfo(
                name=name,
                context_tokens=256,
                kv_capacity_tokens=1000,
                weight_bytes=10,
                kv_bytes_per_token=1,
                max_running=8,
            )
            for name in MODELS
        ]
        self.said(Ready(models=infos, buffer_bytes=5000, pid=1))

    def status(self, active="alpha", kv_epoch=0, **kw):
        load = ModelLoad(waiting=0, running=0, waiting_tokens=0, kv_used_tokens=250, kv_epoch=kv_epoch)
        fields = {
            "loads": dict.fromkeys(MODELS, load),
            "prefilled_tokens": 0,
            "switches": 0,
            "switch_ms": {},
            "decode_step_ms": {},
            "prefill_ms_per_token": {},
            "slot_remaining_ms": 0.0,
            "idle_checked": 0,
        }
        return self.said(Status(active=active, **(fields | kw)))

    def step(self, *tokens, kind="decode", wall_ms=1.0):
        return self.said(
            Stepped(
                model="alpha", result=StepResult(kind=kind, tokens=list(tokens), batch=len(tokens), wall_ms=wall_ms)
            )
        )

    def give(self, key, text="", *, finished="", kind="decode", **kw):
        return self.step(StepTokens(rid=key.engine_rid, token_ids=ids(text), finished=finished, **kw), kind=kind)

    def engine_dies(self, reason="killed by SIGKILL"):
        self.engine_calls.clear()
        return self.tell(m.EngineExited(self.core.engine.generation, reason))

    def cancel(self, key, reason="client_gone"):
        return self.tell(m.CancelCall(Cancel(rid=key.rid, attempt=key.attempt, reason=reason)))

    # --- seen

    def _look(self, effect):
        match effect:
            case m.Publish(_, TokenBatch(frames=frames)):
                for frame in frames:
                    self.frames[m.CallKey(frame.rid, frame.attempt)].append(frame)
            case m.Publish(_, Completion() as done):
                self.completions[m.CallKey(done.rid, done.attempt)].append(done)
            case m.Prepare(key):
                self.to_prepare[key] = effect
            case m.Tell(Submit(call=call)):
                assert call.rid not in self.engine_calls
                self.engine_calls[call.rid] = call
            case m.Tell(Abort(rid=rid)):
                assert rid in self.engine_calls, "an abort of what the engine does not have"
                self.aborted.append(rid)
                del self.engine_calls[rid]

    def published(self, cls):
        return [e.message for e in self.effects if isinstance(e, m.Publish) and isinstance(e.message, cls)]

    @property
    def snapshot(self):
        return self.published(Snapshot)[-1]

    def events(self, kind):
        return [e.data for e in self.published(Event) if e.kind == kind]

    def text(self, key):
        return "".join(f.text for f in self.frames[key])

    def check_promises(self):
        """What holds for every call that was ever accepted and has ended."""
        assert set(self.frames) <= set(self.accepted)
        assert set(self.completions) <= set(self.accepted)
        for key in self.accepted:
            frames, live = self.frames[key], key in self.core.calls
            assert [f.seq for f in frames] == list(range(len(frames)))
            assert all(f.kind == "delta" for f in frames[:-1])
            assert len(self.completions[key]) == (0 if live else 1)
            if live:
                assert not frames or frames[-1].kind == "delta"
            else:
                assert frames[-1].kind in {"final", "error"}
                assert frames[-1].retryable is False or len(frames) == 1, "retryable after tokens were sent"
        assert self.core.queued == sum(not c.first_token for c in self.core.calls.values())


@pytest.fixture
def rig():
    return Rig()


@pytest.fixture
def build():
    """The builders, for tests that need more than one rig or odd settings."""
    return SimpleNamespace(Rig=Rig, head=head, body=body, rid=rid_of, ids=ids, Frame=Frame)
