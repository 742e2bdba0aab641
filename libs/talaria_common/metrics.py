"""Prometheus metrics: one registry per process, one namespace, a few standard bucket rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

NAMESPACE = "talaria"
CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4

SECONDS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
    120.0,
    300.0,
    600.0,
)
"""For `*_seconds`: from a bus hop to the longest call."""
MILLISECONDS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0, 1000.0, 2500.0, 10_000.0)
"""For `*_ms`: decisions, switches and cost terms."""
BYTES = tuple(float(1 << n) for n in range(8, 31, 2))
"""For `*_bytes`: 256 B to 1 GiB."""
TOKENS = tuple(float(1 << n) for n in range(0, 21, 2))
"""For `*_tokens`: 1 to 1 Mi."""


class Tally:
    """A plain number, read when somebody asks for /metrics: for what is counted per message or token.

    prometheus_client's own counters take a lock and three checks each time, a few microseconds in all.
    """

    __slots__ = ("_family", "_name", "_says", "n")

    def __init__(self, family: type[CounterMetricFamily | GaugeMetricFamily], name: str, says: str) -> None:
        self.n = 0
        """The number; whoever counts changes it."""
        self._family = family
        self._name = name
        self._says = says

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        """For the registry."""
        yield self._family(self._name, self._says, value=self.n)


class LabelledTally:
    """The same by labels: `add` one row at a time. Labels must come from a small set."""

    __slots__ = ("_labels", "_name", "_rows", "_says")

    def __init__(self, name: str, says: str, labels: Sequence[str]) -> None:
        self._name = name
        self._says = says
        self._labels = tuple(labels)
        self._rows: dict[tuple[str, ...], int] = {}

    def add(self, *labels: str) -> None:
        """One more."""
        self._rows[labels] = self._rows.get(labels, 0) + 1

    def put(self, count: int, *labels: str) -> None:
        """So many: of what somebody else counts."""
        self._rows[labels] = count

    def collect(self) -> Iterator[CounterMetricFamily]:
        """For the registry."""
        family = CounterMetricFamily(self._name, self._says, labels=self._labels)
        for labels, count in self._rows.items():
            family.add_metric(labels, count)
        yield family


class Metrics:
    """Makes metrics named talaria_<subsystem>_<name> in one registry.

    Args:
        subsystem: "api", "router", ...
        process: also export CPU, memory, file descriptors and the Python version of this process.
    """

    def __init__(self, subsystem: str, *, process: bool = True) -> None:
        self.registry = CollectorRegistry(auto_describe=True)
        self._subsystem = subsystem
        if process:
            ProcessCollector(registry=self.registry)
            PlatformCollector(registry=self.registry)

    def counter(self, name: str, says: str, labels: Sequence[str] = ()) -> Counter:
        """A count that only rises; exported with the suffix _total."""
        return Counter(name, says, labels, namespace=NAMESPACE, subsystem=self._subsystem, registry=self.registry)

    def tally(self, name: str, says: str, *, falls: bool = False) -> Tally:
        """A counter, or with `falls` a gauge, that costs next to nothing to change."""
        family = GaugeMetricFamily if falls else CounterMetricFamily
        tally = Tally(family, f"{NAMESPACE}_{self._subsystem}_{name}", says)
        self.registry.register(tally)
        return tally

    def labelled_tally(self, name: str, says: str, labels: Sequence[str]) -> LabelledTally:
        """The same with labels."""
        tally = LabelledTally(f"{NAMESPACE}_{self._subsystem}_{name}", says, labels)
        self.registry.register(tally)
        return tally

    def gauge(self, name: str, says: str, labels: Sequence[str] = ()) -> Gauge:
        """A value that rises and falls."""
        return Gauge(name, says, labels, namespace=NAMESPACE, subsystem=self._subsystem, registry=self.registry)

    def histogram(
        self, name: str, says: str, labels: Sequence[str] = (), *, buckets: Sequence[float] | None = None
    ) -> Histogram:
        """A distribution. Buckets default to those of the unit that ends the name.

        Raises:
            ValueError: the name ends in no known unit and no buckets are given.
        """
        if buckets is None:
            units = {"seconds": SECONDS, "ms": MILLISECONDS, "bytes": BYTES, "tokens": TOKENS}
            buckets = units.get(name.rpartition("_")[2])
            if buckets is None:
                raise ValueError(f"histogram {name!r}: end the name in one of {', '.join(units)}, or give buckets")
        return Histogram(
            name,
            says,
            labels,
            namespace=NAMESPACE,
            subsystem=self._subsystem,
            registry=self.registry,
            buckets=tuple(buckets),
        )


def render(registry: CollectorRegistry) -> bytes:
    """The text of /metrics."""
    return generate_latest(registry)
