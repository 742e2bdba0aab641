"""Snapshots judged by age and version; views; health events."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from talaria_common.clock import ManualClock, to_ms
from talaria_common.wire import ClusterView, Event, ModelState, Presence, Snapshot, decode, encode
from talaria_telemetry.core import TelemetryCore
from talaria_telemetry.instances import Expected
from talaria_telemetry.messages import Announce, Beat, Emit, Present, Publish


class Rig:
    def __init__(self, *expected: str, full_every: int = 10) -> None:
        self.clock = ManualClock()
        wanted = [Expected(i, "cold", ("m",)) for i in expected]
        self.core = TelemetryCore("t0", "e", heartbeat_s=0.5, missed=3, full_every=full_every, expected=wanted)
        self.versions: dict[str, int] = {}
        self.events: list[Event] = []
        self.do(Announce())
        self.clock.advance(1.0)

    def do(self, message: Any) -> list[Any]:
        effects = self.core.handle(self.clock.now(), message)
        self.events += [e.event for e in effects if isinstance(e, Emit)]
        return effects

    def snapshot(self, iid: str = "a", **more: Any) -> Snapshot:
        self.versions[iid] = self.versions.get(iid, 0) + 1
        more = {"epoch": "1", "version": self.versions[iid], "at_ms": to_ms(self.clock.now()), "pool": "cold", "status": "ready", "models": (ModelState(name="m", state="active"),)} | more  # fmt: skip
        return Snapshot(iid=iid, **more)

    def hear(self, iid: str = "a", **more: Any) -> None:
        self.do(self.snapshot(iid, **more))

    def beat(self, seconds: float = 0.0) -> ClusterView:
        self.clock.advance(seconds)
        (view,) = [e.view for e in self.do(Beat()) if isinstance(e, Publish)]
        return decode(encode(view), ClusterView)

    def told(self) -> list[tuple[str, ...]]:
        return [(e.data["iid"], e.data["what"], str(e.data.get("to", ""))) for e in self.events]


def ids(view: ClusterView) -> list[str]:
    return sorted(v.snapshot.iid for v in view.instances)


def test_every_beat_is_a_view_and_only_what_changed_is_in_it():
    rig = Rig()
    rig.hear("a")
    rig.hear("b")
    first = rig.beat()
    assert (first.full, ids(first), first.version) == (True, ["a", "b"], 1)
    rig.hear("a")
    delta = rig.beat(0.5)
    assert (delta.full, ids(delta), delta.version) == (False, ["a"], 2)
    empty = rig.beat(0.5)
    assert (empty.full, ids(empty), empty.version) == (False, [], 3)


def test_who_is_there_is_not_said_before_everybody_had_time_to_speak():
    core = TelemetryCore("t0", "e", heartbeat_s=0.5, missed=3, full_every=10)

    def beat(now: float) -> ClusterView:
        (view,) = [e.view for e in core.handle(now, Beat()) if isinstance(e, Publish)]
        return view

    assert [beat(now).full for now in (10.0, 10.5, 10.62)] == [False, False, False]
    assert beat(10.63).full
    assert not beat(11.1).full


def test_full_views_come_regularly_when_someone_appears_and_on_demand():
    rig = Rig(full_every=4)
    rig.hear("a")
    fulls = [rig.beat(0.1).full for _ in range(8)]
    assert fulls == [True, False, False, True, False, False, False, True]
    rig.hear("b")
    assert rig.beat(0.1).full
    assert not rig.beat(0.1).full
    rig.do(Announce())
    assert rig.beat(0.1).full


def test_ages_are_by_our_clock():
    rig = Rig(full_every=1)
    rig.hear("a", at_ms=12345)
    (view,) = rig.beat(0.7).instances
    assert (view.age_ms, view.health) == (700, "ok")
    assert rig.core.instances["a"].clock_offset_ms < -1e9, "and what its clock says is shown, not believed"


def test_health_by_missed_heartbeats():
    rig = Rig()
    rig.hear("a")
    rig.beat()
    assert ids(rig.beat(1.5)) == []
    (stale,) = rig.beat(0.01).instances
    assert stale.health == "stale"
    assert ids(rig.beat(1.0)) == [], "told once"
    (gone,) = rig.beat(13).instances
    assert gone.health == "gone"
    rig.hear("a")
    (back,) = rig.beat(0.5).instances
    assert back.health == "ok"
    assert rig.told() == [
        ("a", "health", "ok"),
        ("a", "health", "stale"),
        ("a", "health", "gone"),
        ("a", "health", "ok"),
    ]


def test_duplicates_and_reordered_are_dropped_and_gaps_counted():
    rig = Rig(full_every=1)
    rig.hear(version=1)
    rig.hear(version=5, models=())
    rig.hear(version=5)
    rig.hear(version=3)
    (view,) = rig.beat().instances
    assert (view.snapshot.version, view.snapshot.models, view.gaps) == (5, (), 3)
    assert rig.core.instances["a"].late == 2


def test_a_duplicate_does_not_make_it_younger():
    rig = Rig()
    rig.hear(version=1)
    rig.clock.advance(1.6)
    rig.hear(version=1)
    assert rig.beat().instances[0].health == "stale"


def test_a_restart_is_a_new_epoch_and_the_old_one_does_not_return():
    rig = Rig(full_every=1)
    old = rig.snapshot(version=100)
    rig.do(old)
    rig.clock.advance(0.1)
    rig.hear(epoch="2", version=1)
    rig.do(Snapshot(**{f: getattr(old, f) for f in old.__struct_fields__} | {"version": 101}))
    (view,) = rig.beat().instances
    assert (view.snapshot.epoch, view.restarts, view.gaps) == ("2", 1, 0)
    assert ("a", "restart", "") in rig.told()


def test_a_restart_with_its_clock_set_back_is_seen_once_the_old_life_is_stale():
    rig = Rig(full_every=1)
    rig.hear()
    rig.hear(epoch="2", version=1, at_ms=5)
    assert rig.beat().instances[0].snapshot.epoch == "1"
    rig.clock.advance(1.6)
    rig.hear(epoch="2", version=2, at_ms=6)
    assert rig.beat().instances[0].snapshot.epoch == "2"


def test_status_changes_are_told():
    rig = Rig()
    rig.hear(status="starting", reason="loading m")
    rig.hear()
    rig.hear(status="draining")
    assert [(e.data["what"], e.data.get("from"), e.data.get("to")) for e in rig.events[1:]] == [
        ("status", "starting", "ready"),
        ("status", "ready", "draining"),
    ]
    assert rig.events[0].data["status_reason"] == "loading m"


class TestExpected:
    def test_a_configured_one_is_shown_before_it_was_heard(self):
        rig = Rig("a")
        (view,) = rig.beat().instances
        assert (view.health, view.snapshot.status, view.snapshot.reason) == (
            "gone",
            "starting",
            "no snapshot has come yet",
        )
        assert [m.name for m in view.snapshot.models] == ["m"]
        rig.hear("a")
        (view,) = rig.beat(0.5).instances
        assert (view.health, view.snapshot.status) == ("ok", "ready")

    def test_one_that_announced_itself_too(self):
        rig = Rig()
        rig.do(Present("b", Presence(iid="b", epoch="1", pool="hot", models=("x",))))
        (view,) = rig.beat().instances
        assert (view.snapshot.iid, view.snapshot.pool, view.health) == ("b", "hot", "gone")

    def test_configured_ones_stay_and_others_are_forgotten(self):
        rig = Rig("a", full_every=1)
        rig.hear("a")
        rig.hear("x")
        view = rig.beat(61)
        assert (ids(view), view.removed) == (["a"], ("x",))
        assert rig.beat(0.5).removed == ()

    def test_one_that_takes_its_leave_goes_at_once(self):
        rig = Rig()
        rig.do(Present("x", Presence(iid="x", epoch="1", pool="cold")))
        rig.hear("x")
        rig.beat()
        rig.do(Present("x", None))
        view = rig.beat(0.1)
        assert (view.removed, ids(view)) == (("x",), [])
        assert ("x", "left", "") in rig.told()


@given(st.lists(st.tuples(st.integers(1, 30), st.sampled_from(["1", "2"])), max_size=40))
def test_a_view_never_goes_back(arrivals: list[tuple[int, str]]):
    """Whatever order and repetition: within a life versions rise, and the newest life that was seen in order stays."""
    rig = Rig(full_every=1)
    last: Snapshot | None = None
    for version, epoch in arrivals:
        at = rig.clock.now() if epoch == "2" else rig.clock.now() - 100
        rig.hear(version=version, epoch=epoch, at_ms=to_ms(at) + version)
        (view,) = rig.beat().instances
        if last is not None and view.snapshot.epoch == last.epoch:
            assert view.snapshot.version >= last.version
        assert not (last is not None and last.epoch == "2" and view.snapshot.epoch == "1")
        last = view.snapshot


def test_silence_before_the_bus_was_back_counts_against_nobody() -> None:
    rig = Rig()
    rig.hear("a")
    rig.hear("dead")
    rig.beat()
    for _ in range(4):
        rig.hear("a")
        rig.beat(0.5)
    assert rig.told()[-1] == ("dead", "health", "stale")
    rig.clock.advance(30.0)  # the bus is away: no beats
    rig.do(Announce())
    view = rig.beat(1.4)
    assert {v.snapshot.iid: v.health for v in view.instances} == {"a": "ok", "dead": "stale"}
    rig.beat(0.2)
    assert rig.told()[-1] == ("a", "health", "stale"), "but it has to speak now"
