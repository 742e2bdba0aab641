"""deploy/compose as files: current, consistent, and read by the compose tool that is here."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from talaria_api.metrics import ApiMetrics
from talaria_common.bus.server_conf import ServerConf
from talaria_common.settings import load
from talaria_instance.metrics import InstanceMetrics

ROOT = Path(__file__).parents[2]
COMPOSE = ROOT / "deploy" / "compose"
PARTS = {"nats", "telemetry", "router", "hot-0", "cold-0", "api"}


def tool() -> list[str] | None:
    """`docker-compose` (1.29) or `docker compose` (v2), whichever is installed."""
    if shutil.which("docker-compose"):
        return ["docker-compose"]
    if shutil.which("docker"):
        done = subprocess.run(["docker", "compose", "version"], capture_output=True, check=False, timeout=30)
        if done.returncode == 0:
            return ["docker", "compose"]
    return None


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    return dict(yaml.safe_load((COMPOSE / "compose.yaml").read_text())["services"])


def test_nats_configuration_is_the_mesh_s_own() -> None:
    text = (COMPOSE / "nats-server.conf").read_text()
    made = ServerConf(store_dir="/data", host="0.0.0.0", monitor_port=8222).render()
    assert text.split("\n", 1)[1] == made, "write it again from talaria_common.bus.server_conf"


def test_configuration_is_good_and_names_the_services(services: dict[str, Any]) -> None:
    settings = load(COMPOSE / "talaria.toml", env={})
    assert {i.id for i in settings.instances} <= set(services)
    assert settings.bus.url == "nats://nats:4222"
    for part, port in settings.mesh.metrics_ports.items():
        service = services.get(part) or services[part.rsplit("-", 1)[0]]
        assert f":{port}/" in service["environment"]["HEALTH_URL"]


def test_an_api_without_keys_is_published_on_loopback_only(services: dict[str, Any]) -> None:
    assert not load(COMPOSE / "talaria.toml", env={}).auth.keys
    published = [p for s in services.values() for p in s.get("ports", [])]
    assert published
    assert all(p.startswith("127.0.0.1:") for p in published)


def test_same_models_as_the_default_configuration() -> None:
    ours, default = load(COMPOSE / "talaria.toml", env={}), load(ROOT / "talaria.toml", env={})
    assert ours.models == default.models
    assert ours.instances == default.instances
    assert ours.router == default.router
    assert ours.api.silence_s == default.api.silence_s


def test_start_order(services: dict[str, Any]) -> None:
    """Nothing starts before what it needs is healthy."""
    after = {name: set(s.get("depends_on", ())) for name, s in services.items()}
    assert after["telemetry"] == {"nats"}
    assert after["router"] == {"telemetry"}
    assert after["cold-0"] == after["hot-0"] == {"telemetry", "models"}
    assert after["api"] == {"router", "hot-0", "cold-0"}
    for name in PARTS - {"nats"}:
        assert all(d["condition"] in {"service_healthy", "service_completed_successfully"} for d in
                   services[name]["depends_on"].values())  # fmt: skip


def test_images_run_as_nobody_special() -> None:
    text = (COMPOSE / "Dockerfile").read_text()
    parts = re.split(r"^(?:# --- .*\n)?FROM ", text, flags=re.MULTILINE)
    stages = {p.split(" AS ")[1].split()[0]: p for p in parts if " AS " in p}
    assert set(stages) == {"wanted", "base", "control", "cpu", "gpu"}
    for name in ("control", "cpu", "gpu"):
        assert stages[name].rstrip().endswith("USER talaria")
    assert "requirements" not in stages["control"], "the control image stays free of torch"
    assert "HEALTHCHECK" in stages["base"]
    assert "HEALTHCHECK" in stages["gpu"]


def test_everything_that_is_mounted_exists(services: dict[str, Any]) -> None:
    for service in services.values():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            if source.startswith("."):
                assert (COMPOSE / source).exists(), source


def test_dashboard_asks_for_metrics_that_exist() -> None:
    exported = {m.name for r in (ApiMetrics().registry, InstanceMetrics().registry) for m in r.collect()}
    telemetry = (ROOT / "services/telemetry/talaria_telemetry/metrics.py").read_text()
    exported |= set(re.findall(r'"(talaria_\w+)"', telemetry))
    dashboard = json.loads((COMPOSE / "grafana" / "dashboards" / "talaria.json").read_text())
    asked = {
        name
        for panel in dashboard["panels"]
        for target in panel["targets"]
        for name in re.findall(r"talaria_\w+", target["expr"])
    }
    assert len(asked) >= 8
    for name in asked:
        assert re.sub(r"_(total|bucket|sum|count)$", "", name) in exported, f"no such metric: {name}"


@pytest.mark.parametrize("files", [["compose.yaml"], ["compose.yaml", "compose.gpu.yaml"]])
def test_the_compose_tool_reads_it(files: list[str]) -> None:
    command = tool()
    if command is None:
        pytest.skip("neither docker-compose nor `docker compose` is installed")
    arguments = [a for f in files for a in ("-f", str(COMPOSE / f))]
    done = subprocess.run(
        [*command, *arguments, "config"], capture_output=True, text=True, timeout=60, check=False, cwd=COMPOSE,
        env=os.environ | {"TALARIA_HTTP_PORT": "8123"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    merged = yaml.safe_load(done.stdout)
    assert set(merged["services"]) >= PARTS
    target = merged["services"]["cold-0"]["build"]["target"]
    assert target == ("gpu" if len(files) > 1 else "cpu")
    assert "8123" in str(merged["services"]["api"]["ports"])
