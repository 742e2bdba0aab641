"""The systems that are compared: each starts itself and says at which address it serves which model."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import psutil
import tomli_w

from bench.ablation.child import CHUNK, HOST_KV_BYTES, MAX_RUNNING, PAGE
from bench.ablation.process import QUIET
from bench.ablation.scale import GAMMA, T_TTFT_S, Scale
from bench.compare import device, mux
from bench.gateway.processes import Processes, StartError, free_port
from bench.report import ROOT

TALARIA, ROUND_ONLY, PLAIN, MUX, MUX_EMULATED = "talaria", "round_only", "plain", "sglangmux", "sglangmux_emulated"
NAMES = (TALARIA, ROUND_ONLY, PLAIN, MUX, MUX_EMULATED)
HOLDS_STREAMS = frozenset({MUX, MUX_EMULATED})
"""They give a stream out at its end: a time to the first token is not theirs to be compared by."""
INSTANCE = "cold-0"
TAU_S = 1.0
READY_S = 600
END_S = 20
ENVIRONMENT = QUIET | {
    # Where Python keeps no compiled modules, each of a dozen processes would compile SGLang anew, for half a minute.
    "PYTHONDONTWRITEBYTECODE": "",
    "PYTHONPYCACHEPREFIX": str(ROOT / ".talaria" / "bench-pycache"),
}
PATIENCE_S = 900
"""More than anything may take: no system refuses or gives up a call here."""


class Setup(NamedTuple):
    """What all systems have in common."""

    paths: Mapping[str, Path]
    how: Scale
    reload_s: float
    """What an emulated reload takes."""


class Running(NamedTuple):
    """A system that serves."""

    urls: dict[str, str]
    """By model."""
    processes: Processes

    def reloads(self) -> list[float]:
        """Seconds of each reload of weights so far, as servers logged them."""
        logs = (self.processes.directory / "mux").glob("*.stdout.log")
        return [took for log in logs for took in device.reload_times(log.read_text(errors="replace"))]


@contextlib.contextmanager
def running(name: str, setup: Setup, directory: Path) -> Iterator[Running]:
    """The system `name`, ready for calls; its processes are gone at the end. Raises StartError."""
    starts = {TALARIA: _talaria, ROUND_ONLY: _talaria, PLAIN: _plain, MUX: _mux, MUX_EMULATED: _mux}
    with Processes(directory) as processes:
        try:
            yield Running(starts[name](name, setup, processes), processes)
        finally:
            below = [process for part in processes.names for process in _family(processes, part)]
            if starts[name] is _talaria:
                processes.stop(*reversed(processes.names))
            _kill(below)  # SGLang's server takes ten seconds to end by itself, and some have a session of their own


def _family(processes: Processes, part: str) -> list[psutil.Process]:
    """A part's processes, as far as they are there still."""
    out = []
    with contextlib.suppress(psutil.NoSuchProcess):
        out += [psutil.Process(pid) for pid in processes.tree(part)]
    return out


def _kill(processes: Sequence[psutil.Process]) -> None:
    """Kill them and wait until they have let go of what they held; a second or two."""
    deadline = time.monotonic() + END_S
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            while process.status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
                time.sleep(0.02)


def talaria_settings(name: str, setup: Setup, port: int) -> dict[str, Any]:
    """talaria.toml: one cold instance with all models, the ablation's sizes, targets and links."""
    how = setup.how
    slots = how.slots()
    instance = {
        "id": INSTANCE,
        "models": list(setup.paths),
        "kv_tokens": device.KV_TOKENS,
        "page_size": PAGE,
        "max_running": MAX_RUNNING,
        "max_queued": 256,
        "chunked_prefill_tokens": CHUNK,
        "host_kv_mib": HOST_KV_BYTES >> 20,
        "emulate_kv_h2d_gbps": how.kv_bytes_per_s / 1e9,
        "emulate_kv_d2h_gbps": how.kv_bytes_per_s / 1e9,
        "emulate_weight_h2d_gbps": how.weights_bytes_per_s / 1e9,
        "scheduler": name.replace("_", "-"),
        "slot_ms": slots["slot_ms"],
        "drain_ms": slots["drain_ms"],
        "threads": 1,
        "engine_hang_s": float(PATIENCE_S),
    }
    return {
        "api": {"port": port, "silence_s": 60.0, "request_timeout_s": float(PATIENCE_S)},
        "router": {
            "t_ttft_s": T_TTFT_S * how.time,
            "gamma": GAMMA,
            "t_tpot_ms": slots["t_tpot_ms"],
            "tau_s": TAU_S * how.time,
            "overload": "queue",
            "patience_s": float(READY_S),
        },
        "log": {"level": "warning"},
        "models": {
            model: {"source": "path", "path": str(path), "dtype": "float32", "context_tokens": device.CONTEXT}
            for model, path in setup.paths.items()
        },
        "instances": [instance],
    }


def _talaria(name: str, setup: Setup, processes: Processes) -> dict[str, str]:
    directory, port, nats_port = processes.directory, free_port(), free_port()
    url = f"nats://127.0.0.1:{nats_port}"
    config, nats_config = directory / "talaria.toml", directory / "nats.conf"
    config.write_text(tomli_w.dumps(talaria_settings(name, setup, port)))
    store = json.dumps(str(directory / "jetstream"))
    nats_config.write_text(f"listen: 127.0.0.1:{nats_port}\nmax_payload: 8388608\njetstream {{ store_dir: {store} }}\n")
    server = Path(sys.executable).with_name("nats-server")
    if not server.is_file():
        raise StartError(f"no nats-server beside {sys.executable}: install the nats extra")
    processes.start("nats", [str(server), "--config", str(nats_config)])
    parts = {part: [sys.executable, "-m", f"talaria_{part}"] for part in ("telemetry", "router", "api")}
    parts[INSTANCE] = [sys.executable, "-m", "talaria_instance", "--id", INSTANCE]
    for part, args in parts.items():
        processes.start(part, [*args, "--config", str(config)], _environment(directory, {"TALARIA_BUS__URL": url}))
    processes.wait_http(f"http://127.0.0.1:{port}/readyz", ["nats", *parts], READY_S)
    device.bind(processes.tree(INSTANCE)[1:], device.core())
    return dict.fromkeys(setup.paths, f"http://127.0.0.1:{port}")


def _environment(directory: Path, more: Mapping[str, str] = MappingProxyType({})) -> dict[str, str]:
    """Of a system's processes; what they leave in temporary files goes with the system's directory."""
    return ENVIRONMENT | {"TMPDIR": str(directory), device.CORE: str(device.core())} | dict(more)


def _scripts(setup: Setup, directory: Path) -> dict[str, tuple[Path, int]]:
    """A launch script and a port for each model's SGLang server."""
    folder = directory / "models"
    folder.mkdir()
    out = {}
    for model, path in setup.paths.items():
        (folder / model).symlink_to(path)
        port, file = free_port(), directory / f"{model}.sh"
        file.write_text(mux.script(model, port, folder))
        out[model] = (file, port)
    return out


def _plain(_name: str, setup: Setup, processes: Processes) -> dict[str, str]:
    scripts = _scripts(setup, processes.directory)
    for model, (file, _) in scripts.items():
        processes.start(model, ["bash", str(file)], _environment(processes.directory))
    urls = {model: f"http://127.0.0.1:{port}" for model, (_, port) in scripts.items()}
    for model, url in urls.items():
        processes.wait_http(f"{url}/health", [model], READY_S)
    return urls


def _mux(name: str, setup: Setup, processes: Processes) -> dict[str, str]:
    why = mux.prepare()
    if why:
        raise StartError(f"sglangmux cannot be used: {why}")
    scripts, port = _scripts(setup, processes.directory), free_port()
    env = _environment(processes.directory, {device.RELOAD_S: str(setup.reload_s)} if name == MUX_EMULATED else {})
    files = [file for file, _ in scripts.values()]
    processes.start("mux", mux.command(port, processes.directory / "mux", files, PATIENCE_S), env)
    processes.wait_http(f"http://127.0.0.1:{port}/health", ["mux"], READY_S)
    return dict.fromkeys(setup.paths, f"http://127.0.0.1:{port}")


def interrupted() -> None:
    """End as on Ctrl-C when told to stop, so that what was started is stopped."""

    def stop(number: int, _frame: object) -> None:
        raise KeyboardInterrupt(f"signal {number} at {time.ctime()}")

    signal.signal(signal.SIGTERM, stop)
