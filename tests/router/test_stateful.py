"""Invariants under any order of events, duplicates, losses and deaths (hypothesis)."""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from talaria_common.clock import to_ms
from talaria_common.wire import Placement, SeenPlacements
from talaria_router.messages import Gained, Lost, Probe, Probed
from tests.router.rig import Rig, model, only, outcome

IIDS = ["a", "b", "c"]
SESSIONS = ["s1", "s2", "s3", "s4"]


class RouterMachine(RuleBasedStateMachine):
    """A router, three instances that accept, lose and forget, and callers that ask, ask again and retry."""

    calls = Bundle("calls")

    @initialize(overload=st.sampled_from(["reject", "queue"]), tau=st.sampled_from([0.0, 0.5, 2.0]))
    def start(self, overload: str, tau: float) -> None:
        self.rig = Rig(overload=overload, tau_s=tau, queue_max=4)
        self.kv = dict.fromkeys(IIDS, 1)
        self.arrived: dict[str, set[int]] = {iid: set() for iid in IIDS}
        self.sessions: dict[str, str] = {}
        self.attempts: dict[str, int] = {}
        self.consumed: set[tuple[str, int]] = set()
        self.installs: Counter[str] = Counter()
        self.rig.view(full=True)
        self.heartbeat(IIDS, lost=False)

    def call(self, request):
        lease_before = self.rig.entry(request.session)
        until = lease_before.lease_until if lease_before else 0.0
        live_here = lease_before.iid if lease_before else ""
        honoured = self.rig.books.honoured
        got = self.rig.send(request)
        if self.rig.books.honoured > honoured:
            assert isinstance(got, Placement)
            assert until > self.rig.now, "a lease never outlives t_exp"
            assert got.iid == live_here
            assert got.iid not in request.exclude
            assert self.rig.state.cluster.health(got.iid, self.rig.now) == "ok"
            lease = (request.session, self.installs[request.session])
            assert lease not in self.consumed, "a lease is consumed once"
            self.consumed.add(lease)
        if isinstance(got, Placement):
            assert got.iid not in request.exclude
        return got

    @rule(target=calls, session=st.sampled_from(SESSIONS), size=st.integers(1, 4000))
    def ask(self, session: str, size: int):
        request = self.rig.request(session, prompt_bytes=size, deadline_ms=to_ms(self.rig.now + 8))
        self.sessions[request.rid] = session
        self.attempts[request.rid] = 0
        got = self.call(request)
        return (request, got) if isinstance(got, Placement) else multiple()

    @rule(call=calls)
    def ask_again(self, call):
        request, placement = call
        before = self.rig.load
        got = self.call(request)
        if self.attempts[request.rid] > request.attempt:
            assert not isinstance(got, Placement), "an earlier attempt never comes back"
            assert self.rig.load == before
        elif isinstance(got, Placement) and to_ms(self.rig.now) <= placement.accept_by_ms and got.seq == placement.seq:
            assert got == placement
            assert self.rig.load == before

    @rule(target=calls, call=consumes(calls))
    def retry(self, call):
        request, placement = call
        nxt = self.rig.request(
            request.session,
            rid=request.rid,
            attempt=self.attempts[request.rid] + 1,
            exclude=(placement.iid,),
            deadline_ms=request.deadline_ms,
        )
        self.attempts[request.rid] = nxt.attempt
        got = self.call(nxt)
        return (nxt, got) if isinstance(got, Placement) else multiple()

    @rule(call=calls)
    def arrive(self, call):
        _, placement = call
        self.arrived[placement.iid].add(placement.seq)

    @rule(call=calls, ok=st.booleans(), cached=st.sampled_from([0, 50]), final=st.booleans())
    def complete(self, call, ok: bool, cached: int, final: bool):
        """Also twice, and for attempts that were superseded."""
        request, placement = call
        self.arrived[placement.iid].add(placement.seq)
        before = self.rig.books.installed
        self.rig.complete(
            placement,
            request.session,
            ok=ok,
            cached_tokens=cached,
            session_final=final,
            kv_epoch=self.kv[placement.iid],
        )
        self.installs[request.session] += self.rig.books.installed - before

    @rule(seconds=st.sampled_from([0.01, 0.3, 0.6, 1.7, 4.0]))
    def time(self, seconds: float):
        self.rig.later(seconds)

    @rule(iids=st.lists(st.sampled_from(IIDS), unique=True), lost=st.booleans())
    def heartbeat(self, iids: list[str], lost: bool):
        snapshots = []
        for iid in iids:
            arrived = self.arrived[iid]
            upto = max(arrived, default=0)
            missing = tuple(n for n in range(1, upto + 1) if n not in arrived)
            snapshots.append(
                self.rig.snapshot(
                    iid,
                    (model(kv_epoch=self.kv[iid]),),
                    max_queued=3,
                    seen={"r0/e0": SeenPlacements(upto=upto, missing=missing)},
                )
            )
        if lost:
            self.rig.view_version += 1
        else:
            self.rig.view(*snapshots)

    @rule(iid=st.sampled_from(IIDS))
    def forget_kv(self, iid: str):
        self.kv[iid] += 1

    @rule(ok=st.booleans())
    def probe_answers(self, ok: bool):
        for probe in only(self.rig.effects, Probe):
            self.rig.do(Probed(probe.iid, ok, f"{probe.iid}-1"))
        self.rig.effects.clear()

    @rule(partition=st.integers(0, 255))
    def ownership_moves(self, partition: int):
        rev = self.rig.state.owned[partition].rev
        self.rig.do(Lost(partition))
        self.rig.do(Gained(partition, rev + 1, may_hold=False))

    @invariant()
    def books_balance(self):
        if not hasattr(self, "rig"):
            return
        state = self.rig.state
        live = [e for _, e in state.sessions.items() if e.lease_until > 0]
        assert self.rig.books.live == len(live) == self.rig.load[2]
        calls, tokens, _ = self.rig.load
        held = [c for i in state.overlay._instances.values() for c in i.calls.values()]
        assert (calls, tokens) == (len(held), sum(c.tokens for c in held))
        assert all(m.calls >= 0 and m.ended >= 0 for i in state.overlay._instances.values() for m in i.models.values())
        placed = [p.placement for p in state.calls._placed.values()]
        for call in held:
            assert any(p.iid == call.iid and p.seq == call.seq for p in placed), "every charge is a call's"

    def teardown(self):
        """However much was lost, all of it ends by itself."""
        if not hasattr(self, "rig"):
            return
        for _ in range(3):
            self.rig.later(20)
        state = self.rig.state
        assert self.rig.load == (0, 0, 0)
        assert len(state.calls) == 0
        assert not state.waiting
        assert not state.probing
        books = self.rig.books
        assert books.installed == books.honoured + books.expired + sum(books.discarded.values())


TestRouter = RouterMachine.TestCase
TestRouter.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_the_machine_can_place_calls():
    """The rig's instances do accept: the machine above is not vacuous."""
    machine = RouterMachine()
    machine.start("reject", 0.5)
    request = machine.rig.request()
    assert isinstance(machine.call(request), Placement)
    assert outcome(machine.rig.effects) is not None
