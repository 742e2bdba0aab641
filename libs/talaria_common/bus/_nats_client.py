"""nats-py's client with two of its faults mended (seen in 2.16; tests/common/bus/test_nats_traps.py shows both)."""

from __future__ import annotations

import asyncio
from typing import Any

import nats.aio.client
from nats.aio.client import Client
from nats.protocol.parser import PING_OP

READ_BUFFER_BYTES = 1 << 20
"""nats-py reads 32 KB at a time, which costs a third of the CPU of a 400 KB hop. It has no option for it."""
nats.aio.client.DEFAULT_BUFFER_SIZE = READ_BUFFER_BYTES


class MendedClient(Client):  # type: ignore[misc] # nats-py's types are not followed
    """The client whose pings keep their place among the commands, and whose read loop outlives a late pong."""

    async def _send_ping(self, future: asyncio.Future[Any] | None = None) -> None:
        """Queue a PING behind what was queued before.

        The original writes it straight to the socket, ahead of commands that wait for the flusher: `flush` then
        returns before they are sent, and a drain loses what arrives between its early pong and its late UNSUB.
        """
        self._pongs.append(asyncio.get_running_loop().create_future() if future is None else future)
        await self._send_command(PING_OP + b"\r\n")
        await self._flush_pending()

    async def _process_pong(self) -> None:
        """Match a PONG with its PING.

        The original sets a result even on a future that its flush has given up on; the InvalidStateError ends the
        read loop without a word, and the connection is deaf from then on.
        """
        if self._pongs:
            future = self._pongs.pop(0)
            self._pongs_received += 1
            self._pings_outstanding = 0
            if not future.done():
                future.set_result(True)
