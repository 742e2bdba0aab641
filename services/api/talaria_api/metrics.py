"""Prometheus metrics of the api."""

from __future__ import annotations

from talaria_common.metrics import Metrics, render


class ApiMetrics:
    """Counters and histograms; every method is cheap enough for the token path."""

    def __init__(self) -> None:
        m = Metrics("api")
        self.registry = m.registry
        self._requests = m.labelled_tally(
            "requests", "Requests that ended, by endpoint and HTTP status", ["endpoint", "status"]
        )
        self._broken = m.counter("broken_streams", "Streams that ended with an error after their headers", ["code"])
        self._replaced = m.counter("replacements", "Calls placed again, by reason", ["reason"])
        self._in_flight = m.tally("in_flight", "Calls that have not ended", falls=True)
        self._ttft = m.histogram("ttft_seconds", "From the end of the body to the first token", ["endpoint"])
        self._bytes_in = m.tally("body_bytes", "Bytes of the bodies of calls")
        self._bytes_out = m.tally("sent_bytes", "Bytes of the answers of calls")
        self._batches = m.tally("batches", "Batches of frames that came from instances")
        self._frames = m.tally("frames", "Frames that came from instances")
        self._frame_bytes = m.tally("frame_bytes", "Bytes of those batches")
        self._unreadable = m.counter("unreadable", "Bus messages that did not fit their schema")
        self._bus = m.gauge("bus_connected", "1 while the bus can be reached")

    def request(self, endpoint: str, status: int) -> None:
        """A request has ended."""
        self._requests.add(endpoint, str(status))

    def broken(self, code: str) -> None:
        """A stream has ended with an error frame."""
        self._broken.labels(code).inc()

    def replaced(self, reason: str) -> None:
        """A call is placed again."""
        self._replaced.labels(reason).inc()

    def started(self, body_bytes: int) -> None:
        """A valid call begins."""
        self._in_flight.n += 1
        self._bytes_in.n += body_bytes

    def ended(self, sent_bytes: int) -> None:
        """A call that was `started` has ended."""
        self._in_flight.n -= 1
        self._bytes_out.n += sent_bytes

    def first_token(self, endpoint: str, seconds: float) -> None:
        """A call's first token came after `seconds`."""
        self._ttft.labels(endpoint).observe(seconds)

    def batch(self, frames: int, size: int) -> None:
        """A batch of frames came."""
        self._batches.n += 1
        self._frames.n += frames
        self._frame_bytes.n += size

    def unreadable(self) -> None:
        """A bus message could not be decoded."""
        self._unreadable.inc()

    def bus(self, connected: bool) -> None:
        """The bus connection changed."""
        self._bus.set(connected)

    def text(self) -> bytes:
        """The exposition."""
        return render(self.registry)
