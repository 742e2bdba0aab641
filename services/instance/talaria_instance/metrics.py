"""Prometheus metrics of an instance, taken from what it publishes anyway."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from talaria_common.wire import Completion, Event, ForwardReply, Snapshot, TokenBatch

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class InstanceMetrics:
    """Args: registry: where they are registered."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.forwards = Counter(
            "talaria_instance_forwards", "Calls that arrived, by answer", ["result"], registry=registry
        )
        self.calls = Counter("talaria_instance_calls", "Calls that ended", ["model", "finish"], registry=registry)
        self.tokens = Counter(
            "talaria_instance_tokens",
            "Tokens by kind: prompt, cached, completion",
            ["model", "kind"],
            registry=registry,
        )
        self.ttft = Histogram(
            "talaria_instance_ttft_seconds", "Acceptance to first token", ["model"], buckets=_SECONDS, registry=registry
        )
        self.queue = Histogram(
            "talaria_instance_queue_seconds", "Acceptance to prefill", ["model"], buckets=_SECONDS, registry=registry
        )
        self.total = Histogram(
            "talaria_instance_call_seconds", "Acceptance to end", ["model"], buckets=_SECONDS, registry=registry
        )
        self.batches = Counter("talaria_instance_token_batches", "Token batches published", registry=registry)
        self.frames = Counter("talaria_instance_frames", "Frames in token batches", registry=registry)
        self.lost = Counter(
            "talaria_instance_publish_errors", "Messages that the bus refused, by kind", ["kind"], registry=registry
        )
        self.switch_seconds = Counter(
            "talaria_instance_switch_seconds", "Time spent in model switches, by target", ["model"], registry=registry
        )
        self.queued = Gauge("talaria_instance_queued", "Calls before their first token", ["model"], registry=registry)
        self.running = Gauge("talaria_instance_running", "Calls past their first token", ["model"], registry=registry)
        self.kv = Gauge("talaria_instance_kv_occupancy", "Used share of the active model's KV", registry=registry)
        self.ready = Gauge("talaria_instance_ready", "1 while it takes calls", registry=registry)
        self.switches = Gauge("talaria_instance_switches", "Model switches of this engine", registry=registry)
        self.restarts = Gauge("talaria_instance_engine_restarts", "Engines lost", registry=registry)
        self.prefilled = Gauge(
            "talaria_instance_prefilled_tokens", "Prompt tokens computed by this engine", registry=registry
        )

    def observe(self, message: object) -> None:
        """Count a message that goes out."""
        match message:
            case TokenBatch(frames=frames):
                self.batches.inc()
                self.frames.inc(len(frames))
            case ForwardReply(accepted=accepted, error=error):
                self.forwards.labels("accepted" if accepted else (error.code if error else "rejected")).inc()
            case Completion():
                self._completion(message)
            case Snapshot():
                self._snapshot(message)
            case Event(kind="completion", data=data):
                self.calls.labels(data["model"], data["finish"]).inc()
            case Event(kind="switch", data=data):
                self.switch_seconds.labels(data["target"]).inc(data["total_ms"] / 1000)
            case _:
                pass

    def _completion(self, message: Completion) -> None:
        for kind, count in (
            ("prompt", message.prompt_tokens),
            ("cached", message.cached_tokens),
            ("completion", message.completion_tokens),
        ):
            self.tokens.labels(message.model, kind).inc(count)
        if message.ttft_ms:
            self.ttft.labels(message.model).observe(message.ttft_ms / 1000)
            self.queue.labels(message.model).observe(message.queue_ms / 1000)
        self.total.labels(message.model).observe(message.total_ms / 1000)

    def _snapshot(self, message: Snapshot) -> None:
        self.ready.set(message.status == "ready")
        self.kv.set(message.kv_occupancy)
        self.switches.set(message.switches)
        self.restarts.set(message.engine_restarts)
        self.prefilled.set(message.prefilled_tokens)
        for model in message.models:
            self.queued.labels(model.name).set(model.queued)
            self.running.labels(model.name).set(model.running)
