"""/metrics, /livez and /readyz for parts that have no HTTP server of their own."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from http import HTTPStatus

import structlog
from prometheus_client import CollectorRegistry

from talaria_common import metrics

log = structlog.get_logger(__name__)

_READ_WITHIN_S = 5.0
_MAX_HEAD_BYTES = 16 << 10


class ObservabilityServer:
    """Answers GET and HEAD of three paths, one request per connection.

    Args:
        registry: what /metrics shows.
        reasons: what stands in the way of being ready, for people; empty: ready. Called on each /readyz.
    """

    def __init__(self, registry: CollectorRegistry, reasons: Callable[[], list[str]]) -> None:
        self._registry = registry
        self._reasons = reasons
        self._server: asyncio.Server | None = None

    async def start(self, host: str, port: int | None) -> int:
        """Listen; returns the port. None or 0: do not listen at all, and return 0. Raises OSError if it is taken."""
        if not port:
            return 0
        return await self.listen(host, port)

    async def listen(self, host: str, port: int) -> int:
        """Listen on `port`, 0 for a free one; returns the port."""
        self._server = await asyncio.start_server(self._serve, host, port, limit=_MAX_HEAD_BYTES)
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Stop listening."""
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()
            self._server = None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_READ_WITHIN_S):
                head = await reader.readuntil(b"\r\n\r\n")
            method, path = _request_line(head)
            status, content_type, body = self._answer(method, path)
            writer.write(
                f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: {content_type}\r\n"
                f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode()
            )
            if method != "HEAD":
                writer.write(body)
            await writer.drain()
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, TimeoutError, OSError, ValueError):
            pass  # not HTTP, too slow or gone: nothing to answer
        except Exception:
            log.exception("the observability endpoint failed")
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    def _answer(self, method: str, path: str) -> tuple[HTTPStatus, str, bytes]:
        if method not in ("GET", "HEAD"):
            return HTTPStatus.METHOD_NOT_ALLOWED, "text/plain", b"GET or HEAD\n"
        match path:
            case "/metrics":
                return HTTPStatus.OK, metrics.CONTENT_TYPE, metrics.render(self._registry)
            case "/livez":
                return HTTPStatus.OK, "application/json", b'{"live": true}\n'
            case "/readyz":
                reasons = self._reasons()
                status = HTTPStatus.SERVICE_UNAVAILABLE if reasons else HTTPStatus.OK
                body = json.dumps({"ready": not reasons, "reasons": reasons}).encode() + b"\n"
                return status, "application/json", body
        return HTTPStatus.NOT_FOUND, "text/plain", b"/metrics, /livez or /readyz\n"


def _request_line(head: bytes) -> tuple[str, str]:
    method, target, version = head.split(b"\r\n", 1)[0].decode("ascii").split(" ")
    if not version.startswith("HTTP/1."):
        raise ValueError(version)
    return method, target.partition("?")[0]
