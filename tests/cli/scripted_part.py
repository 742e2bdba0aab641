"""A part of the mesh that does what it is told, to try the supervisor on parts that die, hang or are slow.

Not used where the real parts serve: tests/cli/test_up_real.py starts those.
`SCRIPT_<ROLE>`: ok (default), dies, hangs (ignores SIGTERM), slow (ready after four seconds), spawns (leaves a grandchild).
"""

import argparse
import asyncio
import json
import os
import signal
import sys
import time

from talaria_common import subjects
from talaria_common.bus import NatsBus
from talaria_common.settings import load
from talaria_common.wire import ClusterView, ModelState, Snapshot, encode


async def main(role: str) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config")
    parser.add_argument("--id", default="")
    args = parser.parse_args()
    script = os.environ.get(f"SCRIPT_{role.upper()}", "ok")
    if script == "dies":
        sys.exit("the scripted part cannot go on")
    settings = load(args.config)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, (lambda: None) if script == "hangs" else stop.set)
    if script == "spawns":
        grandchild = await asyncio.create_subprocess_exec(sys.executable, "-c", "import time; time.sleep(600)")
        sys.stdout.write(f"grandchild {grandchild.pid}\n")
        sys.stdout.flush()
    bus = await NatsBus.connect(settings.bus.url, name=role)
    ready_at = time.monotonic() + (4.0 if script == "slow" else 0.0)

    async def readyz(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        ready = time.monotonic() >= ready_at
        body = json.dumps({"ready": ready, "reasons": [] if ready else ["router-0: not there yet"]}).encode()
        status = b"200 OK" if ready else b"503 Service Unavailable"
        writer.write(b"HTTP/1.1 %s\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % (status, len(body)) + body)
        await writer.drain()
        writer.close()

    ports = settings.mesh.metrics_ports
    port = {
        "api": settings.api.port,
        "router": ports.get(settings.router.id, 0),
        "telemetry": ports.get(settings.telemetry.id, 0),
        "instance": ports.get(args.id, 0),
    }[role]
    if port:
        await asyncio.start_server(readyz, "127.0.0.1", port)
    version = 0
    while not stop.is_set():
        version += 1
        now_ms = int(time.time() * 1000)
        if role == "instance":
            ready = time.monotonic() >= ready_at
            snapshot = Snapshot(
                iid=args.id,
                epoch="e",
                version=version,
                at_ms=now_ms,
                pool="cold",
                status="ready" if ready else "starting",
                reason="" if ready else "loading weights",
                models=(ModelState(name="m", state="active", kv_capacity_tokens=64),),
            )
            await bus.publish(subjects.snapshot(args.id), encode(snapshot))
        elif role == "telemetry":
            await bus.publish(
                subjects.CLUSTER, encode(ClusterView(telemetry="telemetry-0", epoch="e", version=version, at_ms=now_ms))
            )
        try:
            await asyncio.wait_for(stop.wait(), settings.mesh.heartbeat_s)
        except TimeoutError:
            continue
    await bus.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv.pop(1)))
