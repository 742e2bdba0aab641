"""What the engine process tells of itself, as Prometheus finds it."""

from __future__ import annotations

from talaria_gpu.engine.contract import HostKvFigures
from talaria_gpu.engine.ipc import ReportUnpacker, Status, pack
from talaria_instance.metrics import HOST_KV_EVENTS, InstanceMetrics


def heard(**more: object) -> Status:
    """A heartbeat that has crossed the socket."""
    status = Status(
        active=None,
        loads={},
        prefilled_tokens=0,
        switches=0,
        switch_ms={},
        decode_step_ms={},
        prefill_ms_per_token={},
        slot_remaining_ms=0.0,
        idle_checked=0,
        **more,  # type: ignore[arg-type]
    )
    (got,) = ReportUnpacker().feed(bytes(pack(status)))
    assert got == status
    return got


def test_what_became_of_kv_on_the_host():
    metrics = InstanceMetrics()

    def value(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(f"talaria_instance_host_kv_{name}", labels)

    metrics.spent(heard())
    assert value("events_total", event="corrupt") is None
    metrics.spent(heard(host_kv=HostKvFigures(capacity_bytes=100, taken_bytes=40, saved=7, corrupt=1, disagreed=2)))
    assert (value("bytes", state="capacity"), value("bytes", state="taken")) == (100, 40)
    counted = {event: value("events_total", event=event) for event in HOST_KV_EVENTS}
    assert counted == {**dict.fromkeys(HOST_KV_EVENTS, 0), "saved": 7, "corrupt": 1, "disagreed": 2}
    metrics.spent(heard(host_kv=HostKvFigures(saved=1)))  # another engine process
    assert value("events_total", event="saved") == 1
