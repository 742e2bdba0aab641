"""The engine process's end of the socket: commands in, reports out, never blocking."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Iterable

from talaria_gpu.engine.ipc import Command, CommandUnpacker, Report, pack

_READ_BYTES = 1 << 20
_READS = 16


class LinkClosedError(Exception):
    """The I/O process is gone."""


class Link:
    """Framed messages over a connected stream socket. What the other side does not read yet waits in memory."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._unpacker = CommandUnpacker()
        self._out = bytearray()

    def fileno(self) -> int:
        """For select."""
        return self._sock.fileno()

    @property
    def pending_bytes(self) -> int:
        """Bytes that the other side has not taken yet."""
        return len(self._out)

    def receive(self) -> list[Command]:
        """The commands that have come. Raises LinkClosedError at the end of the stream."""
        commands: list[Command] = []
        for _ in range(_READS):
            try:
                data = self._sock.recv(_READ_BYTES)
            except (BlockingIOError, InterruptedError):
                break
            except OSError as e:
                raise LinkClosedError(str(e)) from e
            if not data:
                if commands:
                    break  # said before it closed; the next call finds the end again
                raise LinkClosedError("end of stream")
            commands += self._unpacker.feed(data)
            if len(data) < _READ_BYTES // 2:
                break
        return commands

    def send(self, reports: Iterable[Report]) -> None:
        """Send what the socket takes now and keep the rest. Raises LinkClosedError."""
        for report in reports:
            self._out += pack(report)
        self.flush()

    def flush(self) -> bool:
        """Send on; returns whether bytes moved. Raises LinkClosedError."""
        if not self._out:
            return False
        try:
            sent = self._sock.send(self._out)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as e:
            raise LinkClosedError(str(e)) from e
        del self._out[:sent]
        return sent > 0

    def drain(self, timeout_s: float) -> None:
        """Send everything, waiting for the other side for `timeout_s` at most. Raises LinkClosedError."""
        until = time.monotonic() + timeout_s
        while self._out and (left := until - time.monotonic()) > 0:
            select.select([], [self._sock], [], left)
            self.flush()

    def close(self) -> None:
        """Close the socket."""
        self._sock.close()
