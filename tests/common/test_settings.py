"""talaria.toml and the variables on top: every mistake names the key, the value and what was expected."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from talaria_common.settings import SettingsError, load, overlay, parse

ROOT = Path(__file__).resolve().parents[2]


def base(**extra: Any) -> dict[str, Any]:
    return {
        "models": {"m": {"source": "smollm2"}, "org/m-2": {"source": "tiny-mla"}},
        "instances": [{"id": "hot-0", "pool": "hot", "models": ["m"]}, {"id": "cold-0", "models": ["m", "org/m-2"]}],
        **extra,
    }


def problems(raw: dict[str, Any], env: dict[str, str] | None = None) -> list[str]:
    with pytest.raises(SettingsError) as e:
        parse(overlay(raw, env or {}))
    return e.value.problems


def test_the_shipped_file_is_right():
    settings = load(ROOT / "talaria.toml", {})
    assert [i.pool for i in settings.instances] == ["hot", "cold"]
    assert set(settings.models) == {"smollm2-135m-instruct", "tiny-qwen3-random", "tiny-mla-random"}


def test_the_defaults_are_those_of_the_design():
    s = parse({})
    assert (s.router.tau_s, s.router.t_ttft_s, s.router.gamma, s.router.t_tpot_ms) == (1.0, 10.0, 0.9, 100.0)
    assert (s.router.mu_ms_per_gib, s.router.nu_ms, s.router.control_window_s) == (2.0, 500.0, 10.0)
    assert (s.mesh.heartbeat_s, s.mesh.missed, s.api.early_headers_s) == (0.5, 3, 3.0)
    assert s.bus.max_payload_bytes == 8 << 20


@pytest.mark.parametrize(
    ("raw", "names"),
    [
        ({"router": {"gamma": 2}}, ["router.gamma", "2", "less than 1"]),
        ({"router": {"tau": 1}}, ["router.tau", "unknown key", "1"]),
        ({"router": {"overload": "spil"}}, ["router.overload", "'spil'", "'reject', 'queue' or 'spill'"]),
        ({"api": {"port": 70000}}, ["api.port", "70000", "65535"]),
        ({"api": {"port": "http"}}, ["api.port", "'http'", "integer"]),
        ({"api": {"id": "a.b"}}, ["api.id", "'a.b'", "letters"]),
        ({"api": {"host": "0.0.0.0"}}, ["api.host", "'0.0.0.0'", "auth.keys"]),
        ({"mesh": {"heartbeat_s": 0}}, ["mesh.heartbeat_s", "0", "greater than 0"]),
        ({"mesh": {"heartbeat_s": float("inf")}}, ["mesh.heartbeat_s", "inf", "finite"]),
        ({"api": {"request_timeout_s": float("inf")}}, ["api.request_timeout_s", "inf", "finite"]),
        ({"log": {"level": "loud"}}, ["log.level", "'loud'", "'debug'"]),
        ({"models": {"x": {}}}, ["models.x", "path"]),
        ({"models": {"a b": {"source": "smollm2"}}}, ["models.a b", "letters"]),
        ({"instances": [{"models": ["m"]}]}, ["instances.0.id", "missing"]),
        ({"instances": [{"id": "i", "models": ["other"]}]}, ["instances.i.models", "'other'", "[models]"]),
        ({"instances": [{"id": "i", "models": []}]}, ["instances.0.models", "at least 1"]),
        ({"instances": [{"id": "i", "models": ["m"]}] * 2}, ["instances", "twice", "i"]),
        ({"instances": [{"id": "i", "pool": "hot", "models": ["m", "org/m-2"]}]}, ["instances.0", "one model"]),
        ({"instances": [{"id": "i", "models": ["m"], "open": ["m", "x"]}]}, ["instances.0", "open names x"]),
        ({"instances": [{"id": "i", "models": ["m"], "open": []}]}, ["instances.0", "open needs a model"]),
        ({"instances": [{"id": "i", "pool": "hot", "models": ["m"], "open": ["m"]}]}, ["instances.0", "cold"]),
        ({"instances": [{"id": "i", "models": ["m"], "device": "gpu"}]}, ["instances.0.device", "'gpu'", "cuda"]),
        ({"auth": {"keys": [{"sha256": "12", "tenant": "t"}]}}, ["auth.keys.0.sha256", "'12'", "64"]),
        ({"bus": {"user": "mesh"}}, ["bus", "user and password"]),
        ({"bus": {"password": "x"}}, ["bus", "user and password"]),
        ({"bus": {"tap_password": "x"}}, ["bus", "tap_password needs a user"]),
        ({"nonsense": {}}, ["nonsense", "unknown key"]),
    ],
)
def test_a_mistake_names_key_value_and_what_was_expected(raw: dict[str, Any], names: list[str]):
    (line,) = problems(base() | raw)
    assert line.startswith(names[0])
    for name in names:
        assert name in line


def test_all_mistakes_are_named_at_once():
    assert len(problems(base(router={"gamma": 2, "tau": 1}, api={"port": -1}))) == 3


@pytest.mark.parametrize(
    ("variable", "text", "path", "value"),
    [
        ("TALARIA_ROUTER__TAU_S", "2", "router.tau_s", 2.0),
        ("TALARIA_ROUTER__POLICY", "round-robin", "router.policy", "round-robin"),
        ("TALARIA_API__ALLOW_OPEN", "true", "api.allow_open", True),
        ("TALARIA_BUS__URL", "nats://10.0.0.1:4222", "bus.url", "nats://10.0.0.1:4222"),
        ("TALARIA_BUS__PASSWORD", "0123", "bus.password", "0123"),
        ("TALARIA_BUS__PASSWORD", "123", "bus.password", "123"),
        ("TALARIA_INSTANCES__COLD_0__KV_TOKENS", "8192", "instances.1.kv_tokens", 8192),
        ("TALARIA_INSTANCES__1__KV_TOKENS", "8192", "instances.1.kv_tokens", 8192),
        ("TALARIA_INSTANCES__COLD_0__SIM__TTFT_MS", "7", "instances.1.sim.ttft_ms", 7.0),
        ("TALARIA_INSTANCES__COLD_0__MODELS", '["m"]', "instances.1.models", ("m",)),
        ("TALARIA_MODELS__ORG_M_2__DTYPE", "float32", "models.org/m-2.dtype", "float32"),
        ("TALARIA_MESH__METRICS_PORTS", '{"router-0" = 9001}', "mesh.metrics_ports", {"router-0": 9001}),
    ],
)
def test_a_variable_overrides_its_key(variable: str, text: str, path: str, value: Any):
    with_user = base(bus={"user": "u", "password": "p"}) if "PASSWORD" in variable else base()
    at: Any = parse(overlay(with_user, {variable: text}))
    for part in path.split("."):
        at = at[int(part)] if part.isdigit() else at[part] if isinstance(at, dict) else getattr(at, part)
    assert at == value


def test_variables_of_others_are_left_alone():
    env = {"PATH": "/bin", "TALARIA_CONFIG": "x", "TALARIA_CACHE": "y", "TALARIA_LOG": "debug", "TALARIA_TRACES": "z"}
    assert parse(overlay(base(), env)) == parse(base())


@pytest.mark.parametrize(
    ("variable", "names"),
    [
        ("TALARIA_ROUTER__NONSENSE", ["router.nonsense", "unknown key", "'1x'"]),
        ("TALARIA_ROUTER__TAU_S", ["router.tau_s", "'1x'", "number"]),
        ("TALARIA_INSTANCES__OTHER__KV_TOKENS", ["TALARIA_INSTANCES__OTHER__KV_TOKENS", "'1x'", "hot-0, cold-0"]),
        ("TALARIA_INSTANCES__KV_TOKENS", ["TALARIA_INSTANCES__KV_TOKENS", "list of tables"]),
        ("TALARIA_ROUTER__TAU_S__DEEP", ["TALARIA_ROUTER__TAU_S__DEEP", "not a section"]),
    ],
)
def test_a_wrong_variable_is_named(variable: str, names: list[str]):
    (line,) = problems(base(router={"tau_s": 1.0}), {variable: "1x"})
    for name in names:
        assert name in line


def test_passwords_are_not_shown():
    (line,) = problems({"bus": {"password": 4711}})
    assert line.startswith("bus.password: ")
    assert "4711" not in line
    assert "secret" not in repr(parse({"bus": {"user": "u", "password": "secret"}}))


def test_a_file_that_is_not_there_or_no_toml(tmp_path: Path):
    with pytest.raises(SettingsError, match="no such file"):
        load(tmp_path / "none.toml", {})
    bad = tmp_path / "bad.toml"
    bad.write_text("[api\nport = 1")
    with pytest.raises(SettingsError, match=r"bad\.toml: not valid TOML"):
        load(bad, {})


def test_the_file_is_named_by_argument_then_by_variable(tmp_path: Path):
    one, other = tmp_path / "one.toml", tmp_path / "other.toml"
    one.write_text("api.port = 1")
    other.write_text("api.port = 2")
    assert load(one, {"TALARIA_CONFIG": str(other)}).api.port == 1
    assert load(None, {"TALARIA_CONFIG": str(other)}).api.port == 2


def test_an_unknown_instance_is_told_which_there_are():
    settings = parse(base())
    assert settings.instance("hot-0").models == ("m",)
    with pytest.raises(SettingsError, match="hot-0, cold-0"):
        settings.instance("hot-1")


@pytest.mark.parametrize("url", ["http://x", "127.0.0.1:4222", "nats://", "nats://a b", "wss://x"])
def test_a_bus_url_that_nats_does_not_take(url: str) -> None:
    with pytest.raises(SettingsError, match=r"bus\.url"):
        load(None, env={"TALARIA_BUS__URL": url})
