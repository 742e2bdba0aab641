"""Reading a JetStream stream from its beginning to its end, through a consumer that the server forgets by itself."""

from __future__ import annotations

import contextlib
import datetime as dt
from collections.abc import AsyncIterator
from typing import Any

import nats.errors
from nats.js import api

from talaria_common.bus._nats_errors import translated

BATCH = 500
FETCH_S = 5.0
_IDLE_S = 30.0
"""The server forgets the consumer this long after we have gone."""


async def read(js: Any, stream: str, subject: str, since_s: float | None) -> AsyncIterator[Any]:
    """The raw messages that `stream` holds on `subject` when this begins. Raises BusError."""
    start = {} if since_s is None else {"opt_start_time": dt.datetime.now(dt.UTC) - dt.timedelta(seconds=since_s)}
    config = api.ConsumerConfig(
        deliver_policy=api.DeliverPolicy.ALL if since_s is None else api.DeliverPolicy.BY_START_TIME,
        ack_policy=api.AckPolicy.NONE,
        inactive_threshold=_IDLE_S,
        mem_storage=True,
        **start,
    )
    with translated(f"stream {stream}"):
        consumer = await js.pull_subscribe(subject, stream=stream, config=config)
        try:
            left = (await consumer.consumer_info()).num_pending or 0
            while left > 0:
                batch = await _fetch(consumer, min(BATCH, left))
                if not batch:
                    return  # what was there has left by age or size meanwhile
                left -= len(batch)
                for message in batch:
                    yield message
        finally:
            with contextlib.suppress(nats.errors.Error):
                await consumer.unsubscribe()


async def _fetch(consumer: Any, count: int) -> list[Any]:
    try:
        return list(await consumer.fetch(count, timeout=FETCH_S))
    except nats.errors.TimeoutError:
        return []
