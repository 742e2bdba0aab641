"""Prometheus: the router's books, read from the core when asked."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from talaria_common.clock import Clock
from talaria_router.shell import RouterShell


class RouterCollector(Collector):
    """Collects from `shell`; nothing is counted twice."""

    def __init__(self, shell: RouterShell, clock: Clock) -> None:
        self._shell = shell
        self._clock = clock

    def collect(self) -> Iterator[Metric]:
        """Everything now."""
        shell, state = self._shell, self._shell.core.state
        books, counts = state.leases.books, state.counts
        yield _counts("talaria_router_placements", "Placements, by why", "via", counts.routed)
        yield _counts("talaria_router_verdicts", "Refusals, by reason", "reason", counts.verdicts)
        yield _counts("talaria_router_rejected_candidates", "Instances ruled out", "reason", counts.rejected)
        yield _count("talaria_router_leases_installed", "Leases installed", books.installed)
        yield _count("talaria_router_leases_honoured", "Leases consumed", books.honoured)
        yield _count("talaria_router_leases_expired", "Leases that ended unused", books.expired)
        yield _counts("talaria_router_leases_discarded", "Leases discarded", "reason", books.discarded)
        yield _count("talaria_router_leases_wasted", "Leases that brought nothing", books.wasted)
        yield _counts("talaria_router_opens", "Placements that need an activation", "residence", counts.opens)
        yield _count("talaria_router_avoidable_opens", "Activations that were avoidable", counts.avoidable_opens)
        yield _count("talaria_router_sessions_restored", "Sessions read back", counts.restored)
        yield _count("talaria_router_restore_timeouts", "Sessions not read back in time", counts.restore_timeouts)
        yield _count("talaria_router_health_probes", "Health probes", counts.probes)
        yield _count("talaria_router_not_taken_up", "Placements not taken up", counts.not_taken_up)
        yield _counts("talaria_router_replica_commands", "Opens and closes of Eq. 2", "what", counts.commands)
        yield _count("talaria_router_spilled", "Placements beyond the target, for want of room", counts.spilled)
        yield _count("talaria_router_queued", "Calls that had to wait for room", counts.queued)
        yield _gauges("talaria_router_in_flight", "Calls placed and not completed", "tenant", state.calls.in_flight)
        yield _count("talaria_router_view_gaps", "Cluster views that never came", state.cluster.gaps)
        yield _count("talaria_router_malformed", "Messages that did not fit their schema", shell.malformed)
        calls, tokens, leases = state.overlay.total()
        yield _gauge("talaria_router_overlay_calls", "Placements that no snapshot counts", calls)
        yield _gauge("talaria_router_overlay_tokens", "Their prompt tokens, estimated", tokens)
        yield _gauge("talaria_router_leases_live", "Leases held now", leases)
        yield _gauge("talaria_router_sessions", "Entries of the session table", len(state.sessions))
        yield _gauge("talaria_router_sessions_dirty", "Entries not yet written", shell.dirty)
        yield _tau(state.gaps.learnt())
        yield _gauge("talaria_router_waiting", "Calls that wait for an answer", len(state.waiting))
        yield _gauge("talaria_router_partitions", "Partitions owned", len(state.owned))
        yield _gauge("talaria_router_following", "1: the cluster view is silent", int(state.cluster.following))
        yield _health(state.cluster.healths(self._clock.now()))


def _count(name: str, text: str, value: float) -> Metric:
    family = CounterMetricFamily(name, text)
    family.add_metric([], value)
    return family


def _counts(name: str, text: str, label: str, values: Mapping[str, int]) -> Metric:
    family = CounterMetricFamily(name, text, labels=[label])
    for key, value in sorted(values.items()):
        family.add_metric([key], value)
    return family


def _gauge(name: str, text: str, value: float) -> Metric:
    family = GaugeMetricFamily(name, text)
    family.add_metric([], value)
    return family


def _gauges(name: str, text: str, label: str, values: Mapping[str, int]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=[label])
    for key, value in sorted(values.items()):
        family.add_metric([key], value)
    return family


def _tau(learnt: Mapping[Hashable, float]) -> Metric:
    family = GaugeMetricFamily("talaria_router_tau_seconds", "Reservation timeout, learnt", labels=["tenant", "model"])
    for of, tau_s in learnt.items():
        assert isinstance(of, tuple)
        family.add_metric([str(part) for part in of], tau_s)
    return family


def _health(healths: Mapping[str, str]) -> Metric:
    family = GaugeMetricFamily("talaria_router_instance_ok", "1: fit for new calls by age", labels=["instance"])
    for iid, health in healths.items():
        family.add_metric([iid], float(health == "ok"))
    return family
