"""What `python -m talaria_PART --config FILE [--id NAME]` does for each of the services."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Literal

from talaria_common.ids import check_name
from talaria_common.service import Main, run
from talaria_common.settings import Settings, SettingsError, load

Part = Literal["api", "router", "telemetry"]
EXIT_CONFIG = 2


def with_id(settings: Settings, part: Part, name: str) -> Settings:
    """The settings with another id of the part. Raises ValueError if the name cannot be one."""
    section = getattr(settings, part).model_copy(update={"id": check_name(name, "--id")})
    return settings.model_copy(update={part: section})


def enter(
    part: Part,
    description: str,
    main: Main,
    argv: list[str] | None,
    check: Callable[[Settings], object] = lambda _: None,
) -> int:
    """Parse arguments, load the configuration, run `main` until it ends; returns the exit status.

    Args:
        part: whose section names the process.
        description: for --help.
        main: the service's work.
        argv: None: the command line's.
        check: raises ValueError for a mistake that only the service can see.

    Returns:
        2 for a mistake in the configuration, said on stderr; else as `talaria_common.service.run`.
    """
    parser = argparse.ArgumentParser(prog=f"talaria_{part}", description=description)
    parser.add_argument("--config", help="talaria.toml; default: $TALARIA_CONFIG, else ./talaria.toml")
    parser.add_argument("--id", help=f"this process's name in the mesh; default: {part}.id of the configuration")
    args = parser.parse_args(argv)
    try:
        settings = load(args.config)
        if args.id:
            settings = with_id(settings, part, args.id)
        check(settings)
    except (SettingsError, ValueError) as e:
        sys.stderr.write(f"{e}\n")
        return EXIT_CONFIG
    return run(main, getattr(settings, part).id, settings)
