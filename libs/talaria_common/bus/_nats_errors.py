"""What nats-py raises, in terms of our tree."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import nats.errors
import nats.js.errors as js_errors

from talaria_common.errors import (
    BusError,
    BusTimeoutError,
    NoRespondersError,
    PayloadTooLargeError,
    TalariaError,
)

WRONG_LAST_SEQUENCE = frozenset({10071, 10164})
"""JetStream's codes for a lost compare-and-set."""
NAME_IN_USE = 10058
"""JetStream's code for a stream that exists with another configuration."""

_TABLE: tuple[tuple[type[BaseException], type[TalariaError], str], ...] = (
    (nats.errors.MaxPayloadError, PayloadTooLargeError, "larger than the message bus carries"),
    (nats.errors.NoRespondersError, NoRespondersError, "nobody listens"),
    (asyncio.TimeoutError, BusTimeoutError, "no answer in time"),
    (nats.errors.OutboundBufferLimitError, BusError, "not connected to the message bus, and the send buffer is full"),
    (nats.errors.ConnectionClosedError, BusError, "the connection to the message bus is closed"),
    (nats.errors.ConnectionDrainingError, BusError, "the connection to the message bus is closing"),
)


def translate(error: BaseException, what: str) -> TalariaError:
    """`error`, raised while doing `what`, as one of ours."""
    if isinstance(error, TalariaError):
        return error
    for theirs, ours, says in _TABLE:
        if isinstance(error, theirs):
            return ours(f"{what}: {says}")
    return BusError(f"{what}: {error}" if str(error) else f"{what}: {error!r}")


@contextmanager
def translated(what: str) -> Iterator[None]:
    """Raise ours where the block raises nats-py's."""
    try:
        yield
    except (nats.errors.Error, OSError) as e:  # TimeoutError is an OSError
        raise translate(e, what) from e


def not_ready(error: Exception) -> bool:
    """Whether JetStream said that it is not up (yet); nothing was done, so trying again is safe."""
    return isinstance(
        error, js_errors.ServiceUnavailableError | js_errors.NoStreamResponseError | nats.errors.NoRespondersError
    )


def not_ready_or_silent(error: Exception) -> bool:
    """`not_ready`, or no answer: for calls that may be repeated whether or not they were carried out."""
    return not_ready(error) or isinstance(error, asyncio.TimeoutError)
