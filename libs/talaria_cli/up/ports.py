"""TCP ports of this machine."""

from __future__ import annotations

import contextlib
import socket
from urllib.parse import urlsplit

LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})


def is_free(host: str, port: int) -> bool:
    """Whether a server could listen on host:port now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port in TIME_WAIT is free for a server
        try:
            s.bind((host, port))
        except OSError:
            return False
    return True


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nobody listened on a moment ago."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as s:
        s.bind((host, 0))
        return int(s.getsockname()[1])


def greeting(host: str, port: int, timeout_s: float = 0.5) -> str:
    """The first bytes that a server at host:port sends by itself ("INFO {…" from NATS); "" if it keeps quiet."""
    with contextlib.suppress(OSError), socket.create_connection((host, port), timeout_s) as s:
        s.settimeout(timeout_s)
        return s.recv(64).decode("ascii", "replace")
    return ""


def host_port(url: str, default_port: int = 4222) -> tuple[str, int]:
    """Host and port of a URL."""
    parts = urlsplit(url if "://" in url else f"nats://{url}")
    return parts.hostname or "127.0.0.1", parts.port or default_port
