"""Whatever happens, in whatever order: one terminal frame and one completion per accepted call, seq without gaps."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from talaria_common.errors import BadRequestError, OverloadedError
from talaria_common.wire.error import info_of
from talaria_gpu.engine.contract import StepTokens
from talaria_gpu.engine.ipc import Refused
from talaria_instance import messages as m


class Instance(RuleBasedStateMachine):
    """The bus, the engine and the tokenising threads of one core, all misbehaving."""

    build = None  # set by the test
    STOPS = ("ab", "zzz")

    @initialize(max_queued=st.integers(1, 5))
    def begin(self, max_queued):
        self.rig = self.build.Rig(auto_prepare=False, max_queued=max_queued)
        self.seq = 0

    @rule(api=st.sampled_from(["api-0", "api-1"]), stop=st.booleans(), tokenised=st.sampled_from([True, True, False]))
    def arrive(self, api, stop, tokenised):
        """A call as it should be."""
        self.seq += 1
        key = m.CallKey(self.build.rid(100 + self.seq), 0)
        data = self.build.body(stop=list(self.STOPS)) if stop else self.build.body()
        fields = {"api": api, "rev": 2, "seq": self.seq, "data": data}
        if self.rig.forward(key.rid, **fields).accepted and tokenised:
            self.rig.prepare(key)

    @rule(
        call=st.tuples(st.integers(0, 3), st.integers(0, 2)),
        rev=st.integers(1, 2),
        model=st.sampled_from(["alpha", "beta", "gamma"]),
        deadline_s=st.sampled_from([-5.0, 3.0, 60.0]),
    )
    def forward_odd(self, call, rev, model, deadline_s):
        """Repeats, older attempts, stale owners, late ones, unknown models."""
        self.seq += 1
        fields = {"rev": rev, "model": model, "deadline_s": deadline_s, "accept_s": deadline_s, "seq": self.seq}
        self.rig.forward(self.build.rid(call[0]), call[1], **fields)

    @precondition(lambda self: self.rig.to_prepare)
    @rule(data=st.data(), ok=st.booleans())
    def tokenised(self, data, ok):
        key = data.draw(st.sampled_from(sorted(self.rig.to_prepare)))
        if ok:
            self.rig.prepare(key)
        else:
            del self.rig.to_prepare[key]
            self.rig.tell(m.PrepareFailed(key, info_of(BadRequestError("no"))))

    @precondition(lambda self: self.rig.engine_calls)
    @rule(data=st.data())
    def decode(self, data):
        self.step(data, "")

    @precondition(lambda self: self.rig.engine_calls)
    @rule(data=st.data(), finished=st.sampled_from(["stop", "length", "abort", "deadline", "error"]))
    def last_step(self, data, finished):
        self.step(data, finished)

    def step(self, data, finished):
        rids = data.draw(st.lists(st.sampled_from(sorted(self.rig.engine_calls)), min_size=1, unique=True))
        texts = [data.draw(st.text("abz", max_size=3)) for _ in rids]
        if finished:
            for rid in rids:  # they are gone from the engine before anybody hears of it: an abort now is only ignored
                self.rig.engine_calls.pop(rid)
        self.rig.step(
            *(
                StepTokens(rid=rid, token_ids=self.build.ids(text), finished=finished)
                for rid, text in zip(rids, texts, strict=True)
            )
        )

    @precondition(lambda self: self.rig.engine_calls)
    @rule(data=st.data())
    def refuse(self, data):
        rid = data.draw(st.sampled_from(sorted(self.rig.engine_calls)))
        del self.rig.engine_calls[rid]
        self.rig.said(Refused(rid=rid, error=info_of(OverloadedError("no"))))

    @rule(n=st.integers(0, 3), attempt=st.integers(0, 2))
    def cancel_any(self, n, attempt):
        self.rig.cancel(m.CallKey(self.build.rid(n), attempt))

    @precondition(lambda self: self.rig.core.calls)
    @rule(data=st.data())
    def cancel_one(self, data):
        self.rig.cancel(data.draw(st.sampled_from(sorted(self.rig.core.calls))))

    @rule(seconds=st.sampled_from([0.0, 0.5, 4.0, 70.0]))
    def tick(self, seconds):
        self.rig.now += seconds
        self.rig.tell(m.Tick())
        if self.rig.core.engine.phase == "failed":
            self.rig.engine_calls.clear()

    @precondition(lambda self: self.rig.core.engine.phase == "ready")
    @rule(sure=st.sampled_from([False, False, True]))
    def engine_dies(self, sure):
        if sure:
            self.rig.engine_dies()

    @precondition(lambda self: self.rig.core.engine.phase == "failed")
    @rule()
    def engine_returns(self):
        self.rig.engine_ready()

    @invariant()
    def promises(self):
        if hasattr(self, "rig"):
            self.rig.check_promises()
            live = {k.engine_rid for k, c in self.rig.core.calls.items() if c.stream is not None}
            assert live == set(self.rig.engine_calls), "the engine works for nobody, or somebody waits for nothing"

    def teardown(self):
        if hasattr(self, "rig"):
            self.rig.tell(m.Shutdown(now=True))
            assert self.rig.core.calls == {}
            assert self.rig.core.queued == 0
            self.rig.check_promises()


def test_promises_hold(build):
    machine = type("Machine", (Instance,), {"build": build})
    run_state_machine_as_test(machine, settings=settings(max_examples=80, stateful_step_count=50, deadline=None))
