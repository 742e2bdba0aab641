"""What is run, with which ports, and when it is started again."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from talaria_cli.up.backoff import LONGEST_S, TRIES, Backoff
from talaria_cli.up.plan import Where, client_host, metrics_variable, parts, stop_order
from talaria_common.settings import Settings, overlay, parse

RAW = {
    "mesh": {"metrics_ports": {"router-0": 8001, "cold-0": 8003}},
    "models": {"m": {"source": "tiny-qwen3"}},
    "instances": [{"id": "hot-0", "pool": "hot", "models": ["m"]}, {"id": "cold-0", "models": ["m"]}],
}


def where(**ports: int) -> Where:
    return Where("/py", Path("/t.toml"), "nats://127.0.0.1:5", 9000, {k.replace("_", "-"): v for k, v in ports.items()})


def test_every_part_once_with_the_bus_and_its_port() -> None:
    planned = parts(parse(RAW), where())
    assert [p.name for p in planned] == ["telemetry-0", "router-0", "hot-0", "cold-0", "api-0"]
    assert planned[3].argv == ("/py", "-m", "talaria_instance", "--config", "/t.toml", "--id", "cold-0")
    assert all(p.env["TALARIA_BUS__URL"] == "nats://127.0.0.1:5" for p in planned)
    http = {p.name: p.http for p in planned}
    assert http["api-0"] == "http://127.0.0.1:9000"
    assert http["router-0"] == "http://127.0.0.1:8001"
    assert http["telemetry-0"] is None


def test_overrides_arrive_in_the_settings_of_the_parts() -> None:
    planned = parts(parse(RAW), where(router_0=7001))
    seen = parse(overlay(RAW | {"mesh": {"metrics_ports": dict(RAW["mesh"]["metrics_ports"])}}, planned[1].env))
    assert seen.mesh.metrics_ports == {"router-0": 7001, "cold-0": 8003}
    assert seen.api.port == 9000
    assert seen.bus.url == "nats://127.0.0.1:5"
    assert metrics_variable("router-0") == "TALARIA_MESH__METRICS_PORTS__ROUTER_0"


def test_every_role_has_its_turn_to_stop_and_all_fit_15_s() -> None:
    roles = [role for group, _ in stop_order(Settings()) for role in group]
    assert {p.role for p in parts(parse(RAW), where())} | {"nats", "models"} == set(roles)
    assert roles[0] == "api"
    assert roles[-1] == "nats"
    assert sum(grace_s for _, grace_s in stop_order(Settings())) < 15


@pytest.mark.parametrize("drain_s", [0.0, 3.0, 120.0])
def test_the_api_has_time_to_cut_its_streams_before_it_is_killed(drain_s: float) -> None:
    settings = Settings.model_validate({"api": {"drain_s": drain_s}})
    grace_s = next(grace_s for group, grace_s in stop_order(settings) if "api" in group)
    assert grace_s == drain_s + 1


def test_wildcard_hosts_are_reached_over_loopback() -> None:
    assert client_host("0.0.0.0") == "127.0.0.1"
    assert client_host("::1") == "[::1]"
    assert client_host("10.1.2.3") == "10.1.2.3"


def test_defaults_need_no_ports() -> None:
    assert parts(Settings(), where())[-1].http == "http://127.0.0.1:9000"


@given(st.lists(st.tuples(st.floats(0, 100), st.booleans()), max_size=40))
def test_gives_up_only_on_what_never_worked(lives: list[tuple[float, bool]]) -> None:
    backoff, ever = Backoff(), False
    for number, (lived_s, ready) in enumerate(lives, 1):
        ever = ever or ready
        pause = backoff.died(lived_s, ready)
        assert (pause is None) == (not ever and number >= TRIES)
        if pause is None:
            return
        assert 0 < pause <= LONGEST_S


def test_pauses_double_and_a_long_good_life_resets_them() -> None:
    backoff = Backoff()
    assert [backoff.died(5.0, True) for _ in range(4)] == [0.5, 1.0, 2.0, 4.0]
    assert backoff.died(31.0, True) == 0.5
