"""Why a part is not ready."""

import json

import pytest

from talaria_cli.up.health import Facts, HttpAnswer, judge, reason_in
from talaria_cli.up.plan import Part
from talaria_common.wire import ModelState, Snapshot

STALE_S = 1.5
INSTANCE = Part("cold-0", "instance", ())
API = Part("api-0", "api", (), http="http://h:1")
ROUTER = Part("router-0", "router", ())
TELEMETRY = Part("telemetry-0", "telemetry", ())


def snapshot(status: str, reason: str = "") -> Snapshot:
    models = (ModelState(name="a", state="active"), ModelState(name="b", state="host"))
    return Snapshot(
        iid="cold-0", epoch="e", version=1, at_ms=0, pool="cold", status=status, reason=reason, models=models
    )


def test_instance_by_its_snapshot() -> None:
    facts = Facts()
    assert judge(INSTANCE, facts, 0.0, STALE_S) == (False, "no snapshot yet")
    facts.snapshots["cold-0"] = (snapshot("starting", "loading a"), 10.0)
    assert judge(INSTANCE, facts, 10.1, STALE_S) == (False, "starting: loading a")
    facts.snapshots["cold-0"] = (snapshot("ready"), 10.0)
    assert judge(INSTANCE, facts, 11.0, STALE_S) == (True, "active: a; host: b")
    assert judge(INSTANCE, facts, 13.0, STALE_S) == (False, "silent for 3 s")
    facts.forget("cold-0")
    assert judge(INSTANCE, facts, 10.1, STALE_S) == (False, "no snapshot yet")


def test_http_parts_by_their_readyz() -> None:
    facts = Facts()
    assert judge(API, facts, 0.0, STALE_S).ready is False
    facts.http["api-0"] = HttpAnswer(503, json.dumps({"reasons": ["no router", "no bus"]}))
    assert judge(API, facts, 0.0, STALE_S) == (False, "no router; no bus")
    facts.http["api-0"] = HttpAnswer(200, "{}")
    assert judge(API, facts, 0.0, STALE_S) == (True, "http://h:1")


def test_router_without_a_port_follows_the_api() -> None:
    facts = Facts()
    assert "mesh.metrics_ports" in judge(ROUTER, facts, 0.0, STALE_S).says
    facts.http["api-0"] = HttpAnswer(200, "{}")
    assert judge(ROUTER, facts, 0.0, STALE_S).ready


def test_telemetry_without_a_port_by_the_cluster_view() -> None:
    facts = Facts()
    assert not judge(TELEMETRY, facts, 0.0, STALE_S).ready
    facts.cluster_at = 5.0
    assert judge(TELEMETRY, facts, 6.0, STALE_S).ready
    assert not judge(TELEMETRY, facts, 9.0, STALE_S).ready


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ('{"reason": "x"}', "x"),
        ('{"error": {"message": "x"}}', "x"),
        ('{"status": "not ready", "bus": true, "router": "no answer"}', "router: no answer"),
        ("plain\ntext", "plain text"),
        ("", ""),
    ],
)
def test_reasons_of_many_shapes(body: str, reason: str) -> None:
    assert reason_in(body) == reason
