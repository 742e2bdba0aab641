"""Prometheus: every instance as telemetry sees it, and what completions add up to."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from talaria_common.clock import Clock
from talaria_common.wire import Completion, ModelState, Snapshot
from talaria_telemetry.core import TelemetryCore
from talaria_telemetry.instances import Instance

_INSTANCE: tuple[tuple[str, str, Callable[[Instance, float], float]], ...] = (
    ("talaria_instance_snapshot_age_seconds", "Since its newest snapshot came", lambda i, now: i.age_s(now)),
    ("talaria_instance_up", "1: snapshots come and it is ready", lambda i, _: i.health == "ok" and _ready(i)),
    ("talaria_instance_clock_offset_seconds", "Its clock less telemetry's", lambda i, _: i.clock_offset_ms / 1000),
    ("talaria_instance_kv_occupancy", "Used share of the active model's KV", lambda i, _: i.snapshot.kv_occupancy),
    ("talaria_instance_buffer_bytes", "Its device buffer", lambda i, _: i.snapshot.buffer_bytes),
    ("talaria_instance_staging_free_bytes", "Room for staging", lambda i, _: i.snapshot.staging_free_bytes),
    ("talaria_instance_round_remaining_seconds", "Rest of the slot", lambda i, _: i.snapshot.round_remaining_ms / 1e3),
    ("talaria_instance_round_planned_seconds", "The round", lambda i, _: i.snapshot.round_planned_ms / 1e3),
    ("talaria_instance_round_infeasible", "1: its plan gave a target up", lambda i, _: bool(i.snapshot.infeasible)),
    ("talaria_instance_deadline_risk", "Calls that will probably be late", lambda i, _: i.snapshot.deadline_risk),
)
_INSTANCE_TOTALS: tuple[tuple[str, str, Callable[[Instance], float]], ...] = (
    ("talaria_instance_snapshot_gaps", "Snapshots that never came, this epoch", lambda i: i.gaps),
    ("talaria_instance_snapshots_late", "Snapshots dropped as old or repeated", lambda i: i.late),
    ("talaria_instance_restarts", "Epochs after the first", lambda i: i.restarts),
    ("talaria_instance_engine_restarts", "Engine processes after the first", lambda i: i.snapshot.engine_restarts),
    ("talaria_instance_switches", "Model switches", lambda i: i.snapshot.switches),
    ("talaria_instance_prefilled_tokens", "Prompt tokens computed", lambda i: i.snapshot.prefilled_tokens),
)
_MODEL: tuple[tuple[str, str, Callable[[ModelState, Snapshot], float]], ...] = (
    ("talaria_model_queued", "Calls that wait", lambda m, _: m.queued),
    ("talaria_model_running", "Calls past their first token", lambda m, _: m.running),
    ("talaria_model_queued_tokens", "Prompt tokens that wait", lambda m, _: m.queued_tokens),
    ("talaria_model_kv_used_tokens", "Device KV rows in use", lambda m, _: m.kv_used_tokens),
    ("talaria_model_kv_capacity_tokens", "Device KV rows", lambda m, _: m.kv_capacity_tokens),
    ("talaria_model_cached_sessions", "Sessions with reusable KV", lambda m, _: m.cached_sessions),
    ("talaria_model_prefill_seconds_per_token", "EWMA", lambda m, _: m.prefill_ms_per_token / 1e3),
    ("talaria_model_decode_step_seconds", "EWMA", lambda m, _: m.decode_step_ms / 1e3),
    ("talaria_model_switch_seconds", "EWMA", lambda m, _: m.switch_ms / 1e3),
    ("talaria_model_active", "1: its weights are in the device buffer", lambda m, s: m.name == s.active_model),
)


def _ready(instance: Instance) -> bool:
    return instance.snapshot.status == "ready"


class InstanceCollector(Collector):
    """Reads the core when Prometheus asks: nothing is kept twice, and what is gone disappears."""

    def __init__(self, core: TelemetryCore, clock: Clock) -> None:
        self._core = core
        self._clock = clock

    def collect(self) -> Iterator[Metric]:
        """All instances now."""
        now = self._clock.now()
        instances = list(self._core.instances.values())
        for name, text, of in _INSTANCE:
            gauge = GaugeMetricFamily(name, text, labels=["instance", "pool"])
            for i in instances:
                gauge.add_metric([i.snapshot.iid, i.snapshot.pool], float(of(i, now)))
            yield gauge
        for name, text, total in _INSTANCE_TOTALS:
            counter = CounterMetricFamily(name, text, labels=["instance", "pool"])
            for i in instances:
                counter.add_metric([i.snapshot.iid, i.snapshot.pool], float(total(i)))
            yield counter
        for name, text, value in _MODEL:
            gauge = GaugeMetricFamily(name, text, labels=["instance", "model"])
            for i in instances:
                for m in i.snapshot.models:
                    gauge.add_metric([i.snapshot.iid, m.name], float(value(m, i.snapshot)))
            yield gauge
        view = CounterMetricFamily("talaria_cluster_views", "Cluster views published")
        view.add_metric([], float(self._core.version))
        yield view


class CompletionMetrics:
    """What the completion hook adds up to, by instance and model."""

    def __init__(self, registry: CollectorRegistry) -> None:
        labels = ["instance", "model"]
        self._ended = Counter("talaria_completions", "Calls that ended", [*labels, "ok"], registry=registry)
        self._prompt = Counter("talaria_prompt_tokens", "Prompt tokens", labels, registry=registry)
        self._cached = Counter(
            "talaria_cached_tokens", "Prompt tokens not computed", [*labels, "source"], registry=registry
        )
        self._output = Counter("talaria_completion_tokens", "Tokens generated", labels, registry=registry)
        self._ttft = Histogram("talaria_instance_ttft_seconds", "Arrival to first token", labels, registry=registry)
        self._queue = Histogram("talaria_instance_queue_seconds", "Wait for prefill", labels, registry=registry)

    def add(self, c: Completion) -> None:
        """Count one completion."""
        self._ended.labels(c.iid, c.model, str(c.ok).lower()).inc()
        if not c.ok:
            return
        self._prompt.labels(c.iid, c.model).inc(c.prompt_tokens)
        self._output.labels(c.iid, c.model).inc(c.completion_tokens)
        if c.cached_tokens:
            self._cached.labels(c.iid, c.model, c.cache_source).inc(c.cached_tokens)
        self._ttft.labels(c.iid, c.model).observe(c.ttft_ms / 1000)
        self._queue.labels(c.iid, c.model).observe(c.queue_ms / 1000)
