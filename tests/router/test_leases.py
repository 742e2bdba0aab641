"""Algorithm 1, lines 1 to 9, and the life of a lease."""

from __future__ import annotations

import itertools

import pytest

from talaria_common.clock import to_ms
from talaria_router.messages import Load, Probe, Probed
from tests.router.rig import M, Rig, model, only, outcome


def two(rig: Rig, **a: object) -> None:
    rig.view(rig.snapshot("a", (model(**a),)), rig.snapshot("b"), full=True)


def test_only_a_completion_installs_a_lease_and_the_return_consumes_it():
    rig = Rig()
    two(rig)
    first = rig.placed()
    assert rig.books.installed == 0
    assert first.via == "cost"
    rig.complete(first)
    assert rig.books.live == 1
    assert rig.load == (0, 0, 1)
    second = rig.placed()
    assert (second.via, second.iid) == ("lease", first.iid)
    assert rig.books.honoured == 1
    assert rig.load == (1, 10, 0), "the overlay's entry comes as the lease goes"
    rig.complete(second, cached_tokens=90)
    assert (rig.books.installed, rig.books.wasted) == (2, 0)


def test_the_lease_beats_a_cheaper_instance():
    rig = Rig()
    two(rig)
    p = rig.turn()
    other = "b" if p.iid == "a" else "a"
    rig.view(rig.snapshot(p.iid, (model(queued=20, queued_tokens=5000),)), rig.snapshot(other))
    assert rig.placed().iid == p.iid
    assert rig.placed().iid == other, "a concurrent call of the session has no lease: it is placed by cost"


def test_routing_does_not_refresh_the_lease():
    rig = Rig()
    two(rig)
    rig.turn()
    rig.clock.advance(0.9)
    rig.placed()
    assert rig.placed().via == "cost"


def test_it_ends_at_t_exp_exactly():
    rig = Rig(tau_s=1.0)
    two(rig)
    rig.turn()
    rig.clock.advance(1.0)
    assert rig.placed().via == "cost"
    assert (rig.books.expired, rig.books.wasted, rig.load[2]) == (1, 1, 0)
    assert rig.events("route")[-1].data["lease"] == "expired"


def test_it_expires_without_a_return():
    rig = Rig()
    two(rig)
    rig.turn()
    rig.later(1.01)
    assert (rig.books.expired, rig.books.live, rig.load) == (1, 0, (0, 0, 0))
    assert [e.data["what"] for e in rig.events("lease")] == ["installed", "expired"]


def test_affinity_outlives_the_lease():
    rig = Rig()
    two(rig)
    rig.turn("x")
    p = rig.turn("y")
    assert not p.continuation
    rig.later(5)
    rig.view(rig.snapshot("a"), rig.snapshot("b"))
    q = rig.placed("y")
    assert q.iid == p.iid, "device-resident KV makes the last instance cheapest"
    assert (q.via, q.continuation) == ("cost", True)


@pytest.mark.parametrize("final", [True, False])
@pytest.mark.parametrize("ok", [True, False])
def test_installed_only_by_an_ok_completion_that_is_not_final(ok: bool, final: bool):
    rig = Rig()
    two(rig)
    rig.turn(ok=ok, session_final=final)
    assert rig.books.installed == (ok and not final)
    assert (rig.entry() is not None) == (ok and not final)


def test_a_final_call_frees_the_session():
    rig = Rig()
    two(rig)
    rig.turn()
    p = rig.placed()
    rig.complete(p, session_final=True)
    assert rig.entry() is None
    assert rig.load == (0, 0, 0)


CASES = list(
    itertools.product(
        ["live", "expired"], ["ready", "draining", "failed", "gone"], ["same", "newer", "none"], [False, True]
    )
)


@pytest.mark.parametrize(("lease", "status", "prefix", "excluded"), CASES)
def test_every_combination_of_checks(lease: str, status: str, prefix: str, excluded: bool):
    """The lease is honoured in exactly one case; otherwise it is discarded or expired and cost decides."""
    rig = Rig()
    two(rig)
    p = rig.turn()
    other = "b" if p.iid == "a" else "a"
    models = () if prefix == "none" else (model(kv_epoch=1 if prefix == "same" else 2),)
    if status == "gone":
        rig.view(rig.snapshot(other), full=True, removed=(p.iid,))
    else:
        rig.view(rig.snapshot(p.iid, models, status=status), rig.snapshot(other))
    rig.clock.advance(1.5 if lease == "expired" else 0.5)
    rig.view(rig.snapshot(other))
    if lease == "expired" and status != "gone":
        rig.view(rig.snapshot(p.iid, models, status=status))
    got = rig.placed(exclude=(p.iid,) if excluded else ())
    honoured = lease == "live" and status == "ready" and prefix == "same" and not excluded
    assert (got.via == "lease") == honoured
    assert rig.books.honoured == honoured
    assert rig.books.expired == (lease == "expired")
    assert sum(rig.books.discarded.values()) == (lease == "live" and not honoured)
    assert rig.books.wasted == (not honoured)
    if status != "ready" or prefix == "none" or excluded:
        assert got.iid == other
    assert rig.load[2] == 0
    assert rig.books.live == 0


def test_a_restarted_instance_has_forgotten_the_prefix():
    rig = Rig()
    two(rig)
    p = rig.turn()
    rig.clock.advance(0.1)
    rig.view(rig.snapshot(p.iid, epoch="life-2", version=1))
    assert rig.placed().via == "cost"
    assert rig.books.discarded == {"prefix": 1}


def test_a_completion_newer_than_the_snapshot_is_believed():
    rig = Rig()
    two(rig)
    rig.turn(kv_epoch=7)
    assert rig.placed().via == "lease"


def test_a_duplicate_completion_installs_no_second_lease():
    rig = Rig()
    two(rig)
    p = rig.turn()
    rig.placed()
    rig.complete(p)
    assert rig.books.installed == 1
    assert rig.placed().via == "cost"


def test_a_superseded_attempt_installs_nothing():
    rig = Rig()
    two(rig)
    request = rig.request()
    first = rig.send(request)
    second = rig.send(rig.request(rid=request.rid, attempt=1, exclude=(first.iid,)))
    rig.complete(first)
    assert rig.books.installed == 0
    rig.complete(second)
    assert rig.books.installed == 1


def test_a_successor_replaces_a_live_lease():
    rig = Rig()
    two(rig)
    p, q = rig.placed(), rig.placed()
    rig.complete(p)
    rig.complete(q)
    assert rig.books.discarded == {"superseded": 1}
    assert (rig.books.live, rig.load[2]) == (1, 1)


def test_a_late_completion_reserves_what_is_left_of_tau():
    rig = Rig(tau_s=1.0, skew_s=0.5)
    two(rig)
    p = rig.placed()
    rig.clock.advance(1.2)
    rig.view(rig.snapshot("a"), rig.snapshot("b"))
    rig.complete(p, at_ms=to_ms(rig.now - 1.2))
    assert rig.entry().lease_until == pytest.approx(rig.now + 0.3, abs=0.01)
    q = rig.placed()
    rig.complete(q, at_ms=to_ms(rig.now - 2))
    assert rig.books.installed == 1


def test_wasted_counts_an_honoured_lease_that_found_no_prefix():
    rig = Rig()
    two(rig)
    rig.turn()
    rig.complete(rig.placed(), cached_tokens=0)
    assert (rig.books.honoured, rig.books.wasted) == (1, 1)


def test_a_live_lease_charges_one_admission_unit():
    rig = Rig(admission_unit_ms=300.0)
    two(rig)
    p = rig.turn("x")
    other = "b" if p.iid == "a" else "a"
    assert rig.placed("new").iid == other
    terms = {c["iid"]: c for c in rig.events("route")[-1].data["candidates"]}
    assert terms[p.iid]["req_ms"] - terms[other]["req_ms"] == pytest.approx(300.0)


def test_leases_alone_lock_nobody_out():
    rig = Rig(admission_unit_ms=1000.0)
    rig.view(rig.snapshot("a"), full=True)
    for i in range(40):
        rig.turn(f"s{i}")
    assert rig.books.live == 40
    assert rig.placed("new").iid == "a"


def test_leases_take_capacity_from_newcomers_up_to_half_of_the_budget():
    rig = Rig(admission_unit_ms=1000.0)
    busy = model(queued=1, queued_tokens=5000)
    rig.view(rig.snapshot("a", (busy,)), full=True)
    for i in range(4):
        rig.turn(f"s{i}")
    assert rig.refused("new").reason == "overloaded"
    assert rig.placed("s0").via == "lease", "a reserved return is not refused"


class TestStale:
    """A stale instance takes no new call; a live lease there only if the instance itself says that it is well."""

    def stale(self) -> tuple[Rig, str, str]:
        rig = Rig(tau_s=5.0)
        two(rig)
        p = rig.turn()
        other = "b" if p.iid == "a" else "a"
        rig.clock.advance(1.0)
        rig.view(rig.snapshot(other))
        rig.clock.advance(0.6)
        rig.view(rig.snapshot(other))
        return rig, p.iid, other

    def test_new_calls_go_elsewhere(self):
        rig, _, other = self.stale()
        assert [rig.placed(f"n{i}").iid for i in range(20)] == [other] * 20

    def test_the_probe_answers(self):
        rig, here, _ = self.stale()
        assert rig.ask() is None
        assert only(rig.effects, Probe) == [Probe(here)]
        got = outcome(rig.do(Probed(here, ok=True, epoch=f"{here}-1")))
        assert (got.iid, got.via) == (here, "lease")

    @pytest.mark.parametrize("answer", ["no", "another life", "silence"])
    def test_the_probe_fails(self, answer: str):
        rig, here, other = self.stale()
        assert rig.ask() is None
        if answer == "silence":
            got = outcome(rig.later(0.31))
        else:
            got = outcome(rig.do(Probed(here, ok=answer != "no", epoch="other")))
        assert (got.iid, got.via) == (other, "cost")
        assert rig.books.discarded == {"stale": 1}
        assert rig.load[2] == 0

    def test_the_lease_may_expire_during_the_probe(self):
        rig, here, other = self.stale()
        rig.ask()
        rig.clock.advance(3.5)
        rig.view(rig.snapshot(other))
        got = outcome(rig.do(Probed(here, ok=True, epoch=f"{here}-1")))
        assert (got.iid, rig.books.expired) == (other, 1)

    def test_a_second_call_of_the_session_does_not_wait_for_the_probe(self):
        rig, here, other = self.stale()
        assert rig.ask() is None
        assert rig.placed().iid == other
        got = outcome(rig.do(Probed(here, ok=True, epoch=f"{here}-1")))
        assert got.via == "lease"

    def test_one_probe_serves_all_who_wait(self):
        rig = Rig(tau_s=5.0)
        rig.view(rig.snapshot("a"), full=True)
        for s in "xyz":
            rig.turn(s)
        rig.clock.advance(1.6)
        rig.view()
        assert [rig.ask(s) for s in "xyz"] == [None] * 3
        assert len(only(rig.effects, Probe)) == 1
        rig.do(Probed("a", ok=True, epoch="a-1"))
        assert rig.books.honoured == 3

    def test_asking_again_while_it_waits_asks_once(self):
        rig, here, _ = self.stale()
        request = rig.request()
        assert rig.send(request) is None
        assert rig.send(request) is None
        rig.do(Probed(here, ok=True, epoch=f"{here}-1"))
        assert rig.load[0] == 1


def test_no_lease_with_another_policy():
    rig = Rig(policy="least-pressure")
    two(rig)
    rig.turn()
    assert rig.books.installed == 0
    assert rig.placed().via == "policy"


def test_sessions_with_the_same_prefix_of_an_id_are_different():
    rig = Rig()
    two(rig)
    rig.turn("session-12")
    assert rig.placed("session-1").via == "cost"
    assert not only(rig.effects, Load)


def test_leases_are_per_model():
    rig = Rig()
    rig.view(rig.snapshot("a", (model(), model("other", "host"))), full=True)
    rig.turn()
    assert rig.placed(model="other").via == "cost"
    assert rig.placed(model=M).via == "lease"
