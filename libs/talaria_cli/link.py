"""How commands find the mesh: its bus and its configuration."""

from __future__ import annotations

import logging
from pathlib import Path

import structlog

from talaria_cli.up import runfile
from talaria_common.bus import NatsBus
from talaria_common.settings import Settings, SettingsError, load


async def connect(url: str, settings: Settings | None, name: str) -> NatsBus:
    """A bus connection under the configured user. Raises BusError when the server cannot be reached.

    The commands say themselves what matters of it, so its log lines stay off the terminal.
    """
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    user, password = (settings.bus.user, settings.bus.password) if settings else ("", "")
    return await NatsBus.connect(url, name=name, user=user, password=password)


def settings_of(config: Path | None, running: runfile.Running | None) -> Settings | None:
    """The configuration named, else that of the running `up`, else ./talaria.toml; None if there is none.

    Raises:
        SettingsError: a file that was named is wrong or missing.
    """
    if config is not None:
        return load(config)
    try:
        return load(running.config if running is not None else None)
    except SettingsError:
        return None


def bus_url(given: str, running: runfile.Running | None, settings: Settings | None) -> str:
    """The bus to talk to: the one given, else the running `up`'s, else the configured one."""
    if given:
        return given
    if running is not None:
        return running.bus_url
    return settings.bus.url if settings is not None else "nats://127.0.0.1:4222"
