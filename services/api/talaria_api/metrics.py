"""Prometheus metrics of the api, in a registry of its own: `main` composes, nothing is global."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_TTFT_BUCKETS = (0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class ApiMetrics:
    """Counters and histograms; every method is cheap enough for the token path."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry or CollectorRegistry()
        r = self.registry
        self._requests = Counter(
            "talaria_api_requests",
            "Requests that ended, by endpoint and HTTP status",
            ["endpoint", "status"],
            registry=r,
        )
        self._broken = Counter(
            "talaria_api_broken_streams", "Streams that ended with an error after their headers", ["code"], registry=r
        )
        self._replaced = Counter("talaria_api_replacements", "Calls placed again, by reason", ["reason"], registry=r)
        self._in_flight = Gauge("talaria_api_in_flight", "Calls that have not ended", registry=r)
        self._ttft = Histogram(
            "talaria_api_ttft_seconds",
            "From the end of the body to the first token",
            ["endpoint"],
            registry=r,
            buckets=_TTFT_BUCKETS,
        )
        self._bytes_in = Counter("talaria_api_body_bytes", "Bytes of request bodies", registry=r)
        self._bytes_out = Counter("talaria_api_sent_bytes", "Bytes of answers of calls", registry=r)
        self._batches = Counter("talaria_api_batches", "Batches of frames that came from instances", registry=r)
        self._frames = Counter("talaria_api_frames", "Frames that came from instances", registry=r)
        self._frame_bytes = Counter("talaria_api_frame_bytes", "Bytes of those batches", registry=r)
        self._unreadable = Counter("talaria_api_unreadable", "Bus messages that did not fit their schema", registry=r)
        self._bus = Gauge("talaria_api_bus_connected", "1 while the bus can be reached", registry=r)

    def request(self, endpoint: str, status: int) -> None:
        """A request has ended."""
        self._requests.labels(endpoint, str(status)).inc()

    def broken(self, code: str) -> None:
        """A stream has ended with an error frame."""
        self._broken.labels(code).inc()

    def replaced(self, reason: str) -> None:
        """A call is placed again."""
        self._replaced.labels(reason).inc()

    def started(self, body_bytes: int) -> None:
        """A valid call begins."""
        self._in_flight.inc()
        self._bytes_in.inc(body_bytes)

    def ended(self, sent_bytes: int) -> None:
        """A call that was `started` has ended."""
        self._in_flight.dec()
        self._bytes_out.inc(sent_bytes)

    def first_token(self, endpoint: str, seconds: float) -> None:
        """A call's first token came after `seconds`."""
        self._ttft.labels(endpoint).observe(seconds)

    def batch(self, frames: int, size: int) -> None:
        """A batch of frames came."""
        self._batches.inc()
        self._frames.inc(frames)
        self._frame_bytes.inc(size)

    def unreadable(self) -> None:
        """A bus message could not be decoded."""
        self._unreadable.inc()

    def bus(self, connected: bool) -> None:
        """The bus connection changed."""
        self._bus.set(connected)

    def text(self) -> bytes:
        """The exposition."""
        return generate_latest(self.registry)
