"""What runs on this machine for a given configuration, in which order it starts and stops."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from talaria_common.settings import Settings

Role = Literal["nats", "models", "telemetry", "router", "instance", "api"]

CUTTING_S = 1.0
"""What an api may take, beyond its `drain_s`, to end streams that did not finish and to say goodbye."""


def stop_order(settings: Settings) -> tuple[tuple[tuple[Role, ...], float], ...]:
    """Roles that are stopped together, and the seconds that they get before they are killed; 14 s in all by default.

    The api first: it ends its streams while the instances behind them still live. NATS last: the others say goodbye
    over it.
    """
    return (
        (("api",), settings.api.drain_s + CUTTING_S),
        (("router", "instance", "models"), 6.0),
        (("telemetry",), 2.0),
        (("nats",), 2.0),
    )


@dataclass(frozen=True, slots=True)
class Part:
    """One process to run."""

    name: str
    role: Role
    argv: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)
    """Variables on top of the supervisor's own."""
    http: str | None = None
    """Base URL of its /readyz, if it has one."""


@dataclass(frozen=True, slots=True)
class Where:
    """What the plan needs beside the settings."""

    python: str
    config: Path
    bus_url: str
    api_port: int
    metrics_ports: dict[str, int] = field(default_factory=dict)
    """Ports that really are free, by part; they replace the configured ones."""


def metrics_variable(part: str) -> str:
    """The variable that overrides a part's metrics port."""
    return f"TALARIA_MESH__METRICS_PORTS__{part.upper().replace('-', '_')}"


def parts(settings: Settings, where: Where) -> list[Part]:
    """The mesh without NATS, in start order: telemetry sees everything from the beginning, the api comes last."""
    env = {"TALARIA_BUS__URL": where.bus_url, "TALARIA_API__PORT": str(where.api_port)}
    env |= {metrics_variable(part): str(port) for part, port in where.metrics_ports.items()}
    ports = settings.mesh.metrics_ports | where.metrics_ports

    def part(name: str, role: Role, *more: str, http: str | None = None) -> Part:
        argv = (where.python, "-m", f"talaria_{role}", "--config", str(where.config), *more)
        if http is None and ports.get(name):
            http = f"http://{client_host(settings.mesh.metrics_host)}:{ports[name]}"
        return Part(name, role, argv, env, http)

    api = f"http://{client_host(settings.api.host)}:{where.api_port}"
    return [
        part(settings.telemetry.id, "telemetry"),
        part(settings.router.id, "router"),
        *(part(i.id, "instance", "--id", i.id) for i in settings.instances),
        part(settings.api.id, "api", http=api),
    ]


def client_host(host: str) -> str:
    """The address at which a server bound to `host` is reached from here."""
    if host in {"0.0.0.0", "::", ""}:  # noqa: S104 - compared, not bound
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host
