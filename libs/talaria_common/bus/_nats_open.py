"""A connected nats-py client, or a clear reason within the time given."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import nats.errors

from talaria_common.bus._nats_client import MendedClient
from talaria_common.errors import BusError

Hooks = Callable[[Any], dict[str, Any]]
"""A client's callbacks, as nats-py's `connect` takes them."""
Reports = Callable[[Any, Exception], bool]
"""Takes a client's asynchronous error; False: it is not of the client in use, but of one that is connecting."""


async def open_client(options: dict[str, Any], timeout_s: float, *, hooks: Hooks, reports: Reports) -> Any:
    """A connected client. Raises BusError when the time is up, or at once when the user is refused."""
    loop = asyncio.get_running_loop()
    until = loop.time() + timeout_s
    while True:
        got = await _attempt(options, until - loop.time(), hooks, reports)
        if not isinstance(got, Exception):
            return got
        if _refused(got) or loop.time() >= until:
            raise BusError(f"cannot connect to the message bus at {options['servers']}: {got or repr(got)}") from got
        await asyncio.sleep(options["reconnect_time_wait"])


async def _attempt(options: dict[str, Any], timeout_s: float, hooks: Hooks, reports: Reports) -> Any:
    """A connected client, or what kept it from connecting."""
    client = MendedClient()
    refused: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    errors: list[Exception] = [TimeoutError("no answer in time")]

    async def on_error(e: Exception) -> None:
        if reports(client, e):
            return
        errors.append(e)
        if _refused(e) and not refused.done():
            refused.set_result(None)

    connecting = asyncio.ensure_future(client.connect(**options, error_cb=on_error, **hooks(client)))
    try:
        await asyncio.wait({connecting, refused}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if connecting.done():
            connecting.result()
            return client
    except (nats.errors.Error, OSError) as e:
        errors.append(e)
    finally:
        refused.cancel()
        while not connecting.done():
            # More than once: before Python 3.12 `wait_for`, inside nats-py, may lose a cancellation to a refused
            # connection, and the client would go on trying for ever.
            connecting.cancel()
            await asyncio.wait({connecting}, timeout=0.1)
        if not connecting.cancelled():
            connecting.exception()
    with contextlib.suppress(nats.errors.Error, OSError):
        await client.close()
    return next((e for e in errors if _refused(e)), errors[-1])


def _refused(error: Exception) -> bool:
    """Whether the server refused the user: nats-py has an exception for it, and also says so in a plain one."""
    return isinstance(error, nats.errors.Error) and "authorization" in str(error).lower()
