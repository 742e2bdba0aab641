"""Commands that need no mesh: key, config check, doctor, version, help."""

import hashlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from talaria_cli import doctor
from talaria_cli.main import app
from talaria_cli.up import ports
from talaria_common.settings import load, parse

RUN = CliRunner()
GOOD = '[models.m]\nsource = "tiny-qwen3"\n[[instances]]\nid = "cold-0"\nengine = "sim"\nmodels = ["m"]\n'


def test_key_prints_a_key_and_the_lines_that_let_it_in(tmp_path: Path) -> None:
    result = RUN.invoke(app, ["key", "alice"])
    assert result.exit_code == 0
    key, rest = result.stdout.split("\n", 1)
    assert len(key) > 40
    assert key not in rest
    file = tmp_path / "t.toml"
    file.write_text(GOOD + "\n" + rest)
    settings = load(file, env={})
    assert settings.auth.keys[0].tenant == "alice"
    assert settings.auth.keys[0].sha256 == hashlib.sha256(key.encode()).hexdigest()
    assert RUN.invoke(app, ["key", "alice"]).stdout.split("\n", 1)[0] != key


def test_key_refuses_a_name_that_is_no_tenant() -> None:
    result = RUN.invoke(app, ["key", "a.b"])
    assert result.exit_code == 2
    assert "tenant 'a.b'" in result.output


def test_config_check_names_every_mistake(tmp_path: Path) -> None:
    file = tmp_path / "t.toml"
    file.write_text("[router]\ntau_s = -1\nspeed = 3\n[api]\nport = 99999\n")
    result = RUN.invoke(app, ["config", "check", str(file)])
    assert result.exit_code == 1
    assert "router.tau_s = -1" in result.output
    assert "router.speed: unknown key (value 3)" in result.output
    assert "api.port = 99999" in result.output
    assert "3 mistakes" in result.output


def test_config_check_of_a_good_file_remarks_what_looks_wrong(tmp_path: Path) -> None:
    file = tmp_path / "t.toml"
    file.write_text('[mesh.metrics_ports]\nrouter-9 = 8000\n[models.lonely]\nsource = "smollm2"\n' + GOOD)
    result = RUN.invoke(app, ["config", "check", str(file)])
    assert result.exit_code == 0
    assert "models.lonely: no instance serves it" in result.output
    assert "mesh.metrics_ports.router-9: no part has this id" in result.output
    assert "port 8000 is given twice" in result.output
    assert "cold-0 (cold, sim on cpu)" in result.output


def test_config_check_knows_the_policies(tmp_path: Path) -> None:
    file = tmp_path / "t.toml"
    file.write_text('[router]\npolicy = "nope"\n')
    result = RUN.invoke(app, ["config", "check", str(file)])
    assert result.exit_code == 1
    assert "router.policy = 'nope': there are talaria, least-pressure" in result.output


def test_config_check_of_a_missing_file(tmp_path: Path) -> None:
    result = RUN.invoke(app, ["config", "check", str(tmp_path / "none.toml")])
    assert result.exit_code == 1
    assert "no such file" in result.output


def test_the_default_configuration_is_good_and_unremarkable() -> None:
    root = Path(__file__).parents[2]
    result = RUN.invoke(app, ["config", "check", str(root / "talaria.toml")])
    assert result.exit_code == 0, result.output
    assert "warning" not in result.output


def test_doctor_reports_what_is_there(tmp_path: Path) -> None:
    file = tmp_path / "t.toml"
    file.write_text(f'[api]\nport = {ports.free_port()}\n[bus]\nurl = "nats://127.0.0.1:{ports.free_port()}"\n' + GOOD)
    result = RUN.invoke(app, ["doctor", "--config", str(file), "--state-dir", str(tmp_path)])
    assert result.exit_code == 0, result.output
    for what in ("python", "cores", "memory", "disk", "gpu", "fastapi", "nats-server", "api port", "docker"):
        assert re.search(rf"^(ok|warn) +{what}", result.output, re.MULTILINE), what


def test_doctor_fails_on_a_taken_port_and_a_broken_file(tmp_path: Path) -> None:
    import socket

    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        file = tmp_path / "t.toml"
        file.write_text(f"[api]\nport = {other.getsockname()[1]}\n{GOOD}")
        result = RUN.invoke(app, ["doctor", "--config", str(file), "--state-dir", str(tmp_path)])
    assert result.exit_code == 1
    assert "is taken" in result.output
    file.write_text("nonsense = [")
    result = RUN.invoke(app, ["doctor", "--config", str(file), "--state-dir", str(tmp_path)])
    assert result.exit_code == 1
    assert "fail  configuration" in result.output


def test_doctor_knows_small_machines() -> None:
    assert doctor.check_python((3, 10)).level == "fail"
    assert doctor.check_python((3, 14)).level == "fail"
    assert doctor.check_cores(1).level == "warn"
    settings = parse(tomllib.loads(GOOD.replace('engine = "sim"', 'device = "cuda:0"')))
    assert doctor.check_disk(1 << 30, Path("/")).level == "warn"
    assert doctor.check_memory(1 << 20, settings).level == "warn"


def test_version_names_the_packages() -> None:
    result = RUN.invoke(app, ["version"])
    assert re.search(r"^talaria +\d", result.output, re.MULTILINE)
    assert "nats-py" in result.output


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from talaria_cli.main import app; from typer.main import get_command; get_command(app);"
        "heavy = {'pydantic', 'httpx', 'nats', 'rich.live', 'torch', 'uvloop', 'talaria_common.settings'} & set(sys.modules);"
        "sys.exit(', '.join(sorted(heavy)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", ["up", "status", "chat", "tap", "doctor", "key", "config"])
def test_every_command_has_help(command: str) -> None:
    result = RUN.invoke(app, [command, "--help"])
    assert result.exit_code == 0
    assert "Usage" in result.output
