"""`talaria up` over scripted parts: start, death, restart, stop."""

import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from talaria_cli.up import ports, runfile
from talaria_common.settings import load
from tests.cli.conftest import Up, gone

Start = Callable[..., Up]


def test_ready_then_ctrl_c_stops_everything(up: Start, scripted: dict[str, str], config: Path) -> None:
    it = up(scripted | {"SCRIPT_INSTANCE": "slow"})
    it.wait_for("Ctrl-C stops everything")
    settings = load(config)
    assert f"ready on http://127.0.0.1:{settings.api.port}" in it.text
    assert "loading weights" in it.text, "it says why an instance is not ready"
    running = it.running()
    assert set(running.parts) == {"nats", "telemetry-0", "router-0", "cold-0", "api-0"}
    assert running.bus_url == settings.bus.url
    family = it.family()
    assert {p.pid for p in running.parts.values()} <= {p.pid for p in family}
    it.signal(signal.SIGINT)
    assert it.end() == 0
    assert gone(family)
    assert runfile.read(it.state) is None
    assert not [part for part in ("api-0", "router-0", "cold-0") if f"{part}: still there" in it.text]


def test_sigterm_while_starting_stops_cleanly_too(up: Start, scripted: dict[str, str]) -> None:
    it = up(scripted | {"SCRIPT_API": "slow"})
    it.wait_for("telemetry-0:")
    family = it.family()
    it.signal(signal.SIGTERM)
    assert it.end() == 0
    assert gone(family)


def test_a_dead_part_is_started_again(up: Start, scripted: dict[str, str]) -> None:
    it = up(scripted)
    read = it.wait_for("Ctrl-C stops everything")
    for part in ("router-0", "nats"):
        before = it.pid(part)
        os.kill(before, signal.SIGKILL)
        read = it.wait_for(f"{part} died (killed by SIGKILL)", after=read)
        it.wait_for(f"{part}: ready", after=read - 1)
        now = it.running().parts[part]
        assert now.pid != before
        assert now.restarts == 1
    it.signal(signal.SIGINT)
    assert it.end() == 0


def test_a_part_that_cannot_start_ends_it_with_its_last_words(up: Start, scripted: dict[str, str]) -> None:
    it = up(scripted | {"SCRIPT_ROUTER": "dies"})
    assert it.end(40) == 1
    assert "router-0 cannot be started: exit code 1, 4 times in a row" in it.text
    assert "the scripted part cannot go on" in it.text
    assert "Traceback" not in it.text


def test_a_part_that_hangs_is_killed_within_15_s(up: Start, scripted: dict[str, str]) -> None:
    it = up(scripted | {"SCRIPT_INSTANCE": "hangs"})
    it.wait_for("Ctrl-C stops everything")
    family = it.family()
    since = time.monotonic()
    it.signal(signal.SIGINT)
    assert it.end() == 0
    assert time.monotonic() - since < 15
    assert "cold-0: still there after 6 s, killed" in it.text
    assert gone(family)


def test_second_ctrl_c_kills_at_once(up: Start, scripted: dict[str, str]) -> None:
    it = up(scripted | {"SCRIPT_API": "hangs", "SCRIPT_INSTANCE": "hangs"})
    it.wait_for("Ctrl-C stops everything")
    family = it.family()
    it.signal(signal.SIGINT)
    it.wait_for("stopping")
    it.signal(signal.SIGINT)
    assert it.end() == 130
    assert "still there" not in it.text, "nobody was given time to stop"
    assert gone(family)


def test_kill_9_leaves_no_orphans(up: Start, scripted: dict[str, str]) -> None:
    it = up(scripted)
    it.wait_for("Ctrl-C stops everything")
    family = it.family()
    assert len(family) >= 5
    it.signal(signal.SIGKILL)
    it.end()
    assert gone(family)


def test_what_a_dead_part_left_behind_is_killed(up: Start, scripted: dict[str, str]) -> None:
    it = up(scripted | {"SCRIPT_INSTANCE": "spawns"})
    it.wait_for("Ctrl-C stops everything")
    log = Path(it.running().parts["cold-0"].log).read_text()
    grandchild = psutil.Process(int(log.split("grandchild ")[1].split()[0]))
    assert grandchild.is_running()
    os.kill(it.pid("cold-0"), signal.SIGKILL)
    assert gone([grandchild])


def test_port_taken_is_a_clear_error(up: Start, scripted: dict[str, str], config: Path) -> None:
    port = load(config).api.port
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))
        other.listen()
        it = up(scripted)
        assert it.end() == 1
    assert f"port {port} on 127.0.0.1 is taken" in it.text
    assert "--port" in it.text


def test_another_nats_is_not_joined_silently(up: Start, scripted: dict[str, str], config: Path) -> None:
    port = ports.host_port(load(config).bus.url)[1]
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", port))
        other.listen()
        it = up(scripted)
        it.wait_for("Ctrl-C stops everything")
        assert f"something else listens on port {port}: the embedded NATS server takes" in it.text
        assert it.running().bus_url != load(config).bus.url
        it.signal(signal.SIGINT)
        assert it.end() == 0


def test_users_of_the_bus_that_cannot_be_are_a_clear_error(up: Start, scripted: dict[str, str]) -> None:
    users = {"USER": "tap", "PASSWORD": "one", "TAP_PASSWORD": "other"}
    it = up(scripted | {f"TALARIA_BUS__{key}": value for key, value in users.items()})
    assert it.end(40) == 1
    assert "error: [bus]: 'tap' names the read-only user" in it.text
    assert "Traceback" not in it.text


def test_external_nats_that_is_away_is_an_error(up: Start, scripted: dict[str, str], config: Path) -> None:
    users = {"USER": "mesh", "PASSWORD": "one", "TAP_PASSWORD": "other"}
    it = up(scripted | {f"TALARIA_BUS__{key}": value for key, value in users.items()}, "--external-nats")
    assert it.end(40) == 1
    assert f"bus.tap_password changes nothing: the server at {load(config).bus.url} is not ours" in it.text
    assert f"no NATS server answers at {load(config).bus.url}" in it.text


def test_a_taken_metrics_port_is_replaced(up: Start, scripted: dict[str, str], config: Path) -> None:
    port = load(config).mesh.metrics_ports["router-0"]
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))
        other.listen()
        it = up(scripted)
        it.wait_for("Ctrl-C stops everything")
        assert f"metrics port {port} of router-0 is taken" in it.text
        assert it.running().parts["router-0"].http not in {None, f"http://127.0.0.1:{port}"}


def test_only_one_up_per_state_directory(up: Start, scripted: dict[str, str]) -> None:
    first = up(scripted)
    first.wait_for("Ctrl-C stops everything")
    second = up(scripted)
    assert second.end() == 1
    assert f"already running here (process {first.process.pid}" in second.text


def test_mistakes_in_the_configuration_start_nothing(up: Start, config: Path) -> None:
    config.write_text(config.read_text().replace('engine = "sim"', 'engine = "simm"'))
    it = up({})
    assert it.end() == 1
    assert "instances.0.engine = 'simm'" in it.text
    assert not (it.state / "logs").exists()
