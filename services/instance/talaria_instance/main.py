"""Composes one instance process."""

from __future__ import annotations

import argparse
import sys

from talaria_common.service import Process, run
from talaria_common.settings import Settings, SettingsError, load
from talaria_instance.metrics import InstanceMetrics
from talaria_instance.service import InstanceService


def engine_command(config: str, iid: str) -> list[str]:
    """What starts the engine process of `iid`."""
    return [sys.executable, "-m", "talaria_gpu.engine.worker", "--config", config, "--id", iid]


async def serve(process: Process, config: str) -> None:
    """Run the instance `process.name` until the process is told to stop."""
    metrics = InstanceMetrics()
    bus = await process.connect_bus()
    service = InstanceService(
        process.settings,
        process.name,
        bus,
        process.clock,
        epoch=process.epoch,
        engine_command=engine_command(config, process.name),
        metrics=metrics,
    )
    await process.observe(metrics.registry, service.not_ready)
    await service.run(process.stop)


def main(argv: list[str] | None = None) -> int:
    """Parse arguments, serve, and return the exit status: 2 for a configuration mistake."""
    parser = argparse.ArgumentParser(prog="talaria_instance", description="One inference instance.")
    parser.add_argument("--config", required=True, help="talaria.toml")
    parser.add_argument("--id", required=True, help="which of its instances this is")
    args = parser.parse_args(argv)
    try:
        settings = _settings(args.config, args.id)
    except SettingsError as e:
        sys.stderr.write(f"{e}\n")
        return 2
    return run(lambda process: serve(process, args.config), args.id, settings)


def _settings(config: str, iid: str) -> Settings:
    """The configuration, which has this instance. Raises SettingsError."""
    settings = load(config)
    settings.instance(iid)
    return settings
