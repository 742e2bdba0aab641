"""`talaria up` with the configuration that the project ships: real SGLang on CPU, both pools, all three models."""

import signal
import sys
import time
from pathlib import Path

import httpx
import pytest

from talaria_cli.up import ports
from tests.cli.conftest import Up, gone

pytestmark = [pytest.mark.soak, pytest.mark.mesh, pytest.mark.engine, pytest.mark.timeout(600)]
CONFIG = Path(__file__).parents[2] / "talaria.toml"


def test_the_default_configuration_is_ready_serves_and_stops(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    port = ports.free_port()
    env = {
        "TALARIA_API__PORT": str(port),
        "TALARIA_BUS__URL": f"nats://127.0.0.1:{ports.free_port()}",
        "TALARIA_MESH__METRICS_PORTS__ROUTER_0": str(ports.free_port()),
        "TALARIA_MESH__METRICS_PORTS__TELEMETRY_0": str(ports.free_port()),
    }
    began = time.monotonic()
    it = Up(tmp_path / "state", ["--config", str(CONFIG)], env)
    try:
        it.wait_for("Ctrl-C stops everything", 300)
        with capsys.disabled():
            sys.stdout.write(f"\nready after {time.monotonic() - began:.1f} s\n")
        for model in ("smollm2-135m-instruct", "tiny-qwen3-random", "tiny-mla-random"):
            ask = {"model": model, "messages": [{"role": "user", "content": "What is the capital of France?"}]}
            answer = httpx.post(
                f"http://127.0.0.1:{port}/v1/chat/completions", json=ask | {"max_tokens": 8}, timeout=60
            )
            assert answer.status_code == 200, answer.text
        family = it.family()
        it.signal(signal.SIGINT)
        assert it.end() == 0, it.text
        assert gone(family)
        assert "died" not in it.text
    finally:
        it.close()
