"""The commands on a real mesh: real api, router, telemetry and instance processes, over the sim engine."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from talaria_cli.up import ports
from tests.cli.conftest import Up, gone

pytestmark = pytest.mark.mesh


def talaria(it: Up, *arguments: str, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
    """A command beside a running `up`."""
    return subprocess.run(
        [sys.executable, "-m", "talaria_cli.main", *arguments, "--state-dir", str(it.state)],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        stdin=subprocess.DEVNULL,
    )


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    directory = tmp_path_factory.mktemp("up")
    taken = {name: ports.free_port() for name in ("api", "bus", "router", "telemetry", "cold")}
    file = directory / "talaria.toml"
    file.write_text(
        f'[api]\nport = {taken["api"]}\n[bus]\nurl = "nats://127.0.0.1:{taken["bus"]}"\n'
        'user = "mesh"\npassword = "of-the-mesh"\ntap_password = "of-the-tap"\n'
        f"[mesh.metrics_ports]\nrouter-0 = {taken['router']}\ntelemetry-0 = {taken['telemetry']}\n"
        f"cold-0 = {taken['cold']}\n"
        '[models.model-a]\nsource = "tiny-qwen3"\n[models.model-b]\nsource = "tiny-qwen3"\n'
        '[[instances]]\nid = "cold-0"\nengine = "sim"\nmodels = ["model-a", "model-b"]\n'
    )
    it = Up(directory / "state", ["--config", str(file)], {})
    try:
        it.wait_for("Ctrl-C stops everything", 90)
        yield it
        family = it.family()
        it.signal(signal.SIGINT)
        since = time.monotonic()
        assert it.end() == 0, it.text
        assert time.monotonic() - since < 15
        assert gone(family)
        for part in ("api-0", "router-0", "hot-0", "cold-0"):
            assert f"{part}: still there" not in it.text, "it did not stop by itself"
    finally:
        it.close()


def test_chat_streams_an_answer_and_says_what_it_cost(mesh: Up) -> None:
    done = talaria(mesh, "chat", "model-a", "-m", "hello there", "--max-tokens", "8")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert "prompt tokens (0 cached), 8 out" in done.stderr
    assert "instance cold-0" in done.stderr


def test_chat_says_the_server_s_reason(mesh: Up) -> None:
    done = talaria(mesh, "chat", "no-such-model", "-m", "hello")
    assert done.returncode == 1
    assert "404" in done.stderr
    assert "no-such-model" in done.stderr


def test_status_knows_parts_instances_and_models(mesh: Up) -> None:
    done = talaria(mesh, "status", "--json")
    found = json.loads(done.stdout)
    assert done.returncode == 0, done.stdout
    assert found["ready"] is True
    assert {p["name"] for p in found["parts"]} == {"nats", "telemetry-0", "router-0", "cold-0", "api-0"}
    assert all(p["ready"] for p in found["parts"] if p["name"] != "nats")
    (instance,) = found["instances"]
    assert instance["iid"] == "cold-0"
    assert instance["health"] == "ok"
    assert {m["name"] for m in instance["models"]} == {"model-a", "model-b"}
    assert "cold-0" in talaria(mesh, "status").stdout


def test_passwords_are_readable_by_nobody_else(mesh: Up) -> None:
    conf = mesh.state / "nats-server.conf"
    assert "of-the-tap" in conf.read_text()
    assert conf.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    "who", [{}, {"TALARIA_BUS__USER": "tap", "TALARIA_BUS__PASSWORD": "of-the-tap"}], ids=["mesh", "tap"]
)
def test_tap_shows_a_call_on_its_way_and_changes_nothing(mesh: Up, who: dict[str, str]) -> None:
    tap = subprocess.Popen(
        [sys.executable, "-m", "talaria_cli.main", "tap", "--json", "--state-dir", str(mesh.state)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | who,
    )
    try:
        assert tap.stderr is not None
        assert tap.stdout is not None
        assert "listening" in tap.stderr.readline()
        done = talaria(mesh, "chat", "model-b", "-m", "hello again", "--max-tokens", "4")
        assert done.returncode == 0, done.stderr
        seen: list[str] = []
        wanted = {"route", "forward", "completion", "snapshot"}
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline and not wanted <= set(seen):
            subject = json.loads(tap.stdout.readline())["subject"].removeprefix("talaria.v1.").removeprefix("event.")
            assert not subject.startswith(("rpc", "tokens"))
            seen.append(subject.split(".")[0])
        assert wanted <= set(seen)
    finally:
        tap.send_signal(signal.SIGINT)
        assert tap.wait(10) == 0
        tap.stdout.close()
        tap.stderr.close()


def test_a_killed_router_comes_back_and_serves(mesh: Up) -> None:
    read = len(mesh.lines)
    os.kill(mesh.pid("router-0"), signal.SIGKILL)
    read = mesh.wait_for("router-0 died (killed by SIGKILL)", after=read)
    mesh.wait_for("router-0: ready", 60, after=read)
    body = {"model": "model-a", "messages": [{"role": "user", "content": "still there?"}], "max_tokens": 4}
    answer = httpx.post(f"{mesh.running().url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text


def test_status_without_a_mesh_is_not_ready(tmp_path: Path) -> None:
    nowhere = f"nats://127.0.0.1:{ports.free_port()}"
    done = subprocess.run(
        [sys.executable, "-m", "talaria_cli.main", "status", "--state-dir", str(tmp_path), "--bus", nowhere],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert "no `talaria up` runs" in done.stdout
    assert "not ready" in done.stdout
