"""`talaria config check`: what is wrong with the configuration, and what only looks wrong."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from talaria_common.settings import DEFAULT_FILE, Settings, SettingsError, load
from talaria_router.policies import policy


def remarks(settings: Settings) -> list[str]:
    """Things that are legal and probably not meant."""
    found = []
    served = {model for instance in settings.instances for model in instance.models}
    if not settings.instances:
        found.append("instances: none; calls will get 503")
    found.extend(f"models.{name}: no instance serves it" for name in sorted(set(settings.models) - served))
    for name, model in settings.models.items():
        if model.path is not None and not (model.path / "config.json").is_file():
            found.append(f"models.{name}.path = '{model.path}': no config.json there on this machine")
    parts = {settings.api.id, settings.router.id, settings.telemetry.id} | {i.id for i in settings.instances}
    found.extend(f"mesh.metrics_ports.{p}: no part has this id" for p in settings.mesh.metrics_ports if p not in parts)
    ports = [p for p in [settings.api.port, *settings.mesh.metrics_ports.values()] if p]
    found.extend(
        f"mesh.metrics_ports: port {p} is given twice" for p in sorted({p for p in ports if ports.count(p) > 1})
    )
    return found


def _check_policy(settings: Settings) -> None:
    try:
        policy(settings.router.policy)
    except ValueError as e:
        raise SettingsError([str(e)]) from e


def run_config_check(file: Path | None) -> int:
    """Print mistakes to stderr, remarks and a summary to stdout; returns the exit code."""
    name = file or os.environ.get("TALARIA_CONFIG") or DEFAULT_FILE
    try:
        settings = load(file)
        _check_policy(settings)
    except SettingsError as e:
        for problem in e.problems:
            print(f"error: {problem}", file=sys.stderr)
        print(f"{name}: {len(e.problems)} mistake{'s' if len(e.problems) > 1 else ''}", file=sys.stderr)
        return 1
    for remark in remarks(settings):
        print(f"warning: {remark}")
    instances = ", ".join(f"{i.id} ({i.pool}, {i.engine} on {i.device})" for i in settings.instances) or "none"
    print(f"{name}: good. Models: {', '.join(settings.models) or 'none'}. Instances: {instances}.")
    return 0
