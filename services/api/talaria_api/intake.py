"""Takes a request in: headers, body within the limits, time-out. Everything that is refused before the body is read."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping

from starlette.types import Receive

from talaria_api.errors import BodyTimeoutError, ClientGoneError, UnsupportedMediaTypeError
from talaria_common.errors import BadRequestError, PayloadTooLargeError
from talaria_common.settings import PRIORITY_RANGE

HEADROOM_BYTES = 16 << 10
"""Of the bus's limit, kept for the headers that travel beside the body."""
BODY_TIMEOUT_S = 60.0
PRIORITY_DIGITS = 8
TIMEOUT_HEADER = "X-Talaria-Timeout-S"
PRIORITY_HEADER = "X-Talaria-Priority"


def check_content_type(headers: Mapping[bytes, bytes]) -> None:
    """Raise UnsupportedMediaTypeError if the body is not JSON by its headers. No header at all counts as JSON."""
    kind = headers.get(b"content-type")
    if kind is not None:
        media = kind.partition(b";")[0].strip().lower()
        if media != b"application/json" and not (media.startswith(b"application/") and media.endswith(b"+json")):
            shown = media.decode("latin-1")
            raise UnsupportedMediaTypeError(f"content type {shown!r} is not supported: send application/json")
    encoding = headers.get(b"content-encoding", b"identity").strip().lower()
    if encoding not in (b"identity", b""):
        shown = encoding.decode("latin-1")
        raise UnsupportedMediaTypeError(f"content encoding {shown!r} is not supported: send the body as it is")


async def read_body(receive: Receive, headers: Mapping[bytes, bytes], limit_bytes: int) -> bytes:
    """The whole body.

    Raises:
        PayloadTooLargeError: above `limit_bytes`; by its Content-Length before anything is read.
        BodyTimeoutError: it took longer than BODY_TIMEOUT_S.
        ClientGoneError: the client went away meanwhile.
    """
    declared = headers.get(b"content-length", b"")
    if declared.isdigit() and int(declared) > limit_bytes:
        raise too_large(limit_bytes)
    chunks: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGoneError("the client went away while sending the body")
                chunk = message.get("body", b"")
                size += len(chunk)
                if size > limit_bytes:
                    raise too_large(limit_bytes)
                chunks.append(chunk)
                if not message.get("more_body", False):
                    return chunks[0] if len(chunks) == 1 else b"".join(chunks)
    except TimeoutError as e:
        raise BodyTimeoutError(f"the body did not arrive within {BODY_TIMEOUT_S:.0f} s") from e


def call_timeout_s(headers: Mapping[bytes, bytes], most_s: float) -> float:
    """Seconds that the caller allows: the time-out header, at most the configured one.

    Raises:
        BadRequestError: the header is not a positive number.
    """
    raw = headers.get(TIMEOUT_HEADER.lower().encode())
    if raw is None:
        return most_s
    try:
        value = float(raw)
    except ValueError:
        value = math.nan
    if not value > 0:
        raise BadRequestError(f"{TIMEOUT_HEADER} should be a positive number of seconds", param=TIMEOUT_HEADER)
    return min(value, most_s)


def call_priority(headers: Mapping[bytes, bytes], most: int) -> int:
    """How the call ranks among those that wait: the priority header, 0 without one. Higher goes first.

    Raises:
        BadRequestError: the header is no whole number from -PRIORITY_RANGE on, or above `most`, the tenant's highest.
    """
    raw = headers.get(PRIORITY_HEADER.lower().encode())
    if raw is None:
        return 0
    try:
        value = int(raw) if len(raw) <= PRIORITY_DIGITS else None
    except ValueError:
        value = None
    if value is None or not -PRIORITY_RANGE <= value <= PRIORITY_RANGE:
        message = f"{PRIORITY_HEADER} should be a whole number from {-PRIORITY_RANGE} to {PRIORITY_RANGE}"
        raise BadRequestError(message, param=PRIORITY_HEADER)
    if value > most:
        message = f"{PRIORITY_HEADER} may be {most} at most for this tenant (router.tenant_max_priority)"
        raise BadRequestError(message, param=PRIORITY_HEADER)
    return value


def too_large(limit_bytes: int) -> PayloadTooLargeError:
    """The error of a body above the limit."""
    return PayloadTooLargeError(f"the body is larger than {limit_bytes} bytes, the most that one call may have")
