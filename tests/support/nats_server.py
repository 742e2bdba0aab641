"""A real nats-server on a free port."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

from talaria_common.bus.server_conf import ServerConf


class NatsServer:
    """One nats-server process; keeps its port and store over `stop` and `start`.

    Args:
        directory: for its configuration, store and log.
        conf: anything but store_dir and port.
    """

    def __init__(self, directory: Path, conf: ServerConf | None = None) -> None:
        self._dir = directory
        self._conf = replace(conf or ServerConf(""), store_dir=str(directory / "store"), port=-1)
        self._process: subprocess.Popen[bytes] | None = None
        self.port = -1

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    @property
    def log(self) -> str:
        return (self._dir / "nats.log").read_text(errors="replace")

    def start(self) -> NatsServer:
        beside = str(Path(sys.executable).parent)  # the environment's own, activated or not
        executable = shutil.which("nats-server", path=os.pathsep.join([beside, os.environ.get("PATH", "")]))
        assert executable, "no nats-server: install the extra `nats`"
        conf = self._dir / "nats.conf"
        conf.write_text(replace(self._conf, port=self.port).render())
        for old in self._dir.glob("*.ports"):
            old.unlink()
        args = [executable, "-c", str(conf), "--ports_file_dir", str(self._dir), "-l", str(self._dir / "nats.log")]
        self._process = subprocess.Popen(args, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.port = self._wait_for_port(self._process)
        return self

    def _wait_for_port(self, process: subprocess.Popen[bytes], timeout_s: float = 20.0) -> int:
        ports = self._dir / f"nats-server_{process.pid}.ports"
        until = time.monotonic() + timeout_s
        while time.monotonic() < until:
            assert process.poll() is None, f"nats-server ended at once:\n{self.log}"
            try:
                return int(json.loads(ports.read_text())["nats"][0].rpartition(":")[2])
            except (FileNotFoundError, json.JSONDecodeError):
                time.sleep(0.01)
        raise AssertionError(f"nats-server did not come up:\n{self.log}")

    def lose_store(self) -> None:
        """Forget all streams and buckets; only while it is stopped."""
        assert self._process is None
        shutil.rmtree(self._dir / "store", ignore_errors=True)

    def stop(self, *, kill: bool = False) -> None:
        if self._process is None:
            return
        (self._process.kill if kill else self._process.terminate)()
        self._process.wait(timeout=20)
        self._process = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid
