"""How `talaria tap` shows a message, and what it listens on."""

import pytest

from talaria_cli.tap import DEFAULT, KINDS, filters, touches_rpc
from talaria_cli.tap_lines import QUIET_S, Lines
from talaria_common import subjects
from talaria_common.wire import ClusterView, Completion, Event, InstanceView, ModelState, Snapshot, encode

NOW = 1_700_000_000.0


def snapshot(version: int = 1, running: int = 0) -> Snapshot:
    return Snapshot(
        iid="cold-0",
        epoch="e",
        version=version,
        at_ms=int(NOW * 1000),
        pool="cold",
        status="ready",
        models=(ModelState(name="m", state="active", running=running, kv_used_tokens=5, kv_capacity_tokens=64),),
    )


def test_default_filters_never_see_rpc_bodies_or_tokens() -> None:
    chosen = filters("", "")
    assert set(chosen) == {KINDS[k] for k in DEFAULT}
    assert not any(touches_rpc(f) for f in chosen)
    assert not any(".tokens" in f or f == f"{subjects.ROOT}.>" for f in chosen)


def test_kinds_and_raw_filters() -> None:
    assert filters("route, switch", "") == [f"{subjects.ROOT}.event.route.>", f"{subjects.ROOT}.event.switch.>"]
    assert filters("route", "my.>") == ["my.>"]
    with pytest.raises(ValueError, match="unknown kind 'rout'"):
        filters("rout", "")


@pytest.mark.parametrize(
    ("subject", "touches"),
    [
        (">", True),
        ("talaria.>", True),
        ("talaria.v1.rpc.route.*", True),
        ("*.*.rpc.>", True),
        ("talaria.v1.event.>", False),
        ("talaria.v1.snapshot.*", False),
        ("other.>", False),
    ],
)
def test_filters_that_reach_rpc_are_known(subject: str, touches: bool) -> None:
    assert touches_rpc(subject) is touches


def test_event_shows_what_matters_first_and_shortens_ids() -> None:
    data = {"zeta": 1, "rid": "0123456789abcdef", "chosen": "hot-0", "cost_ms": 12.3456, "none": None}
    event = Event(kind="route", source="router-0", at_ms=int(NOW * 1000), data=data)
    line = Lines().render(subjects.event("route", "router-0"), encode(event), NOW)
    assert line is not None
    assert line.endswith("route       router-0      rid=01234567 chosen=hot-0 zeta=1 cost_ms=12.3")


def test_completion_shows_tokens_and_times() -> None:
    completion = Completion(
        iid="hot-0", epoch="e", rid="a" * 32, attempt=0, router="r", seq=1, partition=0, tenant="t", session="s" * 32,
        model="m", ok=True, prompt_tokens=10, cached_tokens=8, cache_source="device", completion_tokens=3, ttft_ms=4.6,
        at_ms=int(NOW * 1000),
    )  # fmt: skip
    line = Lines().render(subjects.completion("hot-0"), encode(completion), NOW)
    assert line is not None
    assert "prompt=10 cached=8(device) out=3 queue=0ms ttft=5ms" in line


def test_snapshots_are_printed_when_they_say_something_new_or_after_a_while() -> None:
    lines, subject = Lines(), subjects.snapshot("cold-0")
    first = lines.render(subject, encode(snapshot(1)), NOW)
    assert first is not None
    assert "m[active kv 5/64]" in first
    assert lines.render(subject, encode(snapshot(2)), NOW + 0.5) is None
    changed = lines.render(subject, encode(snapshot(3, running=1)), NOW + 1.0)
    assert changed is not None
    assert "1 running" in changed
    assert lines.render(subject, encode(snapshot(4, running=1)), NOW + 1.0 + QUIET_S) is not None


def test_cluster_view() -> None:
    view = ClusterView(
        telemetry="telemetry-0",
        epoch="e",
        version=7,
        at_ms=0,
        instances=(InstanceView(snapshot=snapshot(), age_ms=12, health="ok"),),
    )
    line = Lines().render(subjects.CLUSTER, encode(view), NOW)
    assert line is not None
    assert "v7 full cold-0:ok/ready/12ms" in line


@pytest.mark.parametrize("data", [b"", b"not json", b"\xff\xfe", b"{}"])
def test_anything_can_come_over_a_bus(data: bytes) -> None:
    assert Lines().render(subjects.event("route", "x"), data, NOW)
    assert Lines().render("some.other.subject", data, NOW)
