"""Errors as OpenAI's clients expect them: `{"error": {message, type, param, code}}`, with the headers that go along.

The error tree is `talaria_common.errors`; here stand only those that HTTP itself gives rise to.
"""

from __future__ import annotations

import math

import msgspec

from talaria_common.errors import (
    BadRequestError,
    OverloadedError,
    TalariaError,
    UnauthorizedError,
    UnavailableError,
)

RETRYABLE_STATUSES = frozenset({408, 409, 429})
"""Below 500, what openai-python retries by itself."""

Header = tuple[bytes, bytes]
_encode = msgspec.json.Encoder().encode


class RouteNotFoundError(BadRequestError):
    """No such path."""

    status, code = 404, "not_found"


class MethodNotAllowedError(BadRequestError):
    """The path exists, with other methods."""

    status, code = 405, "method_not_allowed"


class BodyTimeoutError(BadRequestError):
    """The body did not arrive in time."""

    status, code = 408, "request_timeout"


class HeadersTimeoutError(BadRequestError):
    """The headers did not arrive in time."""

    status, code = 408, "request_timeout"


class HeadersTooLargeError(BadRequestError):
    """The request line and headers are larger than the protocol allows."""

    status, code = 431, "headers_too_large"


class UnsupportedMediaTypeError(BadRequestError):
    """The body is not JSON by its own header, or is compressed."""

    status, code = 415, "unsupported_media_type"


class ClientGoneError(TalariaError):
    """The client closed the connection: nobody reads this, it is for counters and logs only."""

    status, code = 499, "client_gone"


class SlowClientError(TalariaError):
    """The client left more frames unread than we keep for it."""

    status, code = 503, "slow_client"


def body(error: TalariaError) -> bytes:
    """The JSON of `error`, without a newline."""
    shape = {"message": error.message, "type": error.kind, "param": error.param, "code": error.code}
    return _encode({"error": shape})


def headers(error: TalariaError, *, tokens_made: bool = False) -> list[Header]:
    """Headers that tell a client whether and when to try again.

    `tokens_made`: the answer had begun on an instance. A whole answer that broke may be asked for again, since the
    client has seen nothing of it; a stream never gets here then, its headers are gone.
    """
    out: list[Header] = []
    if error.retry_after_s is not None or isinstance(error, OverloadedError | UnavailableError):
        out.append((b"retry-after", b"%d" % max(1, math.ceil(error.retry_after_s or 1.0))))
    if isinstance(error, UnauthorizedError):
        out.append((b"www-authenticate", b'Bearer realm="talaria"'))
    if error.status >= 500 or error.status in RETRYABLE_STATUSES:
        again = error.status != 500 and not (error.status == 504 and tokens_made)
        out.append((b"x-should-retry", b"true" if again else b"false"))
    return out
