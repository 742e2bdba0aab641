"""Prometheus metrics of an instance's own process. What its snapshots and completions say, telemetry exports."""

from __future__ import annotations

from talaria_common.metrics import Metrics
from talaria_common.wire import Event, ForwardReply, TokenBatch
from talaria_gpu.engine.ipc import Status

HOST_KV_EVENTS = ("saved", "restored", "evicted", "refused", "corrupt", "disagreed", "failed")


class InstanceMetrics:
    """Counts what goes out. `registry` is what /metrics shows."""

    def __init__(self) -> None:
        metrics = Metrics("instance")
        self.registry = metrics.registry
        self.forwards = metrics.labelled_tally(
            "forwards", "Calls that arrived: accepted, or the reason why not", ["result"]
        )
        self.calls = metrics.labelled_tally(
            "calls", "Calls that ended: stop, length, abort or error", ["model", "finish"]
        )
        self.errors = metrics.counter("call_errors", "Calls that ended with an error, by code", ["model", "code"])
        self.batches = metrics.tally("token_batches", "Token batches published")
        self.frames = metrics.tally("frames", "Frames in token batches")
        self.lost = metrics.counter("publish_errors", "Messages that the bus refused, by kind", ["kind"])
        self.switching = metrics.counter("switch_seconds", "Time spent in model switches, by target", ["model"])
        self.scheduling = metrics.gauge("scheduler_seconds", "Time that the engine process has spent deciding")
        self.stepping = metrics.gauge("engine_seconds", "Time that it has spent in steps and switches")
        self.host_kv = metrics.gauge("host_kv_bytes", "KV kept in host memory: the pool, and what is taken", ["state"])
        self.host_kv_events = metrics.labelled_tally(
            "host_kv_events",
            "Since the engine process started: blocks saved, restored, evicted, refused for want of room; restores cut "
            "short as corrupt, disagreed on between ranks, or failed",
            ["event"],
        )
        self.tokenising = metrics.histogram("tokenise_seconds", "From body to token ids, waiting included", ["where"])

    def spent(self, status: Status) -> None:
        """What the engine process's heartbeat says: where its time went, what became of KV on the host."""
        self.scheduling.set(status.scheduler_ms / 1000)
        self.stepping.set(status.engine_ms / 1000)
        kept = status.host_kv
        if kept is None:
            return
        self.host_kv.labels("capacity").set(kept.capacity_bytes)
        self.host_kv.labels("taken").set(kept.taken_bytes)
        for event in HOST_KV_EVENTS:
            self.host_kv_events.put(getattr(kept, event), event)

    def observe(self, message: object) -> None:
        """Count a message that goes out."""
        match message:
            case TokenBatch(frames=frames):
                self.batches.n += 1
                self.frames.n += len(frames)
            case ForwardReply(accepted=accepted, error=error):
                self.forwards.add("accepted" if accepted or error is None else error.code)
            case Event(kind="completion", data=data):
                self.calls.add(data["model"], data["finish"])
                if "code" in data:
                    self.errors.labels(data["model"], data["code"]).inc()
            case Event(kind="switch", data=data):
                self.switching.labels(data["target"]).inc(data["total_ms"] / 1000)
            case _:
                pass
