"""What is known of the engine process: its life, its load, and when it is to be started again."""

from __future__ import annotations

from typing import Literal

from talaria_gpu.engine.contract import ModelInfo
from talaria_gpu.engine.ipc import Closed, Opened, Ready, Status

BACKOFF_FIRST_S = 0.5
BACKOFF_MAX_S = 30.0
STABLE_S = 60.0
"""An engine that served this long has earned a fresh back-off."""
BUSY_SHARE = 0.01
"""Of one core: an engine that uses more is computing. A deadlocked or stopped one uses none."""
BUSY_FACTOR = 10
STALL_HEARTBEATS = 4
"""Between two looks: longer means that this process itself stood still."""


class EngineState:
    """One engine after another, in generations; `phase` is the present one's.

    Args:
        models: the configured models' names.
        start_s: silence while it starts, after which it counts as hung.
        hang_s: the same while it serves; long enough for the longest step and switch.
    """

    def __init__(self, models: tuple[str, ...], *, start_s: float, hang_s: float) -> None:
        self._start_s = start_s
        self._hang_s = hang_s
        self.phase: Literal["failed", "starting", "ready"] = "starting"
        self.reason = "the engine has not been started"
        self.generation = 0
        self.restarts = 0
        self.infos: dict[str, ModelInfo] = {}
        """The open models."""
        self.opening: set[str] = set()
        self.broken: dict[str, str] = {}
        """Models that could not be opened or switched to, with the reason, until they are opened again."""
        self.open_ms: dict[str, float] = {}
        """The last time that each model took to open."""
        self.buffer_bytes = 0
        self.status: Status | None = None
        self._epoch_base = dict.fromkeys(models, 0)
        self._heard: float | None = None  # no engine to hear yet
        self._looked = 0.0
        self._cpu_s = 0.0
        self._busy = 0.0  # when it was last seen computing
        self._ready_at = 0.0
        self._failures = 0

    def starting(self, now: float) -> None:
        """The process was started."""
        self.phase, self.reason = "starting", "the engine is starting"
        self._heard, self._cpu_s, self._busy = now, 0.0, now

    def heard(self, now: float) -> None:
        """It gave a sign of life."""
        self._heard = now

    def ready(self, now: float, report: Ready) -> None:
        """It serves."""
        self.phase, self.reason = "ready", ""
        self.infos = {info.name: info for info in report.models}
        self.opening, self.broken = set(), {}
        self.buffer_bytes = report.buffer_bytes
        self._ready_at = now

    def opened(self, report: Opened) -> None:
        """A model is open."""
        self.infos[report.info.name] = report.info
        if report.open_ms:
            self.open_ms[report.info.name] = report.open_ms
        self.opening.discard(report.info.name)
        self.broken.pop(report.info.name, None)

    def closed(self, report: Closed) -> None:
        """A model is closed; what it knew of sessions' KV is gone, so its KV epoch rises."""
        if self.infos.pop(report.model, None) is not None:
            self._epoch_base[report.model] = self.kv_epoch(report.model) + 1
            if self.status:
                self.status.loads.pop(report.model, None)
        self.opening.discard(report.model)
        if report.error:
            self.broken[report.model] = report.error

    def failed(self, now: float, reason: str) -> float:
        """It is gone; returns the seconds to wait before the next start.

        Device KV went with it, so every model's KV epoch rises.
        """
        if self.phase == "ready" and now - self._ready_at >= STABLE_S:
            self._failures = 0
        for model in self._epoch_base:
            self._epoch_base[model] = self.kv_epoch(model) + 1
        self.phase, self.reason = "failed", reason
        self.status, self.infos, self._heard = None, {}, None
        self.generation += 1
        self.restarts += 1
        self._failures += 1
        return float(min(BACKOFF_MAX_S, BACKOFF_FIRST_S * 2 ** (min(self._failures, 16) - 1)))

    def kv_epoch(self, model: str) -> int:
        """The model's KV epoch over all engines of this process's life: never falls."""
        load = self.status.loads.get(model) if self.status else None
        return self._epoch_base.get(model, 0) + (load.kv_epoch if load else 0)

    def hung_for(self, now: float, heartbeat_s: float, cpu_s: float | None) -> float | None:
        """Seconds of silence if they mean a hang, else None. To be asked on every heartbeat.

        An engine that is silent but computes is in a long step or switch, and gets BUSY_FACTOR times as long: a chunk
        of prefill on a starved machine must not cost every call on it its engine.

        Args:
            now: seconds.
            heartbeat_s: how often this is asked.
            cpu_s: CPU time of the engine process so far; None: not known, so only silence counts.
        """
        gap, first, self._looked = now - self._looked, not self._looked, now
        if self._heard is None:
            return None
        if gap > STALL_HEARTBEATS * heartbeat_s and not first:
            self._heard += gap  # it was us who stood still (suspended, starved): its reports wait to be read
        if cpu_s is not None:
            if cpu_s - self._cpu_s > BUSY_SHARE * gap:
                self._busy = now
            self._cpu_s = cpu_s
        limit = self._start_s if self.phase == "starting" else self._hang_s
        silence = now - self._heard
        works = now - self._busy <= limit and silence <= BUSY_FACTOR * limit
        return silence if silence > limit and not works else None
