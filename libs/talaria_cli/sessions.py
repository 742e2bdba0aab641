"""`talaria sessions`: who is where, with what KV, under which lease."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from talaria_cli import link
from talaria_cli.up import runfile
from talaria_common import subjects
from talaria_common.bus import Bus, Message
from talaria_common.errors import BusError
from talaria_common.settings import Settings, SettingsError
from talaria_common.wire import SessionRecord, Snapshot, WireError, decode, kv_residence

AT_ONCE = 64


class SessionStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One session on one model."""

    session: str
    tenant: str
    model: str
    iid: str
    kv: str
    """device, host or missing; unknown while its instance says nothing."""
    kv_tokens: int
    lease_ms: int
    """What is left of its lease; 0: it holds none."""
    idle_ms: int
    calls: int


def statuses(records: Iterable[SessionRecord], heard: Mapping[str, Snapshot], now_ms: int) -> list[SessionStatus]:
    """Sessions, the last used first. `heard`: the newest snapshot of each instance."""
    found = [
        SessionStatus(
            session=r.session,
            tenant=r.tenant,
            model=r.model,
            iid=r.iid,
            kv=_kv(r, heard.get(r.iid)),
            kv_tokens=r.kv_tokens,
            lease_ms=max(0, r.lease_until_ms - now_ms),
            idle_ms=max(0, now_ms - r.last_use_ms),
            calls=r.calls,
        )
        for r in records
    ]
    return sorted(found, key=lambda s: (s.idle_ms, s.session, s.model))


def _kv(record: SessionRecord, snapshot: Snapshot | None) -> str:
    model = next((m for m in snapshot.models if m.name == record.model), None) if snapshot else None
    if snapshot is None or model is None:
        return "unknown"
    return kv_residence(record.iid_epoch, record.kv_epoch, record.kv_tokens, snapshot.epoch, model)


async def collect(bus: Bus, listen_s: float) -> tuple[list[SessionRecord], dict[str, Snapshot]]:
    """All records of the bucket, and the snapshots that came within `listen_s`. Raises BusError."""
    heard: dict[str, Snapshot] = {}

    def on_snapshot(message: Message) -> None:
        try:
            snapshot = decode(message.data, Snapshot)
        except WireError:
            return
        heard[snapshot.iid] = snapshot

    await bus.subscribe(subjects.ALL_SNAPSHOTS, on_snapshot)
    bucket = await bus.kv(subjects.KV_SESSIONS)
    listening = asyncio.ensure_future(asyncio.sleep(listen_s))
    keys = await bucket.keys()
    records: list[SessionRecord] = []
    for start in range(0, len(keys), AT_ONCE):
        for entry in await asyncio.gather(*(bucket.get(key) for key in keys[start : start + AT_ONCE])):
            if entry is None:
                continue
            try:
                records.append(decode(entry.value, SessionRecord))
            except WireError:
                continue
    await listening
    return records, heard


def run_sessions(limit: int, config: Path | None, bus: str, state_dir: Path, as_json: bool) -> int:
    """Print them; 2 if they cannot be asked for."""
    try:
        running = runfile.read(state_dir)
        settings = link.settings_of(config, running)
        found = asyncio.run(_collect(link.bus_url(bus, running, settings), settings))
    except (SettingsError, BusError) as e:
        print(f"talaria sessions: {e}", file=sys.stderr)
        return 2
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(found[:limit])).decode())
    else:
        _print(found, limit)
    return 0


async def _collect(url: str, settings: Settings | None) -> list[SessionStatus]:
    heartbeat_s = settings.mesh.heartbeat_s if settings else 0.5
    bus = await link.connect(url, settings, "talaria-sessions")
    try:
        records, heard = await collect(bus, 1.5 * heartbeat_s)
    finally:
        await bus.close()
    return statuses(records, heard, round(time.time() * 1000))


def _print(found: list[SessionStatus], limit: int) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(
        "session", "tenant", "model", "instance", "KV", "tokens", "lease", "idle", "calls", box=None, pad_edge=False
    )
    for s in found[:limit]:
        lease = f"{s.lease_ms} ms" if s.lease_ms else "-"
        idle = f"{s.idle_ms / 1000:.1f} s"
        table.add_row(s.session[:12], s.tenant, s.model, s.iid, s.kv, str(s.kv_tokens), lease, idle, str(s.calls))
    Console(highlight=False).print(table)
    print(f"{len(found)} sessions" + (f", the last used {limit} shown" if len(found) > limit else ""))
