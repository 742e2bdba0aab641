from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from talaria_common.metrics import Metrics, render


def test_names_units_and_labels():
    metrics = Metrics("router", process=False)
    metrics.counter("decisions", "placements by reason", ["via"]).labels("lease").inc(2)
    metrics.gauge("sessions", "entries of the session table").set(3)
    metrics.histogram("decision_ms", "time to decide").observe(0.3)
    samples = {
        (s.name, *s.labels.items()): s.value
        for family in text_string_to_metric_families(render(metrics.registry).decode())
        for s in family.samples
    }
    assert samples["talaria_router_decisions_total", ("via", "lease")] == 2
    assert samples[("talaria_router_sessions",)] == 3
    assert samples["talaria_router_decision_ms_bucket", ("le", "0.25")] == 0
    assert samples["talaria_router_decision_ms_bucket", ("le", "0.5")] == 1


def test_a_histogram_has_a_unit_or_buckets():
    metrics = Metrics("x", process=False)
    with pytest.raises(ValueError, match="seconds"):
        metrics.histogram("size", "of something")
    metrics.histogram("size", "of something", buckets=[1, 2])
    for unit in ("seconds", "bytes", "tokens"):
        metrics.histogram(f"a_{unit}", "each has its buckets").observe(1)


def test_two_registries_do_not_meet():
    one, other = Metrics("x"), Metrics("x")
    one.gauge("g", "a").set(1)
    other.gauge("g", "a").set(2)
    assert b"talaria_x_g 1.0" in render(one.registry)
    assert b"talaria_x_g 2.0" in render(other.registry)
    assert b"process_resident_memory_bytes" in render(one.registry)
