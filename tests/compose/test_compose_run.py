"""deploy/compose for real: build, up, a streamed answer, down. Needs a Docker engine; builds some GB of images."""

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator

import httpx
import pytest

from talaria_cli.chat import sse
from talaria_cli.up.ports import free_port
from tests.compose.test_compose_files import COMPOSE, tool

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]

Compose = Callable[..., str]


@pytest.fixture(scope="module")
def port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def compose(port: int) -> Iterator[Compose]:
    command = tool()
    if command is None:
        pytest.skip("neither docker-compose nor `docker compose` is installed")
    if subprocess.run(["docker", "info"], capture_output=True, check=False, timeout=60).returncode != 0:
        pytest.skip("no Docker engine answers")
    env = os.environ | {"COMPOSE_PROJECT_NAME": f"talaria-test-{os.getpid()}", "TALARIA_HTTP_PORT": str(port)}

    def run(*arguments: str, timeout_s: float = 1800.0, check: bool = True) -> str:
        done = subprocess.run(
            [*command, *arguments],
            cwd=COMPOSE,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        assert done.returncode == 0 or not check, done.stdout[-6000:]
        return done.stdout

    try:
        run("build", "api", "cold-0")
        run("up", "-d", timeout_s=600)
        yield run
    except AssertionError:
        print(run("logs", "--tail", "40", check=False)[-20000:])  # noqa: T201 - pytest shows it with the failure
        raise
    finally:
        run("down", "-v", "--remove-orphans", "-t", "20", timeout_s=300, check=False)


def test_a_streamed_answer_from_each_model(compose: Compose, port: int) -> None:
    deadline = time.monotonic() + 300
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120, trust_env=False) as http:
        while True:
            try:
                ready = http.get("/readyz")
                if ready.status_code == 200:
                    break
                said = ready.text
            except httpx.HTTPError as e:
                said = repr(e)
            assert time.monotonic() < deadline, said
            time.sleep(1)
        for model in ("smollm2-135m-instruct", "tiny-qwen3-random", "tiny-mla-random"):
            body = {
                "model": model,
                "messages": [{"role": "user", "content": "Name a colour."}],
                "stream": True,
                "stream_options": {"include_usage": True},
                "max_tokens": 12,
                "temperature": 0,
            }
            with http.stream("POST", "/v1/chat/completions", json=body) as answer:
                assert answer.status_code == 200, answer.read()
                events = list(sse(answer.iter_lines()))
            assert not any("error" in e for e in events), events
            assert events[-1]["usage"]["completion_tokens"] > 0
            assert len(events) > 3


def test_the_command_inside_knows_the_mesh(compose: Compose) -> None:
    out = compose("exec", "-T", "api", "talaria", "status", "--json", "--bus", "nats://nats:4222")
    found = json.loads(out[out.index("{") :])
    assert {i["iid"] for i in found["instances"]} == {"hot-0", "cold-0"}
    assert all(i["health"] == "ok" for i in found["instances"])


def test_nothing_runs_as_root(compose: Compose) -> None:
    for service in ("api", "router", "telemetry", "cold-0"):
        assert compose("exec", "-T", service, "id", "-u").strip().splitlines()[-1] == "10001"
