"""`talaria key`: an API key, of which the configuration holds only the hash."""

from __future__ import annotations

import hashlib
import secrets
import sys

from talaria_common.ids import check_name

PREFIX = "tal-"


def new_key() -> str:
    """A fresh API key with 256 bits of randomness."""
    return PREFIX + secrets.token_urlsafe(32)


def toml_lines(key: str, tenant: str) -> str:
    """What goes into talaria.toml for `key`."""
    digest = hashlib.sha256(key.encode()).hexdigest()
    return f'[[auth.keys]]\ntenant = "{tenant}"\nsha256 = "{digest}"\n'


def run_key(tenant: str) -> int:
    """Print a new key on stdout's first line and its TOML below; returns the exit code."""
    try:
        check_name(tenant, "tenant")
    except ValueError as e:
        print(f"talaria key: {e}", file=sys.stderr)
        return 2
    key = new_key()
    print(key)
    print("\n# The key above is shown this once; clients send it as `Authorization: Bearer …`.")
    print("# Into talaria.toml, then restart the api:\n")
    print(toml_lines(key, tenant), end="")
    return 0
