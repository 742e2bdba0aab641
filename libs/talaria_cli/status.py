"""`talaria status`: what runs, what is ready, how old that knowledge is."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import msgspec

from talaria_cli import link
from talaria_cli.up import runfile
from talaria_cli.up.health import reason_in
from talaria_common import subjects
from talaria_common.bus import Bus, Message
from talaria_common.errors import BusError
from talaria_common.settings import Settings, SettingsError
from talaria_common.wire import ClusterView, InstanceView, Snapshot, WireError, decode


class PartStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A process that `talaria up` started here."""

    name: str
    role: str
    pid: int
    alive: bool
    restarts: int = 0
    ready: bool | None = None
    """Of its own /readyz; None: it has none."""
    says: str = ""


class ModelStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A model on an instance."""

    name: str
    state: str
    running: int
    queued: int
    kv_used_tokens: int
    kv_capacity_tokens: int


class InstanceStatus(msgspec.Struct, frozen=True, kw_only=True):
    """An instance as its last snapshot, and telemetry, tell."""

    iid: str
    pool: str
    status: str
    reason: str = ""
    health: str = "unknown"
    """telemetry's word: ok, stale, gone; unknown while telemetry says nothing."""
    age_ms: int = 0
    active_model: str | None = None
    switches: int = 0
    engine_restarts: int = 0
    models: tuple[ModelStatus, ...] = ()


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """The whole."""

    bus_url: str
    bus: str
    """connected, or why not."""
    cluster_age_ms: int | None = None
    """Age of telemetry's last word; None: none came while we listened."""
    parts: tuple[PartStatus, ...] = ()
    instances: tuple[InstanceStatus, ...] = ()
    missing: tuple[str, ...] = ()
    """Configured instances that nothing was heard of."""

    @property
    def all_ready(self) -> bool:
        """Whether everything that is known of is ready."""
        return (
            self.bus == "connected"
            and not self.missing
            and bool(self.instances)
            and self.cluster_age_ms is not None
            and all(p.alive and p.ready is not False for p in self.parts)
            and all(i.status == "ready" and i.health in {"ok", "unknown"} for i in self.instances)
        )


class Heard:
    """What came over the bus while we listened."""

    def __init__(self) -> None:
        self.snapshots: dict[str, tuple[Snapshot, float]] = {}
        self.views: dict[str, InstanceView] = {}
        self.cluster_at: float | None = None

    def on_snapshot(self, message: Message) -> None:
        """A snapshot; one that does not parse is left to telemetry to complain of."""
        try:
            snapshot = decode(message.data, Snapshot)
        except WireError:
            return
        self.snapshots[snapshot.iid] = (snapshot, time.monotonic())

    def on_cluster(self, message: Message) -> None:
        """A cluster view, full or delta."""
        try:
            view = decode(message.data, ClusterView)
        except WireError:
            return
        self.cluster_at = time.monotonic()
        self.views |= {v.snapshot.iid: v for v in view.instances}

    def instances(self, now: float) -> list[InstanceStatus]:
        """Freshest knowledge of each instance, by id."""
        rows = []
        for iid in sorted(self.snapshots.keys() | self.views.keys()):
            view = self.views.get(iid)
            if iid in self.snapshots:
                snapshot, at = self.snapshots[iid]
                age_ms = round((now - at) * 1000)
            else:
                assert view is not None
                snapshot, age_ms = view.snapshot, view.age_ms
            rows.append(_instance(snapshot, age_ms, view.health if view else "unknown"))
        return rows


def _instance(s: Snapshot, age_ms: int, health: str) -> InstanceStatus:
    return InstanceStatus(
        iid=s.iid,
        pool=s.pool,
        status=s.status,
        reason=s.reason,
        health=health,
        age_ms=age_ms,
        active_model=s.active_model,
        switches=s.switches,
        engine_restarts=s.engine_restarts,
        models=tuple(
            ModelStatus(
                name=m.name,
                state=m.state,
                running=m.running,
                queued=m.queued,
                kv_used_tokens=m.kv_used_tokens,
                kv_capacity_tokens=m.kv_capacity_tokens,
            )
            for m in s.models
        ),
    )


async def collect(url: str, settings: Settings | None, running: runfile.Running | None, listen_s: float) -> Status:
    """Listen on the bus for `listen_s` seconds, ask each part's /readyz meanwhile."""
    heard = Heard()
    parts = asyncio.ensure_future(_parts(running))
    state = "connected"
    try:
        bus: Bus = await link.connect(url, settings, "talaria-status")
    except BusError as e:
        state = str(e)
    else:
        try:
            await bus.subscribe(subjects.ALL_SNAPSHOTS, heard.on_snapshot)
            await bus.subscribe(subjects.CLUSTER, heard.on_cluster)
            await asyncio.sleep(listen_s)
        finally:
            await bus.close()
    now = time.monotonic()
    instances = heard.instances(now)
    known = {i.iid for i in instances}
    return Status(
        bus_url=url,
        bus=state,
        cluster_age_ms=None if heard.cluster_at is None else round((now - heard.cluster_at) * 1000),
        parts=tuple(await parts),
        instances=tuple(instances),
        missing=tuple(i.id for i in settings.instances if i.id not in known) if settings else (),
    )


async def _parts(running: runfile.Running | None) -> list[PartStatus]:
    if running is None:
        return []
    async with httpx.AsyncClient(timeout=2.0, trust_env=False) as http:
        return list(await asyncio.gather(*(_part(http, name, part) for name, part in running.parts.items())))


async def _part(http: httpx.AsyncClient, name: str, part: runfile.RunningPart) -> PartStatus:
    ready: bool | None = None
    says = ""
    if part.http:
        try:
            answer = await http.get(f"{part.http}/readyz")
            ready = answer.status_code == 200
            says = part.http if ready else reason_in(answer.text)
        except httpx.HTTPError as e:
            ready, says = False, f"{part.http}/readyz: {e or type(e).__name__}"
    alive = runfile.alive(part.pid)
    return PartStatus(
        name=name, role=part.role, pid=part.pid, alive=alive, restarts=part.restarts, ready=ready, says=says
    )


def run_status(config: Path | None, bus: str, state_dir: Path, as_json: bool) -> int:
    """Print it; returns 0 when everything is ready, else 1."""
    running = runfile.read(state_dir)
    try:
        settings = link.settings_of(config, running)
    except SettingsError as e:
        print(f"talaria status: {e}", file=sys.stderr)
        return 2
    heartbeat_s = settings.mesh.heartbeat_s if settings else 0.5
    found = asyncio.run(collect(link.bus_url(bus, running, settings), settings, running, max(1.2, 2.5 * heartbeat_s)))
    if as_json:
        print(msgspec.json.format(msgspec.json.encode({"ready": found.all_ready, **_plain(found)})).decode())
    else:
        _print(found, running)
    return 0 if found.all_ready else 1


def _plain(found: Status) -> dict[str, Any]:
    plain = msgspec.to_builtins(found)
    assert isinstance(plain, dict)
    return plain


def _print(found: Status, running: runfile.Running | None) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    print(f"bus {found.bus_url}: {found.bus}; telemetry: {_age(found.cluster_age_ms)}")
    if running is None:
        print("no `talaria up` runs in this directory (--state-dir); what follows comes from the bus")
    for title, head, rows in (
        ("parts", ("part", "role", "pid", "alive", "ready", "restarts", ""), _part_rows(found)),
        ("instances", ("instance", "pool", "status", "health", "age", "active", "switches", ""), _instance_rows(found)),
        ("models", ("instance", "model", "state", "running", "queued", "kv tokens"), _model_rows(found)),
    ):
        if not rows:
            continue
        table = Table(*head, title=title, title_justify="left", box=None, pad_edge=False)
        for row in rows:
            table.add_row(*row)
        console.print(table)
    for iid in found.missing:
        print(f"{iid}: configured, but nothing was heard of it")
    print("ready" if found.all_ready else "not ready")


def _part_rows(found: Status) -> list[tuple[str, ...]]:
    word = {None: "-", True: "yes", False: "no"}
    return [(p.name, p.role, str(p.pid), word[p.alive], word[p.ready], str(p.restarts), p.says) for p in found.parts]


def _instance_rows(found: Status) -> list[tuple[str, ...]]:
    return [
        (i.iid, i.pool, i.status, i.health, f"{i.age_ms} ms", i.active_model or "-", str(i.switches), i.reason)
        for i in found.instances
    ]


def _model_rows(found: Status) -> list[tuple[str, ...]]:
    return [
        (i.iid, m.name, m.state, str(m.running), str(m.queued), f"{m.kv_used_tokens}/{m.kv_capacity_tokens}")
        for i in found.instances
        for m in i.models
    ]


def _age(age_ms: int | None) -> str:
    return "silent" if age_ms is None else f"spoke {age_ms} ms ago"
