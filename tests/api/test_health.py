"""/livez, /readyz with its reasons, /v1/models, /metrics and the OpenAPI document."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from talaria_api.cluster import Cluster
from tests.api.doubles import Connect, answers, edge, instance_view, settings, until, view


async def test_ready(connect: Connect) -> None:
    async with edge(connect, answers) as e:
        response = await e.http.get("/readyz")
        assert (response.status_code, response.json()) == (200, {"ready": True, "reasons": [], "error": None})
        assert (await e.http.get("/livez")).json() == {"live": True}


async def test_not_ready_says_why(connect: Connect) -> None:
    async with edge(connect, answers) as e:
        e.telemetry.instances = (instance_view("cold-0", status="starting"), instance_view("cold-1", health="stale"))
        await e.ready(wanted=False)
        answer = await e.http.get("/readyz")
        assert answer.status_code == 503
        body = answer.json()
        assert body["reasons"] == ["instance cold-0: starting", "instance cold-1: stale"]
        assert body["error"]["code"] == "unavailable"
        e.telemetry.instances = ()
        await until(lambda: e.api.cluster.why_not_ready() == [])
        assert (await e.http.get("/readyz")).json()["reasons"] == ["instances: none"]
        e.telemetry.stop()
        await until(lambda: not e.api.cluster.fresh(e.api.clock.now()))
        assert "telemetry: the cluster view is stale" in (await e.http.get("/readyz")).json()["reasons"]
        e.api.readiness.draining = True
        assert (await e.http.get("/readyz")).json()["reasons"] == ["shutting down"]
        assert (await e.http.get("/livez")).status_code == 200


async def test_router_that_does_not_answer(connect: Connect) -> None:
    async with edge(connect, answers) as e:
        e.router.bus.subscribe  # noqa: B018 - the router's subscription is cut below by closing its bus
        await e.router.bus.close()
        reasons = (await e.http.get("/readyz")).json()["reasons"]
        assert "router: no answer" in reasons


async def test_probes_do_not_become_calls(connect: Connect) -> None:
    async with edge(connect, answers) as e:
        for _ in range(3):
            assert (await e.http.get("/readyz")).status_code == 200
        assert e.router.asked == []


async def test_models(connect: Connect) -> None:
    async with edge(connect, answers) as e:
        e.telemetry.instances = (
            instance_view("i-0", models=("m", "extra"), context=64),
            instance_view("i-1", models=("org/free",), context=512, status="draining"),
        )
        await until(lambda: "extra" in e.api.cluster.served())
        body = (await e.http.get("/v1/models")).json()
        assert body["object"] == "list"
        told = {m["id"]: (m["ready"], m["context_length"], m["reason"]) for m in body["data"]}
        assert told == {
            "m": (True, 100, None),
            "org/free": (False, 512, "i-1: draining"),
            "extra": (True, 64, None),
        }
        one = (await e.http.get("/v1/models/org/free")).json()
        assert one == next(m for m in body["data"] if m["id"] == "org/free")
        assert one["object"] == "model"
        assert (await e.chat(model="extra")).status_code == 200
        e.telemetry.instances = ()
        await until(lambda: not e.api.cluster.served())
        assert (await e.http.get("/v1/models/extra")).status_code == 404
        assert (await e.http.get("/v1/models/m")).json()["reason"] == "no instance has it"


async def test_context_known_from_the_view_only(connect: Connect) -> None:
    async with edge(connect, answers) as e:
        e.telemetry.instances = (instance_view("i-0", context=50), instance_view("i-1", context=80))
        await until(lambda: e.api.cluster.model("org/free").context_tokens == 80)
        assert (await e.chat(model="org/free", max_tokens=79)).status_code == 200
        response = await e.chat(model="org/free", max_completion_tokens=80)
        assert response.status_code == 400
        assert "80 tokens" in response.json()["error"]["message"]


async def test_metrics(connect: Connect) -> None:
    async with edge(connect, answers) as e:
        await e.chat()
        await e.chat(stream=True)
        await e.chat(model="nobody")
        await e.http.get("/v1/models/m")
        await e.http.get("/some/random/path")
        response = await e.http.get("/metrics")
        assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
        lines = response.text.splitlines()
        for line in (
            'talaria_api_requests_total{endpoint="chat",status="200"} 2.0',
            'talaria_api_requests_total{endpoint="chat",status="404"} 1.0',
            'talaria_api_requests_total{endpoint="models",status="200"} 1.0',
            'talaria_api_requests_total{endpoint="other",status="404"} 1.0',
            'talaria_api_ttft_seconds_count{endpoint="chat"} 2.0',
            "talaria_api_in_flight 0.0",
            "talaria_api_frames_total 8.0",
            "talaria_api_bus_connected 1.0",
        ):
            assert line in lines
        sent = next(float(x.split()[1]) for x in lines if x.startswith("talaria_api_sent_bytes_total"))
        assert sent > 500


async def test_openapi_names_everything(connect: Connect) -> None:
    async with edge(connect, answers) as e:
        doc = (await e.http.get("/openapi.json")).json()
        assert {"/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/models/{model}", "/readyz"} <= set(
            doc["paths"]
        )
        post = doc["paths"]["/v1/chat/completions"]["post"]
        assert {"200", "400", "404", "413", "429", "503"} <= set(post["responses"])
        names = doc["components"]["schemas"]["ChatRequest"]["properties"]
        assert {"messages", "max_completion_tokens", "ignore_eos", "tools"} <= set(names)
        assert "security" not in post


async def test_nagle_is_off(connect: Connect) -> None:
    async with edge(connect, answers) as e, e.http.stream("GET", "/livez") as response:
        assert response.status_code == 200
        [connection, *_] = e.server.server_state.connections
        sock: Any = connection.transport.get_extra_info("socket")
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


# --- the view, as pure state


def test_view_deltas_and_full_states() -> None:
    c = Cluster(stale_after_s=1.5)
    assert not c.seen
    assert not c.fresh(0.0)
    c.update(1.0, view(instance_view("a"), instance_view("b"), version=1))
    c.update(2.0, view(instance_view("a", health="gone"), version=2, full=False))
    assert c.ready_instances() == 1
    assert c.fresh(3.0)
    assert not c.fresh(4.0)
    c.update(3.0, view(instance_view("b"), version=3))
    assert c.why_not_ready() == []


def test_gone_instances_are_reported() -> None:
    c = Cluster(1.5)
    gone = c.update(1.0, view(instance_view("a", health="gone", epoch="x"), instance_view("b")))
    assert [(g.snapshot.iid, g.snapshot.epoch) for g in gone] == [("a", "x")]


def test_older_versions_are_ignored_and_new_lives_begin_with_a_full_state() -> None:
    c = Cluster(1.5)
    c.update(1.0, view(instance_view("a"), version=5))
    assert c.update(2.0, view(version=4)) == []
    assert c.ready_instances() == 1
    c.update(3.0, view(instance_view("b"), version=1, epoch="t2", full=False))
    assert c.ready_instances() == 1
    c.update(3.5, view(version=2, epoch="t2"))
    assert c.ready_instances() == 0


@pytest.mark.parametrize(("state", "ready"), [("active", True), ("host", True), ("cold", False), ("failed", False)])
def test_model_states(state: str, ready: bool) -> None:
    c = Cluster(1.5)
    c.update(1.0, view(instance_view("a", state=state)))
    assert c.model("m").ready is ready
    assert c.knows("m")
    assert ("m" in c.served()) is ready


async def test_readyz_asks_the_router_once_for_many(connect: Connect) -> None:
    async with edge(connect, answers, config=settings()) as e:
        responses = await asyncio.gather(*(e.http.get("/readyz") for _ in range(10)))
        assert {r.status_code for r in responses} == {200}
